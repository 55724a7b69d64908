"""Reading weights from checkpoints of any layout, including other authors'."""

import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_rob.nets.normalize import Normalize
from lightning_rob.runtime.files import check_file

State = dict[str, Tensor]


def load_weights(
    net: nn.Module,
    path: str | os.PathLike[str],
    prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
    normalizer: str | None = None,
) -> nn.Module:
    """Load a network's weights from a checkpoint of any layout, without running code from it.

    The network may lie anywhere in the file: a plain state dict, one under `state_dict`, `model`,
    `last` …, behind `module.`, or in a Lightning checkpoint such as `defense.members.0`. A
    `ZooNet` also takes the weights of the zoo's own network.

    Args:
        net: the network, changed in place and returned.
        path: the file.
        prefix: place of the network in the file, or a part of it; None searches.
        rename: components of names in the file, or several in a row, and the network's names for
            them, such as {"fc": "linear", "layer.0.block": "block1.layer"}; the longest one counts.
        drop: parts of names in the file to ignore, such as "sub_block1.".
        normalizer: place of the images' `mean` and `std` (or `mu` and `sigma`) in the file, or its
            end, such as "model0.normalizer", by which the network then normalises. With None,
            statistics in the file must equal the network's, unless dropped.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a checkpoint, none or several such networks, or weights that are not finite.
    """
    tensors = dict(named_tensors(read_file(path)))
    candidates, statistics = _candidates(net, tensors, rename, drop)
    if normalizer is None:
        _check_statistics(net, statistics, path)
    part = _part_in_file(net, candidates)
    matches = _matches(part, candidates, path, prefix)
    if len(matches) > 1:
        several = _shortened(list(map(repr, matches)), 12)
        raise ValueError(
            f"{path} holds several {type(part).__name__}: pass prefix= one of {several}"
        )
    state = _under(candidates, matches[0])
    if nonfinite := [name for name, entry in state.items() if not entry.isfinite().all()]:
        named = f"{len(nonfinite)} weights are not finite ({_shortened(nonfinite)})"
        raise ValueError(f"{path}: {named}")
    # All checks come before the first change: a network that is refused stays as it was.
    if normalizer is not None:
        _take_statistics(net, tensors, path, normalizer)
    part.load_state_dict(state)
    return net


def member_prefixes(
    nets: Sequence[nn.Module],
    path: str | os.PathLike[str],
    prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
) -> list[str]:
    """Return the prefixes, for `load_weights`, of an ensemble numbered from 0 in a checkpoint.

    Args:
        nets: a network for each member; or a single one, then all members of its kind are found.
        path: the file.
        prefix: place of the ensemble in the file, or a part of it; None searches.
        rename: as in `load_weights`.
        drop: as in `load_weights`.
    """
    tensors = dict(named_tensors(read_file(path)))
    places = []
    for net in nets:
        candidates, _ = _candidates(net, tensors, rename, drop)
        places.append(_matches(_part_in_file(net, candidates), candidates, path, prefix))
    lengths: dict[tuple[str, str], int] = {}  # members by the text around their number
    for number in (n for place in places[0] for n in re.finditer(r"(?<!\d)0(?!\d)", place)):
        # Each 0 in a place may be the member's number: count how far it goes up.
        before, after = number.string[: number.start()], number.string[number.end() :]
        found = range(len(nets)) if len(nets) > 1 else count()
        gap = (i for i in found if f"{before}{i}{after}" not in places[min(i, len(nets) - 1)])
        lengths[before, after] = next(gap, len(nets))
    most = max(lengths.values(), default=0)
    if most < len(nets):
        known = ", ".join(dict.fromkeys(repr(place) for found in places for place in found))
        raise ValueError(f"{path} holds no {type(nets[0]).__name__} numbered from 0, only: {known}")
    ensembles = [around for around, length in lengths.items() if length == most]
    if len(ensembles) > 1:
        several = ", ".join(repr(f"{before}0{after}") for before, after in ensembles)
        raise ValueError(f"{path} holds several ensembles, tell by prefix=: {several}")
    before, after = ensembles[0]
    return [f"{before}{number}{after}" for number in range(most)]


