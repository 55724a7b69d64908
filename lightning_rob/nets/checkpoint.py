"""Weights from a file into a network, wherever in the file they are."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    # The unpickler meets arbitrary bytes here, so there is no list of what it may raise.
    except Exception as error:
        refused = re.search(r"GLOBAL (\S+) was not an allowed", str(error))
        if refused is None:
            raise ValueError(f"{path} is not a PyTorch checkpoint, or is cut short") from None
        raise ValueError(
            f"{path} holds a {refused[1]}, which loading weights only refuses: save the state dict"
            " alone, or if you trust the file allow it with torch.serialization.add_safe_globals"
        ) from None


def _tensors(tree: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of nested dicts and lists under dotted names."""
    if isinstance(tree, Tensor):
        yield path, tree
    items = tree.items() if isinstance(tree, Mapping) else ()
    for key, child in enumerate(tree) if isinstance(tree, list | tuple) else items:
        yield from _tensors(child, f"{path}.{key}" if path else str(key))


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
    return "; ".join(f"{len(n)} {kind} ({_some(n)})" for kind, n in kinds.items() if n)


def _choose(net: nn.Module, tensors: State, path: object, prefix: str | None) -> State:
    """The one part of a checkpoint that fits the network."""
    kind, found = type(net).__name__, _prefixes(tensors, _entries(net))
    at = [p for p in found if prefix in (None, p) or p.endswith(f".{prefix}")] or [prefix or ""]
    fitting = [p for p in at if not _differences(net, _under(tensors, p))]
    if not fitting:
        nearest = max(at, key=found.__getitem__)
        where = f" (under {nearest!r})" if nearest else ""
        differences = _differences(net, _under(tensors, nearest))
        raise ValueError(f"{path}{where} does not fit {kind}: {differences}")
    if len(fitting) > 1:
        several = _some([repr(p) for p in fitting], 12)
        raise ValueError(f"{path} holds several {kind}: pass prefix= one of {several}")
    return _under(tensors, fitting[0])


def load_weights(
    net: nn.Module, path: str | os.PathLike[str], prefix: str | None = None
) -> nn.Module:
    """Load a network's weights from a checkpoint of any layout, and nothing but weights.

    The network may lie anywhere in the file: a plain state dict, one under `state_dict`, `model`,
    `last` …, behind `module.`, or a part of a Lightning checkpoint such as `defense.members.0`.

    Args:
        net: the network, changed in place.
        path: the file.
        prefix: where in the file the network is, or the end of that; None finds it.

    Returns:
        The network.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, holds no or several such networks, or no finite weights.
    """
    state = _choose(net, dict(_tensors(_read(path))), path, prefix)
    infinite = [name for name, entry in state.items() if not entry.isfinite().all()]
    if infinite:
        raise ValueError(f"{path}: {len(infinite)} weights are not finite ({_some(infinite)})")
    net.load_state_dict(state)
    return net
