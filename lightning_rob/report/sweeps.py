"""What a sweep recorded: accuracy by the value of a variable."""

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_rob.report.arguments import short, threat_of
from lightning_rob.report.blocks import Block, Heading, Text
from lightning_rob.report.card import card
from lightning_rob.report.outcome import few
from lightning_rob.report.records import Fields, Record, record
from lightning_rob.report.table import Cell, Table
from lightning_rob.report.words import NONE, between, extent, line_name, percent

Point = tuple[str, Record]  # the value as a text, and what was found there


def sweeps(lines: Sequence[Fields], level: int) -> Iterator[Block]:
    """A table for each variable, and what the attacks were."""
    measured = [fields for fields in lines if "study" not in fields]
    for variable in dict.fromkeys(str(fields.get("variable", "value")) for fields in measured):
        mine = [f for f in measured if str(f.get("variable", "value")) == variable]
        mine = _of_the_last_study(mine, lines, variable)
        points = list(_points(mine))
        if points:
            yield Heading(level, f"Sweep over {variable}")
            yield from (Text(text, "warning") for text in few([r for _, r in points]))
            yield _table(variable, points)
        first = [r for value, r in points if value == points[0][0]]
        if any(r.an_attack and r.attack for r in first):
            at = f"Every argument of every attack, at {variable} {points[0][0]}"
            yield card(first, at)


def _of_the_last_study(
    mine: Sequence[Fields], lines: Sequence[Fields], variable: str
) -> list[Fields]:
    """What the last sweep that came to its end had in its table; all if none did."""
    studies = [f["study"] for f in lines if isinstance(f.get("study"), dict)]
    ended = [study for study in studies if study.get("variable") == variable]
    if not ended:
        return list(mine)
    points = {(value, key) for value, key in ended[-1]["points"]}
    return [f for f in mine if (f.get("value"), f.get("reuse", {}).get("key")) in points]


def _points(lines: Sequence[Fields]) -> Iterator[Point]:
    """Lines in the order of their values; foreign ones are passed over."""
    for fields in sorted(lines, key=lambda fields: _order(fields.get("value"))):
        found = record({"stage": "test"} | fields)
        if found and isinstance(fields.get("value"), int | float | str):
            yield _label(fields["value"]), found


def _order(value: Any) -> tuple[bool, float]:
    number = isinstance(value, int | float)
    return not number, float(value) if number else 0.0


def _label(value: float | str) -> str:
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value)) if whole else short(str(value))


def _table(variable: str, points: Sequence[Point]) -> Table:
    """A row per value and a column per attack; what was measured again counts once."""
    at = {(value, r.key): r for value, r in points}
    keys = sorted(dict.fromkeys(r.key for _, r in points), key=_clean_first)
    threats = {r.key: threat_of(r.threat) if variable != "eps" else "" for _, r in points}
    heads = [Cell(f"{line_name(key)}>", small=threats[key]) for key in keys]
    rows: list[list[Cell | str]] = [
        [value, *(_figure(at.get((value, key))) for key in keys)]
        for value in dict.fromkeys(value for value, _ in points)
    ]
    n = extent([r.n for _, r in points])
    caption = f"Accuracy on {n} test images by {variable}, with 95 % intervals"
    return Table(caption, [variable, *heads], rows)


def _clean_first(key: tuple[str, str]) -> int:
    return {"clean": 0, "worst": 2}.get(key[0], 1)


def _figure(found: Record | None) -> Cell:
    return Cell(percent(found.accuracy), small=between(found)) if found else Cell(NONE)
