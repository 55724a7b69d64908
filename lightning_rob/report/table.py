"""Tables, written once for the page and once for Markdown."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

NUMBER, STRONG = ' class="number"', ' class="strong"'


def plain(text: str) -> str:
    """Text in which Markdown finds nothing to interpret, on one line."""
    text = escape(" ".join(text.split()), quote=False)
    return re.sub(r"([\\`*\[\]|~])|(?<!\w)(_)|(_)(?!\w)", r"\\\g<0>", text)


@dataclass(frozen=True)
class Cell:
    """What is in a table's cell.

    Args:
        text: what it says.
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
        """What stands between <td> and </td>."""
        text = escape(self.text)
        text = f'<a href="#{escape(self.link)}">{text}</a>' if self.link else text
        text = f"<strong>{text}</strong>" if strong and text else text
        text += f" <small>{escape(self.small)}</small>" if self.small else ""
        return text + (self._scale() if self.span else "")

    def _scale(self) -> str:
        low, high = (100 * min(max(end, 0.0), 1.0) for end in self.span or (0, 0))
        point = 100 * min(max(self.shade or 0.0, 0.0), 1.0)
        return (
            f'<span class="scale"><i style="left:{low:.1f}%;width:{high - low:.1f}%"></i>'
            f'<b style="left:{point:.1f}%"></b></span>'
        )

    def markdown(self, strong: bool) -> str:
        """The same on one line."""
        text = plain(self.text)
        text = f"**{text}**" if strong and text else text
        return text + (f" ({plain(self.small)})" if self.small and text else plain(self.small))


@dataclass(frozen=True)
class Table:
    """Rows under headings.

    Args:
        caption: what it shows.
        columns: the headings; those that end in ">" are of columns of numbers.
        rows: as many cells each; the first names the row.
        strong: rows that stand out.
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
        """A table that scrolls by itself where the screen is narrow."""
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
            kind = NUMBER if number else ""
            written.append(f"<td{kind}{style}>{cell.html(strong)}</td>")
        return f"<tr{STRONG if strong else ''}>{''.join(written)}</tr>"

    def markdown(self, folder: Path) -> str:
        """A table of GitHub's kind; columns that only draw are left out."""
        kept = [k for k, (cell, _) in enumerate(self.headings) if cell.text or k == 0]
        heads = [self.headings[k] for k in kept]
        rows = [
            [_cell(row[k]).markdown(i in self.strong) for k in kept]
            for i, row in enumerate(self.rows)
        ]
        rule = ["--:" if number else "---" for _, number in heads]
        whole = [[cell.markdown(False) for cell, _ in heads], rule, *rows]
        written = "\n".join(f"| {' | '.join(row)} |" for row in whole)
        return f"{plain(self.caption)}\n\n{written}"


def _cell(value: Cell | str) -> Cell:
    return value if isinstance(value, Cell) else Cell(value)
