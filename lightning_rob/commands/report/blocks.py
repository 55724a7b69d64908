"""Parts of a report as plain data, and the templates that write them as HTML and Markdown."""

import base64
import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple, get_args

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    Template,
    TemplateError,
    select_autoescape,
)
from markupsafe import Markup

from lightning_rob.runtime.errors import InputError, visible

NONE = "\N{EN DASH}"
WHOLE = "full_defense"  # the target that is the complete defense
WORST = ("worst", WHOLE)
Point = tuple[float, float]
Interval = Sequence[float] | None  # two shares; None where they are not known


class Heading(NamedTuple):
    """A heading of level 1, 2, …; `name` is its `id`."""

    level: int
    text: str
    name: str = ""


class Paragraph(NamedTuple):
    """A paragraph; `kind` is a CSS class."""

    text: str
    kind: str = ""


class Warned(NamedTuple):
    """A paragraph that asks for caution, or reports another `kind`."""

    text: str
    kind: str = "Caution"


class Headline(NamedTuple):
    """Accuracies and their meanings in large print; the first is the one to cite."""

    accuracies: Sequence[tuple[str, str]]


class Picture(NamedTuple):
    """A PNG file, which the page embeds and Markdown links."""

    caption: str
    link: str  # path from the folder of the report
    data: str  # content in base 64


class Code(NamedTuple):
    """Preformatted YAML, which Markdown fences by more backticks than stand together in it."""

    text: str

    @property
    def fence(self) -> str:
        return "`" * max(3, 1 + max(map(len, re.findall("`+", self.text)), default=0))


class Details(NamedTuple):
    """Blocks that unfold; GitHub knows the tags in Markdown too."""

    summary: str
    blocks: Sequence["Block"]


class Line(NamedTuple):
    """A line of a figure, in the colour of a CSS variable; `band` is an area around it."""

    name: str
    value: str
    color: str
    points: Sequence[Point]
    band: Sequence[Point]


class Curve(NamedTuple):
    """A figure with a legend, which the page alone shows."""

    lines: Sequence[Line]  # in a box of 600 by 200
    ticks: Sequence[tuple[float, int]]  # place and number
    by: str  # text below the ticks
    caption: str


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    small: str = ""  # more, in smaller print
    link: str = ""  # the `id` of a section of the page


class Table(NamedTuple):
    """Rows under headings, made by `table`."""

    caption: str
    heads: Sequence[Cell]
    numeric: Sequence[bool]
    rows: Sequence[Sequence[Cell]]
    strong: Collection[int]
    kind: str


Block = Heading | Paragraph | Warned | Headline | Picture | Code | Details | Curve | Table


def picture(path: Path, caption: str, folder: Path) -> Picture:
    """Return a PNG file for a report in `folder`."""
    link = os.path.relpath(path.resolve(), folder.resolve()).replace(os.sep, "/")
    return Picture(caption, link, base64.b64encode(path.read_bytes()).decode())


def table(
    caption: str,
    columns: Sequence[object],
    rows: Iterable[Sequence[object]],
    strong: Collection[int] = (),
    kind: str = "plain",
) -> Table:
    """Return a table of texts and cells; a heading that ends in ">" is above numbers."""
    given, *cells = (
        [value if isinstance(value, Cell) else Cell(str(value)) for value in row]
        for row in (columns, *rows)
    )
    heads = [Cell(head.text.removesuffix(">"), head.small) for head in given]
    numeric = [head.text.endswith(">") for head in given]
    return Table(caption, heads, numeric, cells, strong, kind)


def percent(share: float | None) -> str:
    """Return a share with one digit after the point; a dash where it is not known."""
    return NONE if share is None or not math.isfinite(share) else f"{share:.1%}"


def between(interval: Interval) -> str:
    """Return an interval; an empty text where it is unknown."""
    return f"{interval[0]:.1%} … {interval[1]:.1%}" if interval else ""


def accuracy_cell(share: float | None, interval: Interval = None) -> Cell:
    """Return an accuracy above its interval."""
    return Cell(percent(share), between(interval))


def line_name(key: tuple[str, str]) -> str:
    """Return the attack, and its target unless that is the whole defense."""
    return key[0] if key[1] == WHOLE else f"{key[0]} on {key[1].replace('_', ' ')}"


def listed(words: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def extent(counts: Sequence[int]) -> str:
    """Return one count, or the smallest and the largest."""
    return " to ".join(f"{n:,}" for n in sorted({min(counts), max(counts)})) if counts else ""


def split_of(stage: str) -> str:
    """Return the split that a stage evaluates."""
    return {"val": "validation"}.get(stage, stage)


def plain(text: object) -> str:
    """Return text on one line in which Markdown finds nothing to interpret."""
    line = escape(visible(" ".join(str(text).split())), quote=False)
    return re.sub(r"([\\`*\[\]|~])|(?<!\w)(_)|(_)(?!\w)", r"\\\g<0>", line)


EXTENDED = '{% extends "page.html" %}'
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["plain"] = plain
TEMPLATES.filters["points"] = lambda points: " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
# The templates ask for the class of a block by its name: {% if block is Heading %}.
for each in get_args(Block):
    TEMPLATES.tests[each.__name__] = lambda block, kind=each: isinstance(block, kind)


def page_template(path: Path | None) -> Template:
    """Return the template of a page: the shipped one, or a user's, which may extend it."""
    try:
        return TEMPLATES.from_string(path.read_text("utf-8") if path else EXTENDED)
    except (OSError, ValueError, TemplateError) as error:
        raise InputError(f"the template {path} cannot be used: {error}") from error


def html(blocks: Iterable[Block]) -> Markup:
    """Return blocks as a part of a page."""
    return Markup(TEMPLATES.get_template("blocks.html").render(blocks=list(blocks)))


def markdown(blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown, which has no curves."""
    shown = [block for block in blocks if not isinstance(block, Curve)]
    return TEMPLATES.get_template("blocks.md").render(blocks=shown)
