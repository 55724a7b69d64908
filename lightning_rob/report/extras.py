"""What only some runs have: a sweep, matrices of who falls with whom, pictures."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_rob.report.arguments import short, threat_of
from lightning_rob.report.blocks import Block, Heading, Picture, Text
from lightning_rob.report.records import Fields, interval
from lightning_rob.report.runs import SWEEP, Run
from lightning_rob.report.sweeps import sweeps
from lightning_rob.report.table import Cell, Table
from lightning_rob.report.words import images, percent, split_of

LONG = 60


def sweep(run: Run, pictures: list[Path], level: int) -> Iterator[Block]:
    """The tables of sweeps and their figures, which are taken from the pictures."""
    yield from sweeps(run.sweep, level)
    yield from _figures(pictures, SWEEP)


def _said(key: str, value: Any) -> str:
    """A field of a foreign record as text; empty where it is nothing for a table."""
    if isinstance(value, bool | str):
        return short(str(value)) if len(str(value)) <= LONG else ""
    if isinstance(value, int | float):
        return percent(value) if key == "accuracy" else short(str(value))
    return ""


def matrices(run: Run, pictures: list[Path], level: int) -> Iterator[Block]:
    """Each attack's matrix, and its figure, which is taken from the pictures."""
    if not run.matrices:
        return
    yield Heading(level, "Who falls with whom")
    yield Text("Each member is attacked alone, and all members are asked.")
    for fields in run.matrices:
        rows: list[list[Cell | str]] = [
            [f"member {i + 1} answers", *(_cell(fields, i, j) for j in range(len(row)))]
            for i, row in enumerate(fields["matrix"])
        ]
        columns = ["answer", *(f"member {j} attacked>" for j in range(1, len(rows[0])))]
        yield Table(_caption(fields), columns, rows, kind="matrix")
    yield from _figures(pictures, "transfer")


def _caption(fields: Fields) -> str:
    attack, stage, n = (fields.get(key) for key in ("name", "stage", "n"))
    of = f"{images(n)} {split_of(str(stage))}" if isinstance(n, int) else split_of(str(stage))
    within = f" ({threat_of(str(fields['threat']))})" if "threat" in fields else ""
    when = "" if stage == "test" else f" at epoch {fields.get('epoch')}"
    return f"{attack}{within}: accuracy on {of} images{when}"


def _cell(fields: Fields, i: int, j: int) -> Cell:
    """An accuracy with its interval, where one is told."""
    share = float(fields["matrix"][i][j])
    try:
        span = interval(fields["intervals"][i][j])
    except (KeyError, IndexError, TypeError):
        span = None
    small = f"{span[0]:.1%} … {span[1]:.1%}" if span else ""
    return Cell(percent(share), small, shade=share if math.isfinite(share) else None)


def votes(run: Run, level: int) -> Iterator[Block]:
    """The accuracy under each attack by every voting rule, a row for each ensemble."""
    if not run.votes:
        return
    yield Heading(level, "All voting rules, from the same votes")
    rules = list(dict.fromkeys(str(fields["rule"]) for fields in run.votes))
    rows: dict[tuple[Any, ...], dict[str, Cell]] = {}
    for fields in run.votes:
        key = tuple(fields.get(key) for key in ("name", "ensemble", "members", "dissimilarity"))
        share, (low, high) = float(fields["accuracy"]), fields["interval"]
        cell = Cell(percent(share), f"{low:.1%} … {high:.1%}", shade=share)
        rows.setdefault(key, {})[str(fields["rule"])] = cell
    table = [
        [str(name), str(ensemble), str(members), f"{distance:.3f}" if distance else ""]
        + [cells.get(rule, Cell("")) for rule in rules]
        for (name, ensemble, members, distance), cells in rows.items()
    ]
    columns = ["attack", "ensemble", "members>", "dissimilarity>", *(f"{rule}>" for rule in rules)]
    first = run.votes[0]
    caption = f"Accuracy on {images(first['n'])} {split_of(str(first['stage']))} images"
    yield Table(caption, columns, table, kind="matrix")


def gallery(run: Run, pictures: list[Path], level: int) -> Iterator[Block]:
    """All other pictures, each with what was recorded under its name."""
    if pictures:
        yield Heading(level, "Pictures")
    for path in pictures:
        fields = run.others.get(path.stem, {})
        said = {key: _said(key, value) for key, value in fields.items() if key != "name"}
        told = ", ".join(f"{key} {text}" for key, text in said.items() if text)
        yield Picture(path, ": ".join(filter(None, [name(path), told])))


def name(path: Path) -> str:
    """A file's name as words."""
    return path.stem.replace("_", " ")


def _figures(pictures: list[Path], prefix: str) -> Iterator[Block]:
    for path in [path for path in pictures if path.name.startswith(prefix)]:
        pictures.remove(path)
        yield Picture(path, name(path))
