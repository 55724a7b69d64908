"""Compare records of the same images with each other."""

from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_rob.commands.configs import CompareConfig
from lightning_rob.commands.specs import differences
from lightning_rob.evaluation.per_image import ResultFile, read_result_file
from lightning_rob.metrics import Paired, holm, paired
from lightning_rob.tables import STYLE

Pair = tuple[str, Tensor, Tensor]  # name, scores [N] of the first and of the second
CONDITIONS = ("target", "seed", "repeats", "inferences", "protocol", "versions")


def run(config: CompareConfig) -> None:
    """Print the comparison, and what else distinguishes the records."""
    records = [read_result_file(path) for path in config.records]
    one, other = records[0], records[-1]
    pairs = list(_attacks(one, config) if len(records) == 1 else _common(one, other, config))
    print_comparison(" and ".join(str(path) for path in config.records), pairs)
    for line in _other_differences(records, config):
        Console().print(line, style="yellow")


def _other_differences(records: Sequence[ResultFile], config: CompareConfig) -> Iterator[str]:
    """Yield differences of two records that might be the cause, beside their checkpoints."""
    cards = [record.card for record in records]
    for name in CONDITIONS:
        values = [card.get(name) for card in cards]
        if any(value != values[0] for value in values):
            yield f"They differ in {name}: {values[0]} and {values[1]}"
    over = [", ".join(record.attacks) for record in records]
    if over[0] != over[-1] and not config.pairs:
        yield f"worst is over other attacks: {over[0]} and {over[-1]}"
    for first, second in config.named_pairs or [(name, name) for name in records[0].attacks]:
        named = zip((first, second), cards, strict=False)  # one record, or two
        specs = [card["attacks"].get(name, {}).get("attack") for name, card in named]
        if None not in specs and (apart := ", ".join(differences(specs[0], specs[-1]))):
            title = first if first == second else f"{first} → {second}"
            yield f"They differ in the attack {title}: {apart}"


def _attacks(record: ResultFile, config: CompareConfig) -> Iterator[Pair]:
    """Yield each attack of a record beside the reference."""
    first = config.reference or record.attacks[0]
    if first not in record.attacks:
        raise ValueError(f"{record.path} has no attack {first!r}: {', '.join(record.attacks)}")
    others = [name for name in record.attacks if name != first]
    if not others:
        raise ValueError(f"{record.path} has one attack, {first}: give a second record")
    for name in others:
        yield f"{first} → {name}", record.scores[first], record.scores[name]


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
    names = ["worst"] if config.against_worst else shared
    for left, right in config.named_pairs or [(name, name) for name in names]:
        for name, record in ((left, one), (right, other)):
            if name not in record.scores:
                raise ValueError(f"{record.path} has no {name!r}: {', '.join(record.scores)}")
        yield left, one.scores[left][first], other.scores[right][second]


def print_comparison(title: str, pairs: Sequence[Pair], console: Console | None = None) -> None:
    """Print a table of paired scores [N] by name."""
    found = [paired(one, other) for _, one, other in pairs]
    tests = " or ".join(dict.fromkeys(pair.test for pair in found))
    legend = f"interval: paired t, 95 %; p: {tests}, two-sided"
    legend += f", adjusted by Holm over {len(found)} comparisons" if len(found) > 1 else ""
    legend += "; lost, won: images whose score fell, rose"
    table = Table(title=title, caption=legend, **STYLE)
    columns = ["first", "second", "difference", "95 % interval", "lost", "won", "p"]
    table.add_column("accuracy", min_width=max((len(pair[0]) for pair in pairs), default=0))
    for name in columns:
        table.add_column(name, justify="right")
    adjusted = holm([pair.p for pair in found])
    for (name, one, other), pair, p in zip(pairs, found, adjusted, strict=True):
        table.add_row(name, *_cells(one, other, pair, p))
    (console or Console()).print(table)


def _cells(one: Tensor, other: Tensor, found: Paired, p: float) -> list[str]:
    low, high = found.interval
    return [
        f"{float(one.mean()):.1%}",
        f"{float(other.mean()):.1%}",
        f"{100 * found.difference:+.1f}",
        f"{100 * low:.1f} … {100 * high:.1f}",
        str(int((other < one).sum())),
        str(int((other > one).sum())),
        f"{p:.3g}" if p >= 0.001 else "<0.001",
    ]