def started_members(path: str | os.PathLike[str]) -> int | None:
    """Return how many members a checkpoint of BAT or IAT has started to train; None for others."""
    staged = content.get("staged") if isinstance(content := read_file(path), Mapping) else None
    return staged["stage"] + 1 if isinstance(staged, Mapping) and "stage" in staged else None


def read_file(path: str | os.PathLike[str]) -> Any:
    """Read what `torch.save` or safetensors wrote, to the CPU; no code in the file is run."""
    check_file(Path(path))
    if Path(path).suffix == ".safetensors":
        try:
            return load_file(path)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is not a safetensors file, or is cut short") from error
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    # The unpickler reads arbitrary bytes here, so its exceptions cannot be listed: a file that is
    # cut short may even raise OSError, although it has been opened before.
    except Exception as error:
        refused = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
        if refused is None:
            raise ValueError(f"{path} is not a PyTorch checkpoint, or is cut short") from None
        raise ValueError(
            f"{path} holds a {refused[1]}, which loading weights only refuses: save the state dict"
            " alone, or if you trust the file allow it with torch.serialization.add_safe_globals"
        ) from None
    if not zipfile.is_zipfile(path):
        text = f"{path} was written without a digest: damage would not be seen"
        warnings.warn(text, stacklevel=2)
    return content


