"""Several runs side by side, and what keeps their figures from being compared."""

from collections.abc import Iterator, Mapping, Sequence

from lightning_rob.report.arguments import call
from lightning_rob.report.blocks import Block, Text
from lightning_rob.report.outcome import threats
from lightning_rob.report.records import WHOLE, Record
from lightning_rob.report.runs import Run
from lightning_rob.report.table import Cell, Table
from lightning_rob.report.words import NONE, between, extent, line_name, listed, percent, split_of

Column = tuple[str, str, str]  # attack, target, threat
Figures = Mapping[Column, Record]
MARK = "\N{DAGGER}"
UNTOLD = "not told"


def comparison(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Block]:
    """A row per run and a column per attack within one threat; `names` are the runs' `id`s."""
    rows = [(run, name, figures(run)) for run, name in zip(runs, names, strict=True)]
    rows = [row for row in rows if row[2]]
    if not rows:
        return
    columns = list(dict.fromkeys(column for _, _, found in rows for column in found))
    meant = {run.label: found for run, _, found in rows}
    apart = {column: differences(meant, column) for column in columns}
    heads = [_heading(column, bool(apart[column])) for column in columns]
    cells: list[list[Cell | str]] = [
        [Cell(run.label, link=name), run.title, *_circumstances(found), *_row(found, columns)]
        for run, name, found in rows
    ]
    caption = "The last evaluation of each run, with 95 % intervals"
    yield Table(caption, ["run", "what", "split", "images>", *heads], cells, kind="runs")
    for line in filter(None, apart.values()):
        yield Text(f"{MARK} {line}", "warning")
    for line in _whole([run for run, _, _ in rows], [found for _, _, found in rows]):
        yield Text(line, "warning")


def figures(run: Run) -> Figures:
    """A run's last evaluation by column."""
    final = run.evaluations.last()
    shown = [r for r in final if r.target == WHOLE or r.name != "clean"]
    return {(*r.key, listed(sorted(threats(r, final)))): r for r in shown}


def differences(meant: Mapping[str, Figures], column: Column) -> str:
    """What runs mean by one column, in words; empty where all mean the same."""
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for label, found in meant.items():
        if column in found:
            kinds.setdefault(tuple(_meaning(found[column]).items()), []).append(label)
    where = f"{line_name(column[:2])} {column[2]}".strip()
    if len(kinds) < 2:
        parts = {c for found in meant.values() for c in found if c[0] not in ("clean", "worst")}
        mixed = column[0] == "worst" and any(
            differences(meant, part) for part in parts if part[1:] == column[1:]
        )
        return f"{where} is over attacks that are not the same in all runs." if mixed else ""
    options = [dict(kind) for kind in kinds]
    keys = dict.fromkeys(key for option in options for key in option)
    apart = [key for key in keys if len({option.get(key) for option in options}) > 1]
    told = [
        f"{listed(labels)}: {', '.join(f'{key}={option.get(key, UNTOLD)}' for key in apart)}"
        for labels, option in zip(kinds.values(), options, strict=True)
    ]
    return f"{where} does not mean the same in all runs. {'; '.join(told)}."


def _meaning(record: Record) -> dict[str, str]:
    """What a figure is of: an attack's arguments, or the attacks that "worst" is over."""
    if not record.an_attack:
        return {"over": f"({', '.join(record.over)})"}
    return call(record.attack).flat


def _heading(column: Column, differs: bool) -> Cell:
    mark = f" {MARK}" if differs else ""
    return Cell(f"{line_name(column[:2])}{mark}>", small=column[2])


def _row(found: Figures, columns: Sequence[Column]) -> list[Cell]:
    """An accuracy with its interval, or nothing, for each column."""
    records = [found.get(column) for column in columns]
    return [Cell(percent(r.accuracy), small=between(r)) if r else Cell(NONE) for r in records]


def _circumstances(found: Figures) -> list[str]:
    """The split, and how many images."""
    stages = list(dict.fromkeys(split_of(r.stage) for r in found.values()))
    return [listed(stages), extent([r.n for r in found.values()])]


def _whole(runs: Sequence[Run], found: Sequence[Figures]) -> Iterator[str]:
    """What differs between the runs as a whole."""
    data = sorted({run.data for run in runs if run.data})
    if len(data) > 1:
        yield f"the runs are of different data ({listed(data)}): their figures do not compare."
    stages = sorted({split_of(r.stage) for figure in found for r in figure.values()})
    if len(stages) > 1:
        yield f"some figures are of {listed(stages)} images: they do not compare."
