"""Blocks of a report: each can be written as HTML and as Markdown."""

import base64
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Protocol

SIGNATURE = b"\x89PNG\r\n\x1a\n"
NUMBER, STRONG = ' class="number"', ' class="strong"'


def plain(text: str) -> str:
    """Return text on one line in which Markdown finds nothing to interpret."""
    text = escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*\[\]|~])|(?<!\w)(_)|(_)(?!\w)", r"\\\g<0>", text)


class Block(Protocol):
    """A part of the page."""

    def html(self) -> str:
        """Return the block for the page."""

    def markdown(self, folder: Path) -> str:
        """Return the block for a file in that folder."""


@dataclass(frozen=True)
class Heading:
    """A heading of level 1, 2, …; `name` is its `id`."""

    level: int
    text: str
    name: str = ""

    def html(self) -> str:
        """Return <h1>, <h2>, …."""
        name = f' id="{escape(self.name)}"' if self.name else ""
        return f"<h{self.level}{name}>{escape(self.text)}</h{self.level}>"

    def markdown(self, folder: Path) -> str:
        """Return the text behind as many # as its level."""
        return f"{'#' * self.level} {plain(self.text)}"


@dataclass(frozen=True)
class Text:
    """A paragraph; `kind` is a CSS class, "warning" among them."""

    text: str
    kind: str = ""

    def html(self) -> str:
        """Return <p>; a warning says that it is one."""
        word = "<strong>Caution:</strong> " if self.kind == "warning" else ""
        kind = f' class="{self.kind}"' if self.kind else ""
        return f"<p{kind}>{word}{escape(self.text)}</p>"

    def markdown(self, folder: Path) -> str:
        """Return a paragraph, quoted if it is a warning."""
        return ("> **Caution:** " if self.kind == "warning" else "") + plain(self.text)


@dataclass(frozen=True)
class Headline:
    """The accuracy to cite, large.

    Args:
        value: the accuracy.
        meaning: of the value.
        beside: smaller ones: (value, meaning).
    """

    value: str
    meaning: str
    beside: Sequence[tuple[str, str]] = ()

    def html(self) -> str:
        """Return a box each."""
        others = "".join(
            f"<div><strong>{escape(value)}</strong><span>{escape(meaning)}</span></div>"
            for value, meaning in self.beside
        )
        first = f"<strong>{escape(self.value)}</strong><span>{escape(self.meaning)}</span>"
        return f'<div class="headline"><div class="cite">{first}</div>{others}</div>'

    def markdown(self, folder: Path) -> str:
        """Return a sentence each."""
        others = "".join(f" {plain(value)} {plain(meaning)}" for value, meaning in self.beside)
        return f"**{plain(self.value)}** {plain(self.meaning)}{others}"


@dataclass(frozen=True)
class Drawing:
    """An SVG of this package; Markdown has the table that goes with it instead."""

    svg: str

    def html(self) -> str:
        """Return the SVG."""
        return self.svg

    def markdown(self, folder: Path) -> str:
        """Return an empty text."""
        return ""


@dataclass(frozen=True)
class Picture:
    """A PNG file, embedded in the page and linked from Markdown."""

    path: Path
    caption: str

    def html(self) -> str:
        """Return a figure in its own size, smaller where the page is narrower."""
        content = self.path.read_bytes()
        if content[:8] != SIGNATURE or len(content) < 24:
            return Text(f"{self.path.name} is not a PNG image", "note").html()
        width, height = _size(content)
        data = base64.b64encode(content).decode()
        return (
            f'<figure><img src="data:image/png;base64,{data}" width="{width}" height="{height}" '
            f'alt="{escape(self.caption)}"><figcaption>{escape(self.caption)}</figcaption></figure>'
        )

    def markdown(self, folder: Path) -> str:
        """Return a link from the report's folder."""
        link = os.path.relpath(self.path.resolve(), folder.resolve()).replace(os.sep, "/")
        return f"![{plain(self.caption)}](<{link}>)"


def _size(png: bytes) -> tuple[int, int]:
    """Return width and height in the page's pixels, of which 96 are an inch."""
    width, height = struct.unpack(">II", png[16:24])
    at = png.find(b"pHYs", 0, 500)
    per_metre = int.from_bytes(png[at + 4 : at + 8], "big") if at > 0 else 0
    scale = 96 / (per_metre * 0.0254) if per_metre else 1.0
    return round(width * scale), round(height * scale)


