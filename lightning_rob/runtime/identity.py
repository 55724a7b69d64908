"""Identity of attacks, modules and data: as readable plain data, as fingerprints, as cache keys.

A digest covers weights, buffers, attributes and the source files of the user's code. It does not
see what a script changes at run time: methods, attributes of a class, global variables, hooks.
"""

import ast
import hashlib
import inspect
import logging
import math
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, partial
from pathlib import Path, PurePath
from types import CellType, ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor, nn

DIGITS = 16  # hexadecimal digits of a fingerprint or key
TORCH_ATTRIBUTES = set(vars(nn.Module())) | {"training"}
TEXTS = (range, slice, PurePath, torch.device, torch.dtype, Enum)
NUMBERS = (bool, int, float, complex, str, bytes, tuple, Tensor, np.ndarray, np.generic)
PLAIN = (list, dict, set, frozenset, deque, SimpleNamespace, *TEXTS, partial, type)
LIBRARIES = {"lightning_rob", "lightning", "torch", "torchvision", "torchmetrics", "kornia"}
LIBRARIES |= {"numpy", "timm", "pytorch_lightning", "lightning_fabric"}


def import_path(value: Any) -> str:
    """Return the shortest path under which a class or function can be imported."""
    module, name = getattr(value, "__module__", None) or "", getattr(value, "__qualname__", "")
    parts = module.split(".")
    for count in range(1, len(parts)):
        package = ".".join(parts[:count])
        if getattr(sys.modules.get(package), name, None) is value:
            return f"{package}.{name}"
    return f"{module}.{name}"