def named_tensors(tree: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested mappings and lists by their dotted names, which `name` begins."""
    if isinstance(tree, Tensor):
        yield name, tree
    items = tree.items() if isinstance(tree, Mapping) else ()
    for key, child in enumerate(tree) if isinstance(tree, list | tuple) else items:
        yield from named_tensors(child, f"{name}.{key}" if name else str(key))


class _Statistics(NamedTuple):
    """Mean and standard deviation of the images, which some authors save beside the weights."""

    names: tuple[str, str]
    values: Tensor  # [2, C]


def _statistics(tensors: Mapping[str, Tensor]) -> dict[str, _Statistics]:
    """Find `mean` and `std`, or `mu` and `sigma`, of one shape beside each other, by place."""
    found: dict[str, _Statistics] = {}
    for (first, second), name in product((("mean", "std"), ("mu", "sigma")), tensors):
        names = name, f"{name.removesuffix(first)}{second}"
        mean, std = tensors[name], tensors.get(names[1])
        if not f".{name}".endswith(f".{first}") or std is None:
            continue
        if std.shape == mean.shape and mean.ndim:
            values = torch.stack([mean.flatten(), std.flatten()])
            found.setdefault(name.removesuffix(first).removesuffix("."), _Statistics(names, values))
    return found


def _candidates(
    net: nn.Module, tensors: State, rename: Mapping[str, str] | None, drop: Sequence[str]
) -> tuple[State, dict[str, _Statistics]]:
    """Return the tensors that may be weights, under the network's names, and the statistics."""
    kept = {n: t for n, t in tensors.items() if not any(f".{part}" in f".{n}" for part in drop)}
    # A network's own weights may have such names.
    statistics = {} if _statistics(net.state_dict()) else _statistics(kept)
    for one in statistics.values():
        kept = {name: entry for name, entry in kept.items() if name not in one.names}
    if not rename:
        return kept, statistics
    parts = "|".join(map(re.escape, sorted(rename, key=len, reverse=True)))
    whole = re.compile(rf"(?<![^.])(?:{parts})(?![^.])")
    renamed: State = {}
    for name, entry in kept.items():
        new = whole.sub(lambda match: rename[match[0]], name)
        if new in renamed:
            raise ValueError(f"rename {dict(rename)} gives two entries the name {new}")
        renamed[new] = entry
    return renamed, statistics


def _part_in_file(net: nn.Module, tensors: State) -> nn.Module:
    """Return the network, or the one module behind its normalisation if the file holds that."""
    children = list(net.children())
    inside = [child for child in children if not isinstance(child, Normalize)]
    parts = [net, *(inside if len(inside) == 1 < len(children) else [])]
    counts = [max(_prefixes(tensors, _required(part)).values(), default=0) for part in parts]
    return parts[counts.index(max(counts))]


def _matches(net: nn.Module, tensors: State, path: object, prefix: str | None) -> list[str]:
    """Return the prefixes under which the network fits; raise ValueError if there are none."""
    kind, found = type(net).__name__, _prefixes(tensors, _required(net))
    # "members.0" names state_dict.members.0 as well as members.0.net.
    asked = [place for place in found if prefix in (None, place) or f".{prefix}." in f".{place}."]
    fits = [p for p in asked or found if not _differences(net, _under(tensors, p))]
    if fits and asked:
        return fits
    if fits:
        known = _shortened(list(map(repr, fits)), 12)
        raise ValueError(f"{path} has no {kind} under {prefix!r}: pass prefix= one of {known}")
    nearest = max(asked or found or [""], key=found.__getitem__)
    where = f" (under {nearest!r})" if nearest else ""
    differences = _differences(net, _under(tensors, nearest))
    raise ValueError(f"{path}{where} does not fit {kind}: {differences}")


def _required(net: nn.Module) -> State:
    """Return the entries a checkpoint must hold: no `num_batches_tracked` before PyTorch 0.4.1."""
    state = net.state_dict()
    return {name: entry for name, entry in state.items() if "num_batches_tracked" not in name}


def _prefixes(names: Iterable[str], wanted: State) -> Counter[str]:
    found: Counter[str] = Counter()
    for parts in (name.split(".") for name in names):
        cuts = (cut for cut in range(len(parts)) if ".".join(parts[cut:]) in wanted)
        found.update(".".join(parts[:cut]) for cut in cuts)
    return found


def _under(tensors: State, prefix: str) -> State:
    start = f"{prefix}." if prefix else ""
    return {name[len(start) :]: entry for name, entry in tensors.items() if name.startswith(start)}


def _differences(net: nn.Module, state: State) -> str:
    """Describe why a state dict does not fit a network; empty if it fits."""
    own = net.state_dict()
    kinds = {
        "missing": [name for name in _required(net) if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {list(state[name].shape)} instead of {list(entry.shape)}"
            for name, entry in own.items()
            if name in state and state[name].shape != entry.shape
        ],
    }
    found = {kind: names for kind, names in kinds.items() if names}
    # All of them: with these names a user writes `rename`.
    return "; ".join(f"{len(names)} {kind} ({', '.join(names)})" for kind, names in found.items())


def _shortened(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _check_statistics(net: nn.Module, found: Mapping[str, _Statistics], path: object) -> None:
    """Refuse a checkpoint whose images were normalised by other numbers than the network's."""
    layers = [layer for layer in net.modules() if isinstance(layer, Normalize)]
    own = [torch.stack([layer.mean, layer.std]).flatten(1) for layer in layers]
    for place, (names, values) in found.items():
        # Of another number of channels they are not of these images.
        other = [
            one.shape == values.shape and not one.allclose(values.to(one), atol=1e-6) for one in own
        ]
        if own and not any(other):
            continue
        does = f"normalises by {_rounded(own[0])}" if own else "has no Normalize"
        last = place.rpartition(".")[2]
        drop = [f"{last}.{name.rpartition('.')[2]}".strip(".") for name in names]
        raise ValueError(
            f"{path} normalises by {_rounded(values)} ({place}), {type(net).__name__} {does}:"
            f" pass normalizer={place!r} to take the file's, or drop={drop} to ignore them"
        )


def _take_statistics(net: nn.Module, tensors: State, path: object, normalizer: str) -> None:
    layers, known = [m for m in net.modules() if isinstance(m, Normalize)], _statistics(tensors)
    found = {p: one.values for p, one in known.items() if f".{p}".endswith(f".{normalizer}")}
    if not layers:
        raise ValueError(f"{type(net).__name__} has no Normalize, got normalizer={normalizer!r}")
    if not found:
        places = ", ".join(map(repr, known)) or "nowhere"
        raise ValueError(f"{path} has no mean and std under {normalizer!r}, they are: {places}")
    # Members of an ensemble may each have a copy, all the same.
    first, *others = found.values()
    if not all(torch.equal(first, other) for other in others):
        several = ", ".join(map(repr, found))
        raise ValueError(f"{path} holds several that differ: pass normalizer= one of {several}")
    for layer in layers:
        layer.set_statistics(first)


def _rounded(statistics: Tensor) -> str:
    return " / ".join(str([round(x, 4) for x in row]) for row in statistics.tolist())
