"""Several runs side by side, and what keeps their accuracies from being compared."""

from collections.abc import Iterator, Mapping, Sequence

from lightning_rob.commands.report.blocks import Block, Cell, Warned, table
from lightning_rob.commands.report.evaluation import result_cell, threats
from lightning_rob.commands.report.formatting import WHOLE, extent, line_name, listed, split_of
from lightning_rob.commands.report.runs import AttackResult, Run
from lightning_rob.commands.specs import flat

Column = tuple[str, str, str]  # attack, target, threat
Results = Mapping[Column, AttackResult]
MARK = "\N{DAGGER}"


def comparison(runs: Sequence[Run], names: Sequence[str]) -> Iterator[Block]:
    """Yield a table with a row per run and a column per attack within one threat, and warnings.

    Each row links to the section of its run by that section's `id`, one of `names`.
    """
    rows = [(run, name, results_of(run)) for run, name in zip(runs, names, strict=True)]
    rows = [row for row in rows if row[2]]
    if not rows:
        return
    by_label = {run.label: found for run, _, found in rows}
    columns = list(dict.fromkeys(column for found in by_label.values() for column in found))
    apart = {column: differences(by_label, column) for column in columns}
    heads = [
        Cell(f"{line_name(column[:2])}{f' {MARK}' if apart[column] else ''}>", small=column[2])
        for column in columns
    ]
    cells = []
    for run, name, found in rows:
        splits = dict.fromkeys(split_of(r.stage) for r in found.values())
        results = [result_cell(found.get(column)) for column in columns]
        n = extent([r.n for r in found.values()])
        cells.append([Cell(run.label, link=name), run.title, listed(list(splits)), n, *results])
    caption = "The last evaluation of each run, with 95 % intervals"
    yield table(caption, ["run", "what", "split", "images>", *heads], cells, kind="runs")
    yield from (Warned(f"{MARK} {line}") for line in apart.values() if line)
    if len(data := {run.data for run, _, _ in rows if run.data}) > 1:
        names = listed(sorted(data))
        yield Warned(f"the runs are of different data ({names}): do not compare their accuracies.")
    if len(of := {split_of(r.stage) for found in by_label.values() for r in found.values()}) > 1:
        yield Warned(f"some accuracies are of {listed(sorted(of))} images: do not compare them.")


def results_of(run: Run) -> Results:
    """Return a run's last evaluation by column."""
    final = run.evaluations.last()
    shown = [r for r in final if r.target == WHOLE or r.name != "clean"]
    return {(*r.key, listed(sorted(threats(r, final)))): r for r in shown}


def differences(by_label: Mapping[str, Results], column: Column) -> str:
    """Return how the attacks of one column differ between runs; empty where they do not."""
    kinds: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for label, found in by_label.items():
        if column in found:
            one = found[column]
            options = flat(one.attack) if one.is_attack else {"over": f"({', '.join(one.over)})"}
            kinds.setdefault(tuple(options.items()), []).append(label)
    title = f"{line_name(column[:2])} {column[2]}".strip()
    if len(kinds) < 2:
        parts = {c for found in by_label.values() for c in found if c[0] not in ("clean", "worst")}
        mixed = column[0] == "worst" and any(
            differences(by_label, part) for part in parts if part[1:] == column[1:]
        )
        return f"{title} is over attacks that are not the same in all runs." if mixed else ""
    definitions = [dict(kind) for kind in kinds]
    keys = dict.fromkeys(key for options in definitions for key in options)
    apart = [key for key in keys if len({options.get(key) for options in definitions}) > 1]
    described = [
        f"{listed(labels)}: "
        + ", ".join(f"{key}={options.get(key, 'not recorded')}" for key in apart)
        for labels, options in zip(kinds.values(), definitions, strict=True)
    ]
    return f"{title} does not mean the same in all runs. {'; '.join(described)}."
