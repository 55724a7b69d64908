"""Weights from a file into a network, wherever in the file they are."""

import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from lightning_rob.nets.contents import State, renamed, tensors_in, without
from lightning_rob.nets.normalize import Normalize
from lightning_rob.nets.statistics import check_statistics, take_statistics, without_statistics

LINE = 96


def _entries(net: nn.Module) -> State:
    """What a checkpoint must hold: before PyTorch 0.4.1 none had `num_batches_tracked`."""
    state = net.state_dict()
    return {name: entry for name, entry in state.items() if "num_batches_tracked" not in name}


def _prefixes(names: Iterable[str], wanted: State) -> Counter[str]:
    """How many of the wanted names are found under each prefix."""
    found: Counter[str] = Counter()
    for parts in (name.split(".") for name in names):
        cuts = (cut for cut in range(len(parts)) if ".".join(parts[cut:]) in wanted)
        found.update(".".join(parts[:cut]) for cut in cuts)
    return found


def _under(tensors: State, prefix: str) -> State:
    start = f"{prefix}." if prefix else ""
    return {name[len(start) :]: entry for name, entry in tensors.items() if name.startswith(start)}


def _some(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _all(names: Sequence[str]) -> str:
    """Every name, over lines of their own where they are many."""
    text = ", ".join(names)
    if len(text) <= LINE:
        return text
    wrapped = textwrap.wrap(text, LINE, break_long_words=False, break_on_hyphens=False)
    return "\n" + textwrap.indent("\n".join(wrapped), "    ")


def _differences(net: nn.Module, state: State) -> str:
    """What keeps a state dict from fitting a network, in words; empty if it fits."""
    own = net.state_dict()
    kinds = {
        "missing": [name for name in _entries(net) if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {list(state[name].shape)} instead of {list(entry.shape)}"
            for name, entry in own.items()
            if name in state and state[name].shape != entry.shape
        ],
    }
    return "; ".join(f"{len(n)} {kind} ({_all(n)})" for kind, n in kinds.items() if n)


def fitting(net: nn.Module, tensors: State, path: object, prefix: str | None) -> list[str]:
    """Where in a checkpoint the network is, at least one place.

    Raises:
        ValueError: there is none.
    """
    kind, found = type(net).__name__, _prefixes(tensors, _entries(net))
    # "members.0" names state_dict.members.0 as well as members.0.net.
    at = [p for p in found if prefix in (None, p) or f".{prefix}." in f".{p}."]
    fits = [p for p in at or found if not _differences(net, _under(tensors, p))]
    if fits and at:
        return fits
    if fits:
        known = _some([repr(p) for p in fits], 12)
        raise ValueError(f"{path} has no {kind} under {prefix!r}: pass prefix= one of {known}")
    nearest = max(at or found or [""], key=found.__getitem__)
    where = f" (under {nearest!r})" if nearest else ""
    differences = _differences(net, _under(tensors, nearest))
    raise ValueError(f"{path}{where} does not fit {kind}: {differences}")


def normalised_part(net: nn.Module, tensors: State) -> nn.Module:
    """The network, or what it puts a normalisation before if the file holds that alone."""
    children = list(net.children())
    inside = [child for child in children if not isinstance(child, Normalize)]
    parts = [net, *(inside if len(inside) == 1 < len(children) else [])]
    counts = [max(_prefixes(tensors, _entries(part)).values(), default=0) for part in parts]
    return parts[counts.index(max(counts))]


def load_weights(
    net: nn.Module,
    path: str | os.PathLike[str],
    prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    normalizer: str | None = None,
) -> nn.Module:
    """Load a network's weights from a checkpoint of any layout, and nothing but weights.

    The network may lie anywhere in the file: a plain state dict, one under `state_dict`, `model`,
    `last` …, behind `module.`, or a part of a Lightning checkpoint such as `defense.members.0`. A
    `ZooNet` also takes the weights of the zoo's own network.

    Args:
        net: the network, changed in place.
        path: the file.
        prefix: where in the file the network is, or some of that; None finds it.
        rename: components of names in the file and what the network calls them, such as
            {"fc": "linear"}; done before the network is looked for.
        drop: parts of names in the file, such as "sub_block1.", that are to be ignored.
        normalizer: where in the file the images' `mean` and `std` are, or the end of that, such as
            "model0.normalizer": the network is to normalise by them. With None the file may not
            hold others than the network's, unless dropped.

    Returns:
        The network.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, holds no or several such networks, or no finite weights.
    """
    tensors = tensors_in(path)
    if normalizer is None:
        check_statistics(net, without(tensors, drop), path)
    candidates = renamed(without_statistics(without(tensors, drop), net), rename or {})
    part = normalised_part(net, candidates)
    state = _chosen(part, candidates, path, prefix)
    if normalizer is not None:
        take_statistics(net, tensors, path, normalizer)
    part.load_state_dict(state)
    return net


def _chosen(net: nn.Module, tensors: State, path: object, prefix: str | None) -> State:
    """The one part of a checkpoint that fits the network."""
    at = fitting(net, tensors, path, prefix)
    if len(at) > 1:
        several = _some([repr(p) for p in at], 12)
        raise ValueError(
            f"{path} holds several {type(net).__name__}: pass prefix= one of {several}"
        )
    state = _under(tensors, at[0])
    infinite = [name for name, entry in state.items() if not entry.isfinite().all()]
    if infinite:
        raise ValueError(f"{path}: {len(infinite)} weights are not finite ({_some(infinite)})")
    return state
