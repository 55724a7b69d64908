"""Reading weights from checkpoints of any layout, including other authors'."""

import os
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count, product, takewhile
from pathlib import Path
from typing import Any

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
) -> nn.Module:
    """Load a network's weights from a checkpoint of any layout, without running code from it.

    The network may lie anywhere in the file: a plain state dict, one under `state_dict`, `model`,
    `last` …, behind `module.`, or in a Lightning checkpoint such as `defense.members.0`. A
    `ZooNet` also takes the weights of the zoo's own network. If the file has the images' `mean` and
    `std` (or `mu` and `sigma`), they must equal the network's, unless dropped.

    Args:
        net: the network, changed in place and returned.
        path: the file.
        prefix: place of the network in the file, or a part of it; None searches.
        rename: components of names in the file, or several in a row, and the network's names for
            them, such as {"fc": "linear", "layer.0.block": "block1.layer"}; the longest one counts.
        drop: parts of names in the file to ignore, such as "sub_block1.".

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: not a checkpoint, none or several such networks, or weights that are not finite.
    """
    part, tensors, places = _search(net, path, prefix, rename, drop)
    if len(places) > 1:
        several = f"holds several {type(part).__name__}: pass prefix= one of {_listed(places)}"
        raise ValueError(f"{path} {several}")
    state = _under(tensors, places[0])
    if nonfinite := [name for name, entry in state.items() if not entry.isfinite().all()]:
        raise ValueError(f"{path}: {len(nonfinite)} weights are not finite, as {nonfinite[0]}")
    part.load_state_dict(state)
    return net


def member_prefixes(
    net: nn.Module,
    path: str | os.PathLike[str],
    prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    drop: Sequence[str] = (),
) -> list[str]:
    """Return the prefixes, for `load_weights`, of an ensemble numbered from 0 in a checkpoint.

    Args:
        net: a network of the members' kind.
        path: the file.
        prefix: place of the ensemble in the file, or a part of it; None searches.
        rename: as in `load_weights`.
        drop: as in `load_weights`.
    """
    _, _, places = _search(net, path, prefix, rename, drop)
    single = len(places) == 1 and not re.search(r"\d", places[0])
    ensembles = [places] if single else []  # of one network
    for zero in (zero for place in places for zero in re.finditer(r"(?<!\d)0(?!\d)", place)):
        # Each 0 in a place may be the member's number: count how far it goes up.
        before, after = zero.string[: zero.start()], zero.string[zero.end() :]
        members = (f"{before}{number}{after}" for number in count())
        ensembles.append(list(takewhile(places.__contains__, members)))
    if not ensembles:
        raise ValueError(
            f"{path} holds no {type(net).__name__} numbered from 0, only: {_listed(places)}"
        )
    most = max(map(len, ensembles))
    longest = [members for members in ensembles if len(members) == most]
    if len(longest) > 1:
        several = _listed(members[0] for members in longest)
        raise ValueError(f"{path} holds several ensembles, choose by prefix=: {several}")
    return longest[0]


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
            f"{path} holds a {refused[1]}, which torch.load(weights_only=True) refuses: save the "
            "state dict alone, or if you trust the file allow it with "
            "torch.serialization.add_safe_globals"
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


def _search(
    net: nn.Module,
    path: str | os.PathLike[str],
    prefix: str | None,
    rename: Mapping[str, str] | None,
    drop: Sequence[str],
) -> tuple[nn.Module, State, list[str]]:
    """Return the part of a network that a file holds, the file's tensors, and where it fits.

    The part is the network, or the one module behind its normalisation.
    """
    tensors, children = _candidates(net, path, rename, drop), list(net.children())
    inside = [child for child in children if not isinstance(child, Normalize)]
    parts = [net, *(inside if len(inside) == 1 < len(children) else [])]
    counted = [(part, _prefixes(tensors, _required(part))) for part in parts]
    part, found = max(counted, key=lambda one: max(one[1].values(), default=0))
    # "members.0" names state_dict.members.0 as well as members.0.net.
    asked = [place for place in found if prefix in (None, place) or f".{prefix}." in f".{place}."]
    fits = [p for p in asked or found if not _differences(part, _under(tensors, p))]
    if fits and asked:
        return part, tensors, fits
    kind = type(part).__name__
    if fits:
        known = f"pass prefix= one of {_listed(fits)}"
        raise ValueError(f"{path} has no {kind} under {prefix!r}: {known}")
    nearest = max(asked or found or [""], key=found.__getitem__)
    where = f" (under {nearest!r})" if nearest else ""
    differences = _differences(part, _under(tensors, nearest))
    raise ValueError(f"{path}{where} does not fit {kind}: {differences}")


def _candidates(
    net: nn.Module,
    path: str | os.PathLike[str],
    rename: Mapping[str, str] | None,
    drop: Sequence[str],
) -> State:
    """Return the tensors of a file that may be weights, under the network's names."""
    tensors = named_tensors(read_file(path))
    kept = {n: t for n, t in tensors if not any(f".{part}" in f".{n}" for part in drop)}
    if not _statistics(net.state_dict()):  # else its own weights have such names
        for names, values in _statistics(kept).items():
            _check_statistics(net, names, values, path)
            kept = {name: entry for name, entry in kept.items() if name not in names}
    if not rename:
        return kept
    parts = "|".join(map(re.escape, sorted(rename, key=len, reverse=True)))
    whole = re.compile(rf"(?<![^.])(?:{parts})(?![^.])")
    renamed: State = {}
    for name, entry in kept.items():
        new = whole.sub(lambda match: rename[match[0]], name)
        if new in renamed:
            raise ValueError(f"rename {dict(rename)} gives two entries the name {new}")
        renamed[new] = entry
    return renamed


def _statistics(tensors: State) -> dict[tuple[str, str], Tensor]:
    """Find `mean` and `std`, or `mu` and `sigma`, of one shape beside each other, as [2, C]."""
    found = {}
    for (first, second), name in product((("mean", "std"), ("mu", "sigma")), tensors):
        names = name, name.removesuffix(first) + second
        mean, std = tensors[name], tensors.get(names[1])
        if not f".{name}".endswith(f".{first}") or std is None:
            continue
        if std.shape == mean.shape and mean.ndim:
            found[names] = torch.stack([mean.flatten(), std.flatten()])
    return found


def _check_statistics(net: nn.Module, names: tuple[str, str], values: Tensor, path: object) -> None:
    """Refuse a checkpoint whose images were normalised by other numbers than the network's."""
    layers = [layer for layer in net.modules() if isinstance(layer, Normalize)]
    own = [torch.stack([layer.mean, layer.std]).flatten(1) for layer in layers]
    # Of another number of channels they are not of these images.
    same = [one.shape != values.shape or one.allclose(values.to(one), atol=1e-6) for one in own]
    if own and all(same):
        return
    mean, std = ([round(number, 6) for number in row] for row in values.tolist())
    parts = [".".join(name.split(".")[-2:]) for name in names]
    does = "has other numbers" if own else "has no Normalize"
    raise ValueError(
        f"{path} normalises by mean {mean} and std {std} ({names[0]}), {type(net).__name__} {does}:"
        f" build it with these, or pass drop={parts} to ignore them"
    )


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


def _listed(places: Iterable[str]) -> str:
    return ", ".join(map(repr, places))
