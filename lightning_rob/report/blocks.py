"""What a report is made of: each block can be written as HTML and as Markdown."""

import base64
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Protocol

from lightning_rob.report.table import plain

SIGNATURE = b"\x89PNG\r\n\x1a\n"


class Block(Protocol):
    """A part of the page."""

    def html(self) -> str:
        """For the page."""

    def markdown(self, folder: Path) -> str:
        """For a file in that folder."""


@dataclass(frozen=True)
class Heading:
    """A heading of level 1, 2, …; `name` is its `id`."""

    level: int
    text: str
    name: str = ""

    def html(self) -> str:
        """<h1>, <h2>, …."""
        name = f' id="{escape(self.name)}"' if self.name else ""
        return f"<h{self.level}{name}>{escape(self.text)}</h{self.level}>"

    def markdown(self, folder: Path) -> str:
        """As many #."""
        return f"{'#' * self.level} {plain(self.text)}"


@dataclass(frozen=True)
class Text:
    """A paragraph; `kind` is a CSS class, "warning" among them."""

    text: str
    kind: str = ""

    def html(self) -> str:
        """<p>, with the word for it where it is a warning."""
        word = "<strong>Caution:</strong> " if self.kind == "warning" else ""
        kind = f' class="{self.kind}"' if self.kind else ""
        return f"<p{kind}>{word}{escape(self.text)}</p>"

    def markdown(self, folder: Path) -> str:
        """A paragraph, or a quoted one."""
        return ("> **Caution:** " if self.kind == "warning" else "") + plain(self.text)


@dataclass(frozen=True)
class Headline:
    """The figure to cite, large.

    Args:
        value: the figure.
        says: what it is.
        beside: smaller figures: (value, what it is).
    """

    value: str
    says: str
    beside: Sequence[tuple[str, str]] = ()

    def html(self) -> str:
        """A box each."""
        others = "".join(
            f"<div><strong>{escape(value)}</strong><span>{escape(says)}</span></div>"
            for value, says in self.beside
        )
        first = f"<strong>{escape(self.value)}</strong><span>{escape(self.says)}</span>"
        return f'<div class="headline"><div class="cite">{first}</div>{others}</div>'

    def markdown(self, folder: Path) -> str:
        """A sentence each."""
        others = "".join(f" {plain(value)} {plain(says)}" for value, says in self.beside)
        return f"**{plain(self.value)}** {plain(self.says)}{others}"


@dataclass(frozen=True)
class Drawing:
    """SVG of our own making, in Markdown left to the table that goes with it."""

    svg: str

    def html(self) -> str:
        """As it is."""
        return self.svg

    def markdown(self, folder: Path) -> str:
        """Nothing."""
        return ""


@dataclass(frozen=True)
class Picture:
    """A PNG file, embedded in the page and linked from Markdown."""

    path: Path
    caption: str

    def html(self) -> str:
        """A figure in its own size, smaller where the page is narrower."""
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
        """A link from where the report lies."""
        where = os.path.relpath(self.path.resolve(), folder.resolve()).replace(os.sep, "/")
        return f"![{plain(self.caption)}](<{where}>)"


def _size(png: bytes) -> tuple[int, int]:
    """Width and height in the page's pixels, of which 96 are an inch."""
    width, height = struct.unpack(">II", png[16:24])
    at = png.find(b"pHYs", 0, 500)
    per_metre = int.from_bytes(png[at + 4 : at + 8], "big") if at > 0 else 0
    scale = 96 / (per_metre * 0.0254) if per_metre else 1.0
    return round(width * scale), round(height * scale)


@dataclass(frozen=True)
class Code:
    """Text as it is."""

    text: str

    def html(self) -> str:
        """<pre>."""
        return f"<pre>{escape(self.text)}</pre>"

    def markdown(self, folder: Path) -> str:
        """Fenced by more backticks than are in it."""
        longest = max(map(len, re.findall("`+", self.text)), default=0)
        fence = "`" * max(3, longest + 1)
        return f"{fence}yaml\n{self.text.rstrip()}\n{fence}"


@dataclass(frozen=True)
class Details:
    """Blocks that unfold."""

    summary: str
    blocks: Sequence[Block] = field(default_factory=list)

    def html(self) -> str:
        """<details>, closed."""
        inner = "\n".join(block.html() for block in self.blocks)
        return f"<details><summary>{escape(self.summary)}</summary>\n{inner}\n</details>"

    def markdown(self, folder: Path) -> str:
        """The same tags, which GitHub knows."""
        inner = "\n\n".join(block.markdown(folder) for block in self.blocks)
        summary = f"<summary>{plain(self.summary)}</summary>"
        return f"<details>{summary}\n\n{inner}\n\n</details>"
