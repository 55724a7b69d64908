"""What tells one evaluation from another."""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from datetime import datetime
from functools import partial
from os import getpid
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_rob.defenses import Defense

# What torch keeps in a module beside its arguments and parts.
KEPT_BY_TORCH = set(vars(nn.Module())) | {"training"}
# No other process has this, so what cannot be described is never taken for something else.
HERE = f"{datetime.now().astimezone().isoformat()} {getpid()}"


def describe(attack: object) -> str:
    """The attack with all its arguments, functions by name and not by address."""
    return re.sub(r"<function ([\w.<>]+) at 0x[0-9a-f]+>", r"\1", repr(attack))


def told(value: Any) -> Any:
    """A value as plain data that is equal for equal values, and for no others.

    Functions are told by their code, arrays by a digest, objects by class and attributes. What has
    none of these is told so that no other process says the same.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Tensor | np.ndarray):
        return _digest(torch.as_tensor(value))
    if isinstance(value, Mapping):
        return sorted((told(key), told(part)) for key, part in value.items())
    if isinstance(value, AbstractSet):
        return sorted(map(str, map(told, value)))
    if isinstance(value, Sequence):
        return [told(part) for part in value]
    if isinstance(value, PurePath | torch.device | torch.dtype | torch.Size):
        return str(value)
    if isinstance(value, partial):
        return ["partial", told(value.func), told(value.args), told(value.keywords)]
    return _object(value)


def _object(value: Any) -> Any:
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"
    if isinstance(value, type) or inspect.isbuiltin(value):
        return name
    if inspect.isfunction(value):
        inside = [cell.cell_contents for cell in value.__closure__ or ()]
        return [name, _code(value.__code__), told(value.__defaults__), told(inside)]
    if inspect.ismethod(value):
        return [told(value.__func__), type(value.__self__).__qualname__]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, nn.Module):
        return [kind, _public(value), [(k, told(part)) for k, part in value.named_children()]]
    if is_dataclass(value):
        return [kind, [(f.name, told(getattr(value, f.name))) for f in fields(value)]]
    if isinstance(getattr(value, "__dict__", None), dict) and vars(value):
        return [kind, _public(value)]
    text = repr(value)
    return [kind, text] if " at 0x" not in text else [kind, HERE]


def _public(value: Any) -> Any:
    """An object's attributes, without what it keeps for itself on the way."""
    own = {k: v for k, v in vars(value).items() if k not in KEPT_BY_TORCH}
    return told({k: v for k, v in own.items() if not k.startswith("_")})


def _code(code: Any) -> str:
    """A function's code, with the code that is inside of it."""
    constants = [_code(c) if inspect.iscode(c) else repr(c) for c in code.co_consts]
    text = f"{code.co_code.hex()} {code.co_names} {constants}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    kind = f"{tensor.dtype} {list(tensor.shape)}"
    return f"{kind} {hashlib.sha256(content).hexdigest()}"


def fingerprint(defense: Defense) -> str:
    """What tells a defense from all others: networks, weights, probabilities, rule, arguments."""
    try:
        arguments = told(defense)
    except RecursionError:  # an object that holds itself
        arguments = HERE
    digest = hashlib.sha256(f"{describe(defense)} {arguments}".encode())
    # Buffers by themselves: normalisation and probabilities are in no state dict.
    for name, tensor in [*defense.named_parameters(), *defense.named_buffers()]:
        digest.update(f"{name} {_digest(tensor)}".encode())
    return digest.hexdigest()[:16]


def key_of(**circumstances: Any) -> str:
    """A name for all that a figure depends on."""
    text = json.dumps(circumstances, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
