"""Reading weights from checkpoints of any layout, including other authors'."""

import os
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product, repeat, takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_rob.nets.normalize import Normalize
from lightning_rob.runtime.files import check_file, is_undigested

State = dict[str, Tensor]
Numbering = dict[tuple[str, str], set[int]]  # text before and after a number -> numbers found
LINE = 96  # characters of an error message's line


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
        net: the network, changed in place.
        path: the file.
        prefix: place of the network in the file, or a part of it; None searches.
        rename: components of names in the file, or several in a row, and the network's names for
            them, such as {"fc": "linear", "layer.0.block": "block1.layer"}; the longest one counts;
            applied before the search.
        drop: parts of names in the file to ignore, such as "sub_block1.".
        normalizer: place of the images' `mean` and `std` (or `mu` and `sigma`) in the file, or
            its end, such as "model0.normalizer"; the network then normalises by them. With None,
            statistics in the file must equal the network's, unless dropped.

    Returns:
        The network.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint, holds no or several such networks, or weights
            that are not finite.
    """
    tensors = read_tensors(path)
    if normalizer is None:
        _check_statistics(net, _without_parts(tensors, drop), path)
    candidates = _candidates(net, tensors, rename, drop)
    part = _part_in_file(net, candidates)
    state = _only_match(part, candidates, path, prefix)
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
    """Find an ensemble in a checkpoint: networks numbered from 0, `members.0` or `model0` ….

    Args:
        nets: a network for each member; or a single one, then all members of its kind are found.
        path: the file.
        prefix: place of the ensemble in the file, or a part of it; None searches.
        rename: as in `load_weights`.
        drop: as in `load_weights`.

    Returns:
        The members' prefixes for `load_weights`, in order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint, or holds no or several such ensembles.
    """
    tensors = read_tensors(path)
    places = []
    for net in nets:
        candidates = _candidates(net, tensors, rename, drop)
        places.append(_matches(_part_in_file(net, candidates), candidates, path, prefix))
    numberings = [_numbering(prefixes) for prefixes in places]
    counts = {around: _consecutive(numberings, around) for around in numberings[0]}
    most = max(counts.values(), default=0)
    if most < len(nets):
        known = ", ".join(dict.fromkeys(repr(place) for found in places for place in found))
        raise ValueError(f"{path} holds no {type(nets[0]).__name__} numbered from 0, only: {known}")
    ensembles = [around for around, count in counts.items() if count == most]
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
    """Read what `torch.save` or safetensors wrote, to the CPU; no code in the file is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not a checkpoint, has changed since it was written, or holds code.
    """
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
    if is_undigested(Path(path)):
        text = f"{path} was written without a digest: damage would not be seen"
        warnings.warn(text, stacklevel=2)
    return content


def read_tensors(path: str | os.PathLike[str]) -> State:
    """Return all tensors of a checkpoint by their dotted names; errors as of `read_file`."""
    return dict(_flatten(read_file(path)))


def _flatten(tree: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts and lists under dotted names."""
    if isinstance(tree, Tensor):
        yield name, tree
    items = tree.items() if isinstance(tree, Mapping) else ()
    for key, child in enumerate(tree) if isinstance(tree, list | tuple) else items:
        yield from _flatten(child, f"{name}.{key}" if name else str(key))


def _candidates(
    net: nn.Module, tensors: State, rename: Mapping[str, str] | None, drop: Sequence[str]
) -> State:
    """Return the tensors that may be weights, under the network's names."""
    tensors = _without_parts(tensors, drop)
    statistics = {
        f"{place}.{name}".strip(".")
        for place in _foreign_statistics(net, tensors)
        for name in _pair_at(tensors, place)
    }
    kept = {name: entry for name, entry in tensors.items() if name not in statistics}
    return _renamed(kept, rename or {})


def _without_parts(tensors: State, drop: Sequence[str]) -> State:
    """Leave out names that contain one of the parts, from the start of a component on."""
    dropped = tuple(f".{part}" for part in drop)
    return {n: entry for n, entry in tensors.items() if not any(d in f".{n}" for d in dropped)}


def _renamed(tensors: State, rename: Mapping[str, str]) -> State:
    """Replace components of names; raise ValueError if two names become one."""
    parts = "|".join(map(re.escape, sorted(rename, key=len, reverse=True)))
    whole = re.compile(rf"(?<![^.])(?:{parts})(?![^.])")
    names = {n: whole.sub(lambda m: rename[m[0]], n) if rename else n for n in tensors}
    twice = [name for name, times in Counter(names.values()).items() if times > 1]
    if twice:
        raise ValueError(f"rename {dict(rename)} gives two entries the name {twice[0]}")
    return {names[name]: entry for name, entry in tensors.items()}


# Where in the file a network is


def _part_in_file(net: nn.Module, tensors: State) -> nn.Module:
    """Return the network, or the one module behind its normalisation if the file holds that."""
    children = list(net.children())
    inside = [child for child in children if not isinstance(child, Normalize)]
    parts = [net, *(inside if len(inside) == 1 < len(children) else [])]
    counts = [max(_prefixes(tensors, _required(part)).values(), default=0) for part in parts]
    return parts[counts.index(max(counts))]


def _only_match(net: nn.Module, tensors: State, path: object, prefix: str | None) -> State:
    """Return the one part of a checkpoint that fits the network."""
    matches = _matches(net, tensors, path, prefix)
    if len(matches) > 1:
        several = _shortened([repr(match) for match in matches], 12)
        raise ValueError(
            f"{path} holds several {type(net).__name__}: pass prefix= one of {several}"
        )
    state = _under(tensors, matches[0])
    nonfinite = [name for name, entry in state.items() if not entry.isfinite().all()]
    if nonfinite:
        raise ValueError(
            f"{path}: {len(nonfinite)} weights are not finite ({_shortened(nonfinite)})"
        )
    return state


