"""Blocks of a report, each written as HTML and as Markdown."""

import base64
import os
import re
import struct
from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from lightning_rob.errors import visible

SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Block(NamedTuple):
    """A part of the report: HTML for the page, and Markdown."""

    html: str
    markdown: str


def plain(text: str) -> str:
    """Return text on one line in which Markdown finds nothing to interpret."""
    text = escape(visible(" ".join(text.split())), quote=False)
    return re.sub(r"([\\`*\[\]|~])|(?<!\w)(_)|(_)(?!\w)", r"\\\g<0>", text)


def _attribute(name: str, value: str) -> str:
    return f' {name}="{escape(value)}"' if value else ""


def heading(level: int, text: str, name: str = "") -> Block:
    """Return a heading of level 1, 2, …; `name` is its `id`."""
    html = f"<h{level}{_attribute('id', name)}>{escape(text)}</h{level}>"
    return Block(html, f"{'#' * level} {plain(text)}")


def paragraph(text: str, kind: str = "") -> Block:
    """Return a paragraph; `kind` is a CSS class."""
    return Block(f"<p{_attribute('class', kind)}>{escape(text)}</p>", plain(text))


def warning(text: str, kind: str = "Caution") -> Block:
    """Return a paragraph that asks for caution, or reports another `kind`; Markdown quotes it."""
    html = f'<p class="warning"><strong>{escape(kind)}:</strong> {escape(text)}</p>'
    return Block(html, f"> **{plain(kind)}:** {plain(text)}")


def headline(accuracies: Sequence[tuple[str, str]]) -> Block:
    """Return accuracies and their meanings in large print; the first is the one to cite."""
    first, *others = [
        f"<strong>{escape(value)}</strong><span>{escape(meaning)}</span>"
        for value, meaning in accuracies
    ]
    boxes = f'<div class="cite">{first}</div>' + "".join(f"<div>{box}</div>" for box in others)
    cited, *words = [plain(word) for pair in accuracies for word in pair]
    return Block(f'<div class="headline">{boxes}</div>', " ".join([f"**{cited}**", *words]))


def picture(path: Path, caption: str, folder: Path) -> Block:
    """Return a PNG file, embedded in the page and linked from Markdown in `folder`."""
    link = os.path.relpath(path.resolve(), folder.resolve()).replace(os.sep, "/")
    return Block(_embedded(path, escape(caption)), f"![{plain(caption)}](<{link}>)")


def _embedded(path: Path, caption: str) -> str:
    """Return a figure in its own size, smaller where the page is narrower."""
    content = path.read_bytes()
    if content[:8] != SIGNATURE or len(content) < 24:
        return paragraph(f"{path.name} is not a PNG image", "note").html
    width, height = _size(content)
    data = base64.b64encode(content).decode()
    return (
        f'<figure><img src="data:image/png;base64,{data}" width="{width}" height="{height}" '
        f'alt="{caption}"><figcaption>{caption}</figcaption></figure>'
    )


def _size(png: bytes) -> tuple[int, int]:
    """Return width and height in the page's pixels, of which 96 are an inch."""
    width, height = struct.unpack(">II", png[16:24])
    at = png.find(b"pHYs", 0, 500)
    per_metre = int.from_bytes(png[at + 4 : at + 8], "big") if at > 0 else 0
    scale = 96 / (per_metre * 0.0254) if per_metre else 1.0
    return round(width * scale), round(height * scale)


