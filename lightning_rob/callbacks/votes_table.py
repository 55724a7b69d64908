"""What an ensemble's votes came to, as a table for the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

CLEAN = "clean"  # the row of no attack


def print_votes(
    title: str, results: Sequence[Mapping[str, Any]], console: Console | None = None
) -> None:
    """A row for each attack and ensemble, a column for each rule, in per cent."""
    rows: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for result in results:
        rows.setdefault((result["name"], result["ensemble"]), []).append(result)
    rules = list(dict.fromkeys(result["rule"] for result in results))
    several = len({ensemble for _, ensemble in rows}) > 1
    n = results[0]["n"] if results else 0
    table = Table(
        title=f"{title}: accuracy by voting rule, {n} images\nbelow, half the 95 % interval; "
        "M: members, dis.: mean l2 of the perturbation over that of the image",
        title_justify="left",
        title_style="bold",
        show_lines=True,
    )
    table.add_column("attack", overflow="fold")
    if several:
        table.add_column("ensemble", overflow="fold")
    for heading in ("M", "dis.", *rules):
        table.add_column(heading, justify="right")
    for (name, ensemble), found in rows.items():
        distance = found[0]["dissimilarity"]
        cells = [name, *([ensemble] if several else []), str(found[0]["members"])]
        cells.append("" if name == CLEAN or distance is None else f"{distance:.3f}")
        by_rule = {result["rule"]: _cell(result) for result in found}
        table.add_row(*cells, *(by_rule.get(rule, "") for rule in rules))
    (console or Console()).print(table)


def _cell(result: Mapping[str, Any]) -> str:
    low, high = result["interval"]
    return f"{result['accuracy']:.1%}\n± {50 * (high - low):.1f}"