@dataclass(frozen=True)
class Code:
    """Preformatted text."""

    text: str

    def html(self) -> str:
        """Return <pre>."""
        return f"<pre>{escape(self.text)}</pre>"

    def markdown(self, folder: Path) -> str:
        """Return the text fenced by more backticks than are in it."""
        longest = max(map(len, re.findall("`+", self.text)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}yaml\n{self.text.rstrip()}\n{fence}"


@dataclass(frozen=True)
class Details:
    """Blocks that unfold."""

    summary: str
    blocks: Sequence[Block] = field(default_factory=list)

    def html(self) -> str:
        """Return <details>, closed."""
        inner = "\n".join(block.html() for block in self.blocks)
        return f"<details><summary>{escape(self.summary)}</summary>\n{inner}\n</details>"

    def markdown(self, folder: Path) -> str:
        """Return the same tags, which GitHub knows."""
        inner = "\n\n".join(block.markdown(folder) for block in self.blocks)
        summary = f"<summary>{plain(self.summary)}</summary>"
        return f"<details>{summary}\n\n{inner}\n\n</details>"


@dataclass(frozen=True)
class Cell:
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
    span: tuple[float, float] | None = None

    def html(self, strong: bool) -> str:
        """Return the content of <td>."""
        text = escape(self.text)
        text = f'<a href="#{escape(self.link)}">{text}</a>' if self.link else text
        text = f"<strong>{text}</strong>" if strong and text else text
        text += f" <small>{escape(self.small)}</small>" if self.small else ""
        return text + (self._scale(*self.span) if self.span else "")

    def _scale(self, *span: float) -> str:
        low, high, point = (100 * min(max(x, 0.0), 1.0) for x in (*span, self.shade or 0.0))
        return (
            f'<span class="scale"><i style="left:{low:.1f}%;width:{high - low:.1f}%"></i>'
            f'<b style="left:{point:.1f}%"></b></span>'
        )

    def markdown(self, strong: bool) -> str:
        """Return the content on one line."""
        text = plain(self.text)
        text = f"**{text}**" if strong and text else text
        return text + (f" ({plain(self.small)})" if self.small and text else plain(self.small))


@dataclass(frozen=True)
class Table:
    """Rows under headings.

    Args:
        caption: above the table.
        columns: the headings; those that end in ">" are of columns of numbers.
        rows: of as many cells as there are columns; the first names the row.
        strong: numbers of the rows in bold type.
        kind: a CSS class.
    """

    caption: str
    columns: Sequence[Cell | str]
    rows: Sequence[Sequence[Cell | str]]
    strong: frozenset[int] = frozenset()
    kind: str = ""

    @property
    def headings(self) -> list[tuple[Cell, bool]]:
        """Each heading, and whether numbers are below it."""
        cells = [_cell(column) for column in self.columns]
        return [
            (Cell(cell.text.removesuffix(">"), cell.small), i > 0 and cell.text.endswith(">"))
            for i, cell in enumerate(cells)
        ]

    def html(self) -> str:
        """Return a table that scrolls by itself where the screen is narrow."""
        head = "".join(
            f'<th scope="col"{NUMBER if number else ""}>{cell.html(False)}</th>'
            for cell, number in self.headings
        )
        body = "\n".join(self._row(i, list(map(_cell, row))) for i, row in enumerate(self.rows))
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(self.caption)}">'
            f'<table class="{self.kind or "plain"}"><caption>{escape(self.caption)}</caption>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
        )

    def _row(self, i: int, cells: Sequence[Cell]) -> str:
        strong = i in self.strong
        written = [f'<th scope="row">{cells[0].html(strong)}</th>']
        for cell, (_, number) in zip(cells[1:], self.headings[1:], strict=True):
            shaded = cell.shade is not None and cell.span is None
            style = f' style="--share:{100 * (cell.shade or 0):.0f}%"' if shaded else ""
            written.append(f"<td{NUMBER if number else ''}{style}>{cell.html(strong)}</td>")
        return f"<tr{STRONG if strong else ''}>{''.join(written)}</tr>"

    def markdown(self, folder: Path) -> str:
        """Return a table of GitHub's kind, without the columns that only draw."""
        kept = [k for k, (cell, _) in enumerate(self.headings) if cell.text or k == 0]
        heads = [self.headings[k] for k in kept]
        rows = [
            [_cell(row[k]).markdown(i in self.strong) for k in kept]
            for i, row in enumerate(self.rows)
        ]
        rule = ["--:" if number else "---" for _, number in heads]
        lines = [[cell.markdown(False) for cell, _ in heads], rule, *rows]
        written = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        return f"{plain(self.caption)}\n\n{written}"


def _cell(value: Cell | str) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)