def attack_spec(value: Any) -> Any:
    """Return an attack, or an argument of one, as plain data, ready for JSON and for recipes.

    An object becomes {"class_path": …, "init_args": {…}}, a function its import path; numbers,
    texts, lists and mappings stay; an infinite number becomes "inf", for JSON has none.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): attack_spec(part) for key, part in value.items()}
    if isinstance(value, Sequence | AbstractSet):
        return [attack_spec(part) for part in value]
    if hasattr(value, "__qualname__"):  # a class, a function, an objective
        return import_path(value)
    if isinstance(value, PurePath | torch.device | torch.dtype | Tensor | np.ndarray):
        return str(value)
    if isinstance(value, partial):
        arguments = {"args": list(value.args), **value.keywords}
        return {"class_path": import_path(value.func), "init_args": attack_spec(arguments)}
    if is_dataclass(value):
        arguments = {
            field.name: getattr(value, field.name) for field in fields(value) if field.init
        }
    else:
        arguments = _public_attributes(value)
    return {"class_path": import_path(type(value)), "init_args": attack_spec(arguments)}


class _Digests:
    """Digests of values: equal for equal values in every process, different for all others."""

    def __init__(self) -> None:
        # Values are held beside their digests, so that their ids stay their own.
        self._known: dict[int, tuple[Any, str]] = {}

    def of(self, value: Any) -> str:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if id(value) not in self._known:
            self._known[id(value)] = value, "outer value"  # found again if the value holds itself
            self._known[id(value)] = value, _hashed(self._parts(value))
        return self._known[id(value)][1]

    def _parts(self, value: Any) -> Any:
        if isinstance(value, Tensor | np.ndarray):
            return self._array(value)
        if isinstance(value, Mapping):
            return sorted((self.of(key), self.of(part)) for key, part in value.items())
        if isinstance(value, AbstractSet):
            return sorted(map(self.of, value))
        if isinstance(value, TEXTS):
            return [type(value), str(value)]
        if isinstance(value, Sequence):
            return [*map(self.of, value)]
        if isinstance(value, partial):
            return ["partial", *map(self.of, (value.func, value.args, value.keywords))]
        if isinstance(value, ModuleType | logging.Logger):
            return [type(value), getattr(value, "__name__", "") or value.name]
        if isinstance(value, type):
            users = [base for base in value.__mro__ if not is_library(base.__module__)]
            # Local classes of one name may differ by what their methods hold, or by their place.
            local = [base for base in users if "<locals>" in base.__qualname__]
            methods = [part for one in local for part in vars(one).values() if callable(part)]
            return [_name(value), *map(self._source, users), *map(self.of, methods)]
        return self._routine(value) if inspect.isroutine(value) else self._object(value)

    def _array(self, value: Tensor | np.ndarray) -> Any:
        try:
            tensor = torch.as_tensor(value).detach().cpu().resolve_conj().resolve_neg()
            content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
            return [tensor.dtype, list(tensor.shape), hashlib.sha256(content).digest()]
        except (TypeError, ValueError, RuntimeError):  # text, sparse, lazy
            return _unknown()

    def _routine(self, value: Any) -> Any:
        wrapped = getattr(value, "__wrapped__", None)  # by a decorator such as functools.cache
        if inspect.ismethod(value):
            return [self.of(value.__func__), self.of(value.__self__)]
        if not inspect.isfunction(value):
            return self.of(wrapped) if wrapped else _name(value)
        # Values that a local function holds are arguments, as those of a partial.
        cells = [None if c == CellType() else c.cell_contents for c in value.__closure__ or ()]
        parts: list[Any] = [
            _name(value),
            self.of([value.__defaults__, value.__kwdefaults__, cells, wrapped]),
        ]
        if not is_library(value.__module__):
            # Two lambdas of one line have one name, but not one place.
            parts += [[*value.__code__.co_positions()], self._source(value)]
        return parts

    def _source(self, value: Any) -> str:
        # A class or function of a notebook has no file: no other process gives it this digest.
        found = getattr(sys.modules.get(value.__module__), "__file__", None)
        return _sources(value.__module__) if found else _unknown()

    def _object(self, value: Any) -> Any:
        kind = self.of(type(value))
        if isinstance(value, nn.Module):
            if hasattr(value, "_orig_mod"):  # by torch.compile
                return [kind, self.of(value._orig_mod)]
            # Not the state dict: normalisation and probabilities are buffers that it leaves out.
            parts = ("_parameters", "_buffers", "_modules")
            state = self.of([[*getattr(value, part).items()] for part in parts])
            if isinstance(value, torch.jit.ScriptModule):  # whose code is not in Python
                return [kind, _unknown()]
            code = value.code if isinstance(value, torch.fx.GraphModule) else None
            return [kind, code, self.of(_arguments(value)), state]
        if is_dataclass(value):
            return [kind, self.of({f.name: getattr(value, f.name) for f in fields(value)})]
        if isinstance(getattr(value, "__dict__", None), dict) and vars(value):
            return [kind, self.of(_arguments(value))]
        return [kind, _unknown() if " at 0x" in repr(value) else repr(value)]


def _unknown() -> str:
    return uuid4().hex  # no other process produces it


def _hashed(parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', '')}.{value.__qualname__}"


def _public_attributes(value: Any) -> dict[str, Any]:
    """Return an object's arguments, without private state and torch's bookkeeping."""
    own = vars(value) if hasattr(value, "__dict__") else {}
    return {k: v for k, v in own.items() if k not in TORCH_ATTRIBUTES and not k.startswith("_")}


def _arguments(value: Any) -> dict[str, Any]:
    """Return an object's public attributes and, of a user's class, its private values."""
    found = _public_attributes(value)
    if is_library(type(value).__module__):  # whose private state may be a cache
        return found
    # Attributes of torch and of a LightningModule change in a run. Attacks need only torch, so
    # Lightning is not imported here.
    lightning = sys.modules.get("lightning.pytorch")
    volatile = _attributes_of(getattr(lightning, "LightningModule", nn.Module))
    for name, part in vars(value).items():
        # Lightning adds an empty mapping, and a library may keep a lock. Private containers count
        # for networks alone: others may keep records in them.
        plain = isinstance(part, PLAIN) or inspect.isroutine(part)
        of_network = isinstance(value, nn.Module) and (
            plain or not is_library(type(part).__module__)
        )
        empty = isinstance(part, Mapping) and not part
        counts = isinstance(part, NUMBERS) or (of_network and not empty)
        if name.startswith("_") and name not in volatile and counts:
            found[name] = part
    return found


@cache
def _attributes_of(kind: type[nn.Module]) -> set[str]:
    return TORCH_ATTRIBUTES | {*vars(kind())} | {"_current_fx_name"}


@cache
def _sources(module: str) -> str:
    """Return a digest of a user's file and of those that it imports, as first seen."""
    found: dict[str, bytes] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        if name in found or is_library(name) or not path.is_file() or path.suffix != ".py":
            continue
        found[name] = path.read_bytes()
        if {"site-packages", "dist-packages"} & {*path.parts}:
            continue
        package = sys.modules[name].__package__ or ""
        with suppress(SyntaxError):  # edited since it was imported
            for node in ast.walk(ast.parse(found[name])):
                if isinstance(node, ast.Import):
                    waiting += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                    origin = ".".join(filter(None, (above, node.module)))
                    waiting += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
    return _hashed(sorted(found.items()))


def is_library(module: str) -> bool:
    """Return whether code is Python's or a package's, which changes with its version."""
    package = (module or "builtins").split(".")[0]
    return package in LIBRARIES or (package in sys.stdlib_module_names and package != "__main__")


def fingerprint(module: nn.Module) -> str:
    """Return a digest of a network or a defense: weights, arguments, rule, files of its classes."""
    try:
        return _hashed(_Digests().of(module))[:DIGITS]
    except RecursionError:  # very many layers, one inside the other
        return uuid4().hex[:DIGITS]


def cache_key(**circumstances: Any) -> str:
    """Return a name for all that a stored result depends on; of modules give `fingerprint`."""
    return _hashed(_Digests().of(circumstances))[:DIGITS]