def code(text: str) -> Block:
    """Return preformatted text; Markdown fences it by more backticks than are in it."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Block(f"<pre>{escape(text)}</pre>", f"{fence}yaml\n{text.rstrip()}\n{fence}")


def details(summary: str, *blocks: Block) -> Block:
    """Return blocks that unfold; GitHub knows the tags in Markdown too."""
    html = "\n".join(block.html for block in blocks)
    markdown = "\n\n".join(block.markdown for block in blocks)
    return Block(
        f"<details><summary>{escape(summary)}</summary>\n{html}\n</details>",
        f"<details><summary>{plain(summary)}</summary>\n\n{markdown}\n\n</details>",
    )


class Cell(NamedTuple):
    """A cell of a table.

    Args:
        text: its content.
        small: more, in smaller print.
        link: the `id` of a section of the page.
        shade: a share in [0, 1] that colours the cell.
        span: two shares, drawn as a range on a scale with `shade` as the point in it.
    """

    text: str
    small: str = ""
    link: str = ""
    shade: float | None = None
    span: Sequence[float] | None = None

    def html(self, strong: bool = False) -> str:
        """Return the content of <td>."""
        text = escape(self.text)
        text = f'<a href="#{escape(self.link)}">{text}</a>' if self.link else text
        text = f"<strong>{text}</strong>" if strong and text else text
        text += f" <small>{escape(self.small)}</small>" if self.small else ""
        return text + (_scale(*self.span, self.shade or 0.0) if self.span else "")

    def markdown(self, strong: bool = False) -> str:
        """Return the content on one line."""
        text, small = plain(self.text), plain(self.small)
        if not text:
            return small
        return (f"**{text}**" if strong else text) + (f" ({small})" if small else "")


def _scale(*shares: float) -> str:
    low, high, point = (100 * min(max(share, 0.0), 1.0) for share in shares)
    return (
        f'<span class="scale"><i style="left:{low:.1f}%;width:{high - low:.1f}%"></i>'
        f'<b style="left:{point:.1f}%"></b></span>'
    )


def table(
    caption: str,
    columns: Sequence[object],
    rows: Sequence[Sequence[object]],
    strong: Collection[int] = (),
    kind: str = "plain",
) -> Block:
    """Return rows under headings; anything but a `Cell` is shown as text.

    Args:
        caption: above the table.
        columns: the headings; those that end in ">" are of columns of numbers.
        rows: of as many cells as there are columns; the first names the row.
        strong: numbers of the rows in bold type.
        kind: a CSS class.
    """
    heads = [_cell(column) for column in columns]
    sides = ["number" if cell.text.endswith(">") else "" for cell in heads]
    heads = [cell._replace(text=cell.text.removesuffix(">")) for cell in heads]
    cells = [list(map(_cell, row)) for row in rows]
    head = "".join(
        f'<th scope="col"{_attribute("class", side)}>{cell.html()}</th>'
        for cell, side in zip(heads, sides, strict=True)
    )
    body = "\n".join(_html_row(row, sides, i in strong) for i, row in enumerate(cells))
    html = (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{kind}"><caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )
    written = [[cell.markdown(i in strong) for cell in row] for i, row in enumerate(cells)]
    rule = ["--:" if side else "---" for side in sides]
    lines = [[cell.markdown() for cell in heads], rule, *written]
    shown = [k for k, cell in enumerate(heads) if cell.text or k == 0]  # others only draw
    markdown = "\n".join(f"| {' | '.join(line[k] for k in shown)} |" for line in lines)
    return Block(html, f"{plain(caption)}\n\n{markdown}")


def _cell(value: object) -> Cell:
    return value if isinstance(value, Cell) else Cell(str(value))


def _html_row(cells: Sequence[Cell], sides: Sequence[str], strong: bool) -> str:
    written = [f'<th scope="row">{cells[0].html(strong)}</th>']
    for cell, side in zip(cells[1:], sides[1:], strict=True):
        shaded = cell.shade is not None and cell.span is None
        style = f"--share:{100 * (cell.shade or 0):.0f}%" if shaded else ""
        attributes = _attribute("class", side) + _attribute("style", style)
        written.append(f"<td{attributes}>{cell.html(strong)}</td>")
    return f"<tr{_attribute('class', 'strong' if strong else '')}>{''.join(written)}</tr>"
