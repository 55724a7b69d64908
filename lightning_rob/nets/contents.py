"""What is in a checkpoint: all its tensors by their dotted names."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rob.files import check_file

State = dict[str, Tensor]


def read_file(path: str | os.PathLike[str]) -> Any:
    """What `torch.save` has put into a file, on the CPU; nothing in it is run.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no checkpoint, has changed since it was written, or holds code.
    """
    check_file(Path(path))
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    # The unpickler meets arbitrary bytes here, so there is no list of what it may raise: of a file
    # that is cut short even OSError, for it has opened before.
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


def tensors_in(path: str | os.PathLike[str]) -> State:
    """A checkpoint's tensors by their dotted names.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a checkpoint, or holds more than weights.
    """
    return dict(_tensors(read_file(path)))


def members_begun(path: str | os.PathLike[str]) -> int | None:
    """How many members a checkpoint of staged training (BAT, IAT) has begun; None for others."""
    staged = content.get("staged") if isinstance(content := read_file(path), Mapping) else None
    return staged["stage"] + 1 if isinstance(staged, Mapping) and "stage" in staged else None


def without(tensors: State, drop: Sequence[str]) -> State:
    """Those whose names have none of the given parts, from the start of a component on."""
    dropped = tuple(f".{part}" for part in drop)
    return {n: entry for n, entry in tensors.items() if not any(d in f".{n}" for d in dropped)}


def renamed(tensors: State, rename: Mapping[str, str]) -> State:
    """The same tensors with components of their names replaced.

    Raises:
        ValueError: two names become one.
    """
    names = {name: ".".join(rename.get(c, c) for c in name.split(".")) for name in tensors}
    twice = [name for name, times in Counter(names.values()).items() if times > 1]
    if twice:
        raise ValueError(f"rename {dict(rename)} gives two entries the name {twice[0]}")
    return {names[name]: entry for name, entry in tensors.items()}
