"""`lightning-rob compare`: records of the same images beside each other, image by image."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_rob.commands.compare import CompareConfig
from lightning_rob.commands.report.blocks import plain
from lightning_rob.commands.specs import differences
from lightning_rob.comparisons import SIGNIFICANT, rounded_down
from lightning_rob.evaluation.result_file import ResultFile, read_result_file
from lightning_rob.metrics import Paired, holm
from lightning_rob.metrics.intervals import paired_over_draws
from lightning_rob.runtime.errors import visible
from lightning_rob.runtime.files import atomic_write_text
from lightning_rob.tables import STYLE, literal

Pair = tuple[str, Tensor, Tensor]  # name, scores [N, R] of the first and of the second
# Gated records are equal in them.
SETTINGS = ("target", "repeats", "inferences", "private_draws", "protocol")
CONDITIONS = (*SETTINGS, "seed", "group_size", "precision", "versions")
COLUMNS = ("first", "second", "difference", "95 % interval", "lost", "won", "p")
MIN_IMAGES = 10  # fewer are too few to judge a difference


@dataclass(frozen=True)
class Comparison:
    """The comparison of two accuracies on the same images, a row of the table."""

    name: str
    before: float
    after: float
    lost: int
    won: int
    images: int
    paired: Paired
    p: float

    def is_worse(self, limit: float) -> bool:
        """Return whether the accuracy fell significantly, by the limit or more."""
        return -self.paired.difference >= rounded_down(limit) and self.p < SIGNIFICANT

    @property
    def text(self) -> str:
        low, high = self.paired.interval
        return (
            f"{self.name} changed by {100 * self.paired.difference:+.1f} points, from "
            f"{self.before:.1%} to {self.after:.1%} (95 % interval {100 * low:.1f} … "
            f"{100 * high:.1f}, p = {self.p:.2g})"
        )


def run(config: CompareConfig) -> None:
    """Print the comparison, and what else distinguishes the records."""
    records = [_read(path) for path in config.records]
    one, other = records[0], records[-1]
    differing = list(_other_differences(records, config))
    # Refused before a line is printed: figures that mean something else would be read all the same.
    if config.fail_if_worse is not None:
        _check_gate(one, other, config)
    if len(records) == 1:
        first, *others = one.attacks
        if not others:
            raise ValueError(f"{one.path} has one attack, {first}: give a second record")
        before = one.by_defender(first)
        pairs = [(f"{first} → {name}", before, one.by_defender(name)) for name in others]
    else:
        pairs = list(_common(one, other, config))
    found = compared(pairs)
    print_comparison(" and ".join(str(path) for path in config.records), found)
    for line in differing:
        Console().print(visible(line), style="yellow", markup=False)
    limit = config.fail_if_worse
    worse = [c for c in found if limit is not None and c.is_worse(limit)]
    if config.markdown:
        atomic_write_text(config.markdown, markdown(found, worse, differing))
    for comparison in worse:
        print(visible(f"lightning-rob: worse: {comparison.text}"), file=sys.stderr)
    if worse:
        raise SystemExit(1)


def _read(path: Path) -> ResultFile:
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("images/*.csv"))
        if len(files) != 1:
            named = " or ".join(files) or "but `lightning-rob test` has left none there"
            raise ValueError(f"{path} is a folder: name a record in it, {named}")
        path = Path(files[0])
    return read_result_file(path)


def compared(pairs: Sequence[Pair]) -> list[Comparison]:
    """Compare paired scores [N, R] by name; p is adjusted by Holm over all of them."""
    found = [paired_over_draws(one, other) for _, one, other in pairs]
    adjusted = holm([test.p for test in found])
    comparisons = []
    for (name, one, other), test, p in zip(pairs, found, adjusted, strict=True):
        before, after = float(one.mean()), float(other.mean())
        rises = other.mean(1) - one.mean(1)
        counts = int((rises < 0).sum()), int((rises > 0).sum()), len(rises)
        comparisons.append(Comparison(name, before, after, *counts, test, p))
    return comparisons


def _check_gate(one: ResultFile, other: ResultFile, config: CompareConfig) -> None:
    """Refuse too few images, and records whose accuracies mean something else."""
    if missing := set(one.index.tolist()) - set(other.index.tolist()):
        raise ValueError(f"{other.path} lacks {len(missing)} of the images of {one.path}")
    if len(one.index) < MIN_IMAGES:
        raise ValueError(
            f"--fail_if_worse needs {MIN_IMAGES} images, {one.path} has {len(one.index)}"
        )
    if hidden := _severe(other) - _severe(one):
        raise ValueError(
            f"{other.path} has severe findings, {', '.join(sorted(hidden))}: its accuracies may be "
            "too high to see a fall; its card, the .json beside it, says what to do"
        )
    # A fall is one of the checkpoint only if all else is equal; pairs are the user's decision.
    different = [name for name in SETTINGS if one.card.get(name) != other.card.get(name)]
    if not config.pairs:
        if lacking := [name for name in one.scores if name not in other.scores]:
            raise ValueError(f"{other.path} lacks {', '.join(lacking)}: evaluate the same attacks")
        specs = [
            {name: card["attacks"][name].get("attack") for name in one.attacks}
            for card in (one.card, other.card)
        ]
        different += [name for name in one.attacks if specs[0][name] != specs[1][name]]
        different += [name for name in other.attacks if name not in one.attacks]
    if different:
        raise ValueError(
            f"--fail_if_worse compares equal evaluations, but {one.path} and {other.path} differ "
            f"in {', '.join(different)}; without --fail_if_worse, compare prints the differences"
        )


def _severe(record: ResultFile) -> set[str]:
    """Return the names of the findings that an accuracy must not be trusted with."""
    found = record.card.get("findings", ())
    return {one["name"] for one in found if one["severity"] == "severe"}


def _other_differences(records: Sequence[ResultFile], config: CompareConfig) -> Iterator[str]:
    """Yield what else distinguishes two records, beside their checkpoints."""
    cards = [record.card for record in records]
    for record in records:
        if found := sorted(_severe(record)):
            yield f"Do not trust {record.path}: severe findings, {', '.join(found)}"
    if any(card.get("protocol") and card.get("private_draws", 1) == 1 for card in cards):
        yield (
            "The defense adapts, and its images share one draw of its randomness, which intervals "
            "and p leave out: evaluate with private_draws=5"
        )
    if len({tuple(record.index.tolist()) for record in records}) > 1:
        sizes = " and ".join(str(len(record.index)) for record in records)
        yield f"They are compared on the images that both have, of {sizes}"
    for name in CONDITIONS:
        values = [card.get(name) for card in cards]
        if any(value != values[0] for value in values):
            yield f"They differ in {name}: {values[0]} and {values[1]}"
    over = [", ".join(record.attacks) for record in records]
    if over[0] != over[-1] and (not config.pairs or ("worst", "worst") in config.named_pairs):
        yield f"worst is over other attacks: {over[0]} and {over[-1]}"
    for first, second in config.named_pairs or [(name, name) for name in records[0].attacks]:
        named = zip((first, second), cards, strict=False)  # one record, or two
        specs = [card["attacks"].get(name, {}).get("attack") for name, card in named]
        if None not in specs and (apart := ", ".join(differences(specs[0], specs[-1]))):
            title = first if first == second else f"{first} → {second}"
            yield f"They differ in the attack {title}: {apart}"


def _common(one: ResultFile, other: ResultFile, config: CompareConfig) -> Iterator[Pair]:
    """Yield each accuracy that both records have, on the images that both have."""
    common = sorted(set(one.index.tolist()) & set(other.index.tolist()))
    index = torch.tensor(common, dtype=torch.int64)
    first, second = (torch.searchsorted(record.index, index) for record in (one, other))
    same = all(
        torch.equal(getattr(one, name)[first], getattr(other, name)[second])
        for name in ("label", "checksum")
    )
    if not common or not same:
        raise ValueError(f"{one.path} and {other.path} are not of the same images")
    shared = [name for name in one.scores if name in other.scores]
    for left, right in config.named_pairs or [(name, name) for name in shared]:
        for name, record in ((left, one), (right, other)):
            if name not in record.scores:
                raise ValueError(f"{record.path} has no {name!r}: {', '.join(record.scores)}")
        yield left, one.by_defender(left)[first], other.by_defender(right)[second]


def _legend(found: Sequence[Comparison]) -> str:
    tests = " or ".join(dict.fromkeys(comparison.paired.test for comparison in found))
    legend = f"interval: {tests}, 95 %; p: two-sided"
    if len(found) > 1:
        legend = f"interval: {tests}, 95 % of each alone; p: two-sided, by Holm over {len(found)}"
    images = f"{found[0].images} images"
    return f"{images}; {legend}; lost, won: images whose score fell, rose"


def print_comparison(title: str, found: Sequence[Comparison]) -> None:
    """Print a table of comparisons."""
    table = Table(title=literal(title), caption=_legend(found), **STYLE)
    # on a narrow terminal names and intervals take several lines, and no number is cut
    table.add_column("accuracy", min_width=len("accuracy"), overflow="fold")
    for name in COLUMNS:
        table.add_column(name, justify="right", no_wrap="interval" not in name)
    for comparison in found:
        table.add_row(literal(comparison.name), *_cells(comparison))
    Console().print(table)


def markdown(
    found: Sequence[Comparison], worse: Sequence[Comparison], differing: Sequence[str]
) -> str:
    """Return a Markdown table of comparisons; those that are worse first, as a list."""
    lines = [f"- **worse:** {plain(comparison.text)}" for comparison in worse]
    lines += [""] * bool(worse)
    lines += [f"| accuracy | {' | '.join(COLUMNS)} |", "|---" + "|--:" * len(COLUMNS) + "|"]
    lines += [f"| {' | '.join([plain(one.name), *_cells(one)])} |" for one in found]
    lines += ["", _legend(found), *(f"\n{plain(line)}" for line in differing)]
    return "\n".join(lines) + "\n"


def _cells(comparison: Comparison) -> list[str]:
    (low, high), p = comparison.paired.interval, comparison.p
    return [
        f"{comparison.before:.1%}",
        f"{comparison.after:.1%}",
        f"{100 * comparison.paired.difference:+.1f}",
        f"{100 * low:.1f} … {100 * high:.1f}",
        str(comparison.lost),
        str(comparison.won),
        f"{p:.3g}" if p >= 0.001 else "<0.001",
    ]