def _matches(net: nn.Module, tensors: State, path: object, prefix: str | None) -> list[str]:
    """Return the prefixes under which the network fits; raise ValueError if there are none."""
    kind, found = type(net).__name__, _prefixes(tensors, _required(net))
    # "members.0" names state_dict.members.0 as well as members.0.net.
    asked = [place for place in found if prefix in (None, place) or f".{prefix}." in f".{place}."]
    fits = [p for p in asked or found if not _differences(net, _under(tensors, p))]
    if fits and asked:
        return fits
    if fits:
        known = _shortened([repr(place) for place in fits], 12)
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
    """Count the wanted names that are found under each prefix."""
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
    return "; ".join(f"{len(n)} {kind} ({_wrapped(n)})" for kind, n in kinds.items() if n)


def _shortened(names: Sequence[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def _wrapped(names: Sequence[str]) -> str:
    """Join all names, on lines of their own if they do not fit one line."""
    text = ", ".join(names)
    if len(text) <= LINE:
        return text
    wrapped = textwrap.wrap(text, LINE, break_long_words=False, break_on_hyphens=False)
    return "\n" + textwrap.indent("\n".join(wrapped), "    ")


def _numbering(prefixes: Iterable[str]) -> Numbering:
    found: Numbering = {}
    for prefix in prefixes:
        for number in re.finditer(r"(?<!\d)(0|[1-9]\d*)(?!\d)", prefix):
            around = prefix[: number.start()], prefix[number.end() :]
            found.setdefault(around, set()).add(int(number[0]))
    return found


def _consecutive(numberings: Sequence[Numbering], around: tuple[str, str]) -> int:
    """Count the members from 0 up to the first gap."""
    each = enumerate(numberings if len(numberings) > 1 else repeat(numberings[0]))
    return sum(1 for _ in takewhile(lambda pair: pair[0] in pair[1].get(around, ()), each))


# Mean and standard deviation of the images, which some authors save beside the weights


STATISTICS = (("mean", "std"), ("mu", "sigma"))


def _pair_at(tensors: Mapping[str, Tensor], place: str) -> tuple[str, str]:
    """Return the names of the mean and the standard deviation at a place."""
    under = f"{place}." if place else ""
    return next(pair for pair in STATISTICS if f"{under}{pair[0]}" in tensors)


def _statistics(tensors: Mapping[str, Tensor], under: str | None = None) -> State:
    """Find `mean` and `std`, or `mu` and `sigma`, of one shape beside each other.

    Args:
        tensors: tensors of a checkpoint by dotted names.
        under: the place where they must be, or its end; None finds all.

    Returns:
        [2, C] (mean, std) by place.
    """
    found: State = {}
    for (first, second), name in product(STATISTICS, tensors):
        place = name.removesuffix(first)
        mean, std = tensors[name], tensors.get(f"{place}{second}")
        if not f".{name}".endswith(f".{first}") or std is None:
            continue
        at = place.removesuffix(".")
        if std.shape == mean.shape and mean.ndim and _is_under(at, under):
            found.setdefault(at, torch.stack([mean.flatten(), std.flatten()]))
    return found


def _is_under(place: str, under: str | None) -> bool:
    return under in (None, place) or f".{place}".endswith(f".{under}")


def _foreign_statistics(net: nn.Module, tensors: State) -> State:
    """Find statistics that are not weights of the network under these names."""
    return {} if _statistics(net.state_dict()) else _statistics(tensors)


def _check_statistics(net: nn.Module, tensors: State, path: object) -> None:
    """Refuse a checkpoint whose images were normalised by other numbers than the network's."""
    own = [torch.stack([layer.mean, layer.std]).flatten(1) for layer in _layers(net)]
    for place, statistics in _foreign_statistics(net, tensors).items():
        if own and not any(_differ(one, statistics) for one in own):
            continue
        does = f"normalises by {_rounded(own[0])}" if own else "has no Normalize"
        last = f"{place}.".rpartition(".")[0].rpartition(".")[2]
        drop = [f"{last}.{name}".strip(".") for name in _pair_at(tensors, place)]
        raise ValueError(
            f"{path} normalises by {_rounded(statistics)} ({place}), {type(net).__name__} {does}:"
            f" pass normalizer={place!r} to take the file's, or drop={drop} to ignore them"
        )


def _take_statistics(net: nn.Module, tensors: State, path: object, normalizer: str) -> None:
    """Make the network normalise images by the checkpoint's statistics."""
    layers, found = _layers(net), _statistics(tensors, normalizer)
    if not layers:
        raise ValueError(f"{type(net).__name__} has no Normalize, got normalizer={normalizer!r}")
    if not found:
        known = ", ".join(map(repr, _statistics(tensors))) or "nowhere"
        raise ValueError(f"{path} has no mean and std under {normalizer!r}, they are: {known}")
    first, *others = found.values()
    if not all(torch.equal(first, other) for other in others):
        several = ", ".join(map(repr, found))
        raise ValueError(f"{path} holds several that differ: pass normalizer= one of {several}")
    for layer in layers:
        layer.set_statistics(first)


def _layers(net: nn.Module) -> list[Normalize]:
    return [layer for layer in net.modules() if isinstance(layer, Normalize)]


def _differ(one: Tensor, other: Tensor) -> bool:
    """Return whether both have the same number of channels, but other values."""
    return one.shape == other.shape and not torch.allclose(one, other.to(one), atol=1e-6)


def _rounded(statistics: Tensor) -> str:
    return " / ".join(str([round(x, 4) for x in row]) for row in statistics.tolist())
