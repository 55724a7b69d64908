"""Where in a checkpoint the members of an ensemble are."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat, takewhile

from torch import nn

from lightning_rob.nets.checkpoint import fitting, normalised_part
from lightning_rob.nets.contents import renamed, tensors_in, without
from lightning_rob.nets.statistics import without_statistics

# What is before and behind a number in a prefix -> the numbers that are there.
Numbers = dict[tuple[str, str], set[int]]


def member_prefixes(
    nets: Sequence[nn.Module],
    path: str | os.PathLike[str],
    prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
) -> list[str]:
    """Find an ensemble in a checkpoint: networks numbered from 0, `members.0` or `model0` ….

    Args:
        nets: a network for each member; or only one, for as many members like it as there are.
        path: the file.
        prefix: where in the file the ensemble is, or some of that; None finds it.
        rename: as in `load_weights`.
        drop: as in `load_weights`.

    Returns:
        The members' prefixes for `load_weights`, in order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, or holds no or several such ensembles.
    """
    tensors = without(tensors_in(path), drop)
    found = []
    for net in nets:
        candidates = renamed(without_statistics(tensors, net), rename or {})
        found.append(fitting(normalised_part(net, candidates), candidates, path, prefix))
    numbers = [_numbers(places) for places in found]
    counts = {around: _count(numbers, around) for around in numbers[0]}
    most = max(counts.values(), default=0)
    if most < len(nets):
        places = ", ".join(dict.fromkeys(repr(place) for part in found for place in part))
        kind = type(nets[0]).__name__
        raise ValueError(f"{path} holds no {kind} numbered from 0, only: {places}")
    ensembles = [around for around, count in counts.items() if count == most]
    if len(ensembles) > 1:
        several = ", ".join(repr(f"{before}0{behind}") for before, behind in ensembles)
        raise ValueError(f"{path} holds several ensembles, tell by prefix=: {several}")
    return [f"{ensembles[0][0]}{i}{ensembles[0][1]}" for i in range(most)]


def _numbers(prefixes: Iterable[str]) -> Numbers:
    found: Numbers = {}
    for prefix in prefixes:
        for number in re.finditer(r"(?<!\d)(0|[1-9]\d*)(?!\d)", prefix):
            around = prefix[: number.start()], prefix[number.end() :]
            found.setdefault(around, set()).add(int(number[0]))
    return found


def _count(numbers: Sequence[Numbers], around: tuple[str, str]) -> int:
    """How many members there are from 0 on without a gap."""
    each = enumerate(numbers if len(numbers) > 1 else repeat(numbers[0]))
    return sum(1 for _ in takewhile(lambda pair: pair[0] in pair[1].get(around, ()), each))
