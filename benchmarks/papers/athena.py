"""Tables 3 to 7 of Liao et al. (2020), published and measured beside each other, as Markdown.

    python benchmarks/papers/athena.py --table 3 logs/version_1
    python benchmarks/papers/athena.py --table 4 logs/version_2 logs/version_3

Reads the records of finished runs of `lightning-rob test`: transfer.jsonl of
callbacks/transferability.yaml (Table 3), votes.jsonl of votes_taa.yaml (4), votes_paa.yaml (5) and
compositions_original.yaml (6, MNIST; 7, FashionMNIST). Of several records of a number the last
counts. Prints a table for each attack, where a cell is "published / measured", and a summary: the
mean absolute difference, Spearman's rank correlation of the rows' means, and how many published
accuracies lie within the measured 95 % interval over images, of Tables 6 and 7 also over the random
compositions. The published numbers are in published/.
"""

import argparse
import csv
import json
import math
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from scipy.stats import spearmanr

from lightning_rob.metrics import wilson

PUBLISHED = Path(__file__).parent / "published"
TITLES = {
    "clean": "No attack",
    "fgsm": "FGSM",
    "pgd": "PGD",
    "cw": "C&W",
    "deepfool": "DeepFool",
}
FRACTIONS = {"dissimilarity"}  # all other columns are in per cent
RULES = ("RD", "MV", "T2MV", "AVEP", "AVEL")  # of the paper, over which its means are
HEADS = {"average": "mean"}


class Number(NamedTuple):
    """A measured number, with its 95 % interval if it has one."""

    value: float
    low: float = math.nan
    high: float = math.nan


Numbers = dict[tuple[str, str, str], Number]  # by attack, row and column


def published(table: int) -> dict[tuple[str, str, str], float]:
    """Return the published numbers by attack, row and column, in the paper's order."""
    with (PUBLISHED / f"athena_table{table}.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        attack, name = row.pop("attack"), row.pop("row")
        found |= {(attack, name, k): float(v) for k, v in row.items() if v}
    return found


def records(runs: list[Path], name: str) -> list[dict[str, Any]]:
    """Return the lines of the runs' records, oldest first."""
    lines = [line for run in runs for line in (run / name).read_text().splitlines()]
    return [json.loads(line) for line in lines]


def transferred(record: dict[str, Any]) -> Iterator[tuple[tuple[str, str, str], Number]]:
    """Return shares in per cent of the images that fool a source which fool each target."""
    names = record["names"]
    for i, source in enumerate(names):
        row, count = record["transferability"][i], int(record["successes"][i])
        others = [share for j, share in enumerate(row) if j != i]
        for target, share in zip(names, row, strict=True):
            low, high = wilson(share, count)
            yield (record["name"], source, target), Number(100 * share, 100 * low, 100 * high)
        yield (record["name"], source, "average"), Number(100 * fmean(others))


def row_of(record: dict[str, Any], table: int) -> tuple[str, str]:
    """Return attack and row of a record of votes: target, aggregate or ensemble."""
    if table > 5:
        return record["name"], record["ensemble"]
    attack, _, row = record["name"].partition("_on_" if table == 4 else "_")
    return attack, row


def voted(rows: list[dict[str, Any]], table: int) -> Numbers:
    """Return accuracies in per cent by rule, their mean over rules, and the dissimilarity."""
    found, rules = {}, dict[tuple[str, str], list[float]]()
    for record in rows:
        if record["rule"] not in RULES:
            continue
        if table < 6 and record["ensemble"] != "14r":
            raise ValueError(f"14r votes in Tables 4 and 5, got {record['ensemble']}")
        attack, row = row_of(record, table)
        low, high = record["interval"]
        number = Number(100 * record["accuracy"], 100 * low, 100 * high)
        found[attack, row, record["rule"]] = number
        found[attack, row, "dissimilarity"] = Number(record["dissimilarity"])
    for (attack, row, rule), number in found.items():
        if rule != "dissimilarity":
            rules.setdefault((attack, row), []).append(number.value)
    return found | {(*key, "average"): Number(fmean(values)) for key, values in rules.items()}


def measured(table: int, runs: list[Path]) -> Numbers:
    """Return the measured numbers by attack, row and column."""
    if table > 3:
        return voted(records(runs, "votes.jsonl"), table)
    return dict(pair for one in records(runs, "transfer.jsonl") for pair in transferred(one))


def cell(column: str, theirs: float | None, ours: Number | None) -> str:
    if theirs is None:
        return ""
    digits = 2 if column in FRACTIONS else 1
    return f"{theirs:.{digits}f} / " + (f"{ours.value:.{digits}f}" if ours else "-")


def short(name: str) -> str:
    """Return initials of a sub-model's name, such as SBL, with its degrees: R90."""
    if "_" not in name:
        return HEADS.get(name, name)
    return "".join(part if part.isdigit() else part[0].upper() for part in name.split("_"))


def grid(theirs: dict[tuple[str, str, str], float], ours: Numbers, attack: str) -> str:
    """Return the table of one attack; a cell is "published / measured"."""
    rows = dict.fromkeys(row for name, row, _ in theirs if name == attack)
    columns = list(dict.fromkeys(column for name, _, column in theirs if name == attack))
    lines = [f"| | {' | '.join(map(short, columns))} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        keys = [(attack, row, column) for column in columns]
        cells = [cell(key[2], theirs.get(key), ours.get(key)) for key in keys]
        lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def shared(
    theirs: dict[tuple[str, str, str], float], ours: Numbers, attack: str
) -> list[tuple[tuple[str, str, str], float, Number]]:
    """Return the numbers in per cent of an attack that are in both; no source on itself."""
    keys = [k for k in theirs if k[0] == attack and k in ours and k[1] != k[2]]
    return [(k, theirs[k], ours[k]) for k in keys if k[2] not in FRACTIONS]


def summary(theirs: dict[tuple[str, str, str], float], ours: Numbers, attack: str) -> list[str]:
    """Return means, difference, rank correlation of rows and coverage of one attack."""
    pairs = [pair for pair in shared(theirs, ours, attack) if pair[0][2] != "average"]
    rows: dict[str, list[tuple[float, float]]] = {}
    for key, value, number in pairs:
        rows.setdefault(key[1], []).append((value, number.value))
    means = [[fmean(column) for column in zip(*row, strict=True)] for row in rows.values()]
    rank = f"{spearmanr(means).statistic:+.2f}" if len(means) > 3 else ""
    inside = sum(number.low <= value <= number.high for _, value, number in pairs)
    return [
        f"{fmean(value for _, value, _ in pairs):.1f}",
        f"{fmean(number.value for *_, number in pairs):.1f}",
        f"{fmean(abs(value - number.value) for _, value, number in pairs):.1f}",
        rank,
        f"{inside} of {len(pairs)}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--table", type=int, choices=range(3, 8), required=True)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs of `test`")
    options = parser.parse_args()
    theirs, ours = published(options.table), measured(options.table, options.runs)
    found = [name for name in TITLES if shared(theirs, ours, name)]
    if not found:
        raise ValueError(f"no number of Table {options.table} in {options.runs}")
    heads = ["published mean", "measured", "mean absolute difference", "rows' rank correlation"]
    print(f"| attack | {' | '.join([*heads, 'published within our interval'])} |\n{'|---' * 6}|")
    for attack in found:
        print(f"| {TITLES[attack]} | {' | '.join(summary(theirs, ours, attack))} |")
    for attack in found:
        print(f"\n**{TITLES[attack]}**\n\n{grid(theirs, ours, attack)}")


if __name__ == "__main__":
    main()
