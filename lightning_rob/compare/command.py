"""Records of the same images beside each other."""

from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_rob.callbacks.record import STYLE
from lightning_rob.compare.options import Request, parse
from lightning_rob.errors import InputError
from lightning_rob.ledger import Ledger, read_ledger
from lightning_rob.metrics import Paired, holm, paired

Pair = tuple[str, Tensor, Tensor]


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: the command line without `compare`.

    Raises:
        InputError: what is asked for cannot be compared.
    """
    try:
        request = parse(args)
        ledgers = [read_ledger(path) for path in request.records]
        found = (
            _within(ledgers[0], request)
            if len(ledgers) == 1
            else _between(ledgers[0], ledgers[1], request)
        )
        pairs = list(found)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    title = " and ".join(str(path) for path in request.records)
    print_comparison(title, pairs)
    for line in _otherwise(ledgers, request.pairs):
        Console().print(line, style="yellow")


def _otherwise(ledgers: Sequence[Ledger], pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """What else tells two records apart than their checkpoints, so that it might be the cause."""
    cards = [ledger.card for ledger in ledgers]
    for name in ("target", "seed", "repeats", "inferences", "protocol", "versions"):
        values = [card.get(name) for card in cards]
        if any(value != values[0] for value in values):
            yield f"They differ in {name}: {values[0]} and {values[1]}"
    over = [", ".join(ledger.attacks) for ledger in ledgers]
    if over[0] != over[-1] and not pairs:
        yield f"worst is over other attacks: {over[0]} and {over[-1]}"
    for mine, theirs in pairs or [(name, name) for name in ledgers[0].attacks]:
        named = zip((mine, theirs), cards, strict=False)  # one record, or two
        told = [card["attacks"].get(name, {}).get("attack") for name, card in named]
        if None not in told and any(text != told[0] for text in told):
            title = mine if mine == theirs else f"{mine} → {theirs}"
            yield f"They differ in the attack {title}: {told[0]} and {told[1]}"


def _within(ledger: Ledger, request: Request) -> Iterator[Pair]:
    """Each attack beside one of them."""
    first = request.reference or ledger.attacks[0]
    if first not in ledger.attacks:
        raise ValueError(f"{ledger.path} has no attack {first!r}: {', '.join(ledger.attacks)}")
    others = [name for name in ledger.attacks if name != first]
    if not others:
        raise ValueError(f"{ledger.path} has one attack, {first}: give a second record")
    for name in others:
        yield f"{first} → {name}", ledger.scores[first], ledger.scores[name]


def _between(one: Ledger, other: Ledger, request: Request) -> Iterator[Pair]:
    """Every figure that both have, on the images that both have."""
    common = sorted(set(one.index.tolist()) & set(other.index.tolist()))
    rows = torch.tensor(common, dtype=torch.int64)
    first, second = (torch.searchsorted(ledger.index, rows) for ledger in (one, other))
    alike = [
        [(int(ledger.label[i]), ledger.pixels[i]) for i in chosen.tolist()]
        for ledger, chosen in ((one, first), (other, second))
    ]
    if not common or alike[0] != alike[1]:
        raise ValueError(f"{one.path} and {other.path} are not of the same images")
    names = ["worst"] if request.worst else [name for name in one.scores if name in other.scores]
    for mine, theirs in request.pairs or [(name, name) for name in names]:
        for name, ledger in ((mine, one), (theirs, other)):
            if name not in ledger.scores:
                raise ValueError(f"{ledger.path} has no {name!r}: {', '.join(ledger.scores)}")
        yield mine, one.scores[mine][first], other.scores[theirs][second]


def print_comparison(title: str, pairs: Sequence[Pair], console: Console | None = None) -> None:
    """A table of paired scores [N] by name."""
    found = [paired(one, other) for _, one, other in pairs]
    tests = " or ".join(dict.fromkeys(pair.test for pair in found))
    legend = f"interval: paired t, 95 %; p: {tests}, two-sided"
    legend += f", adjusted by Holm over {len(found)} comparisons" if len(found) > 1 else ""
    legend += "; lost, won: images whose score fell, rose"
    table = Table(title=title, caption=legend, **STYLE)
    columns = ["first", "second", "difference", "95 % interval", "lost", "won", "p"]
    table.add_column("figure", min_width=max((len(pair[0]) for pair in pairs), default=0))
    for name in columns:
        table.add_column(name, justify="right")
    adjusted = holm([pair.p for pair in found])
    for (name, one, other), pair, p in zip(pairs, found, adjusted, strict=True):
        table.add_row(name, *_cells(one, other, pair, p))
    (console or Console()).print(table)


def _cells(one: Tensor, other: Tensor, found: Paired, p: float) -> list[str]:
    """What the table says: means, their difference, and images that are worse or better."""
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
