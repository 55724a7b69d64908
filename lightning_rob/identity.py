"""Identity of attacks, modules and data: as readable plain data, as fingerprints, as cache keys."""

import hashlib
import inspect
import json
import logging
import math
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, cached_property, partial, partialmethod
from pathlib import PurePath
from types import CellType, CodeType, ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor, nn

DIGITS = 16  # hexadecimal digits of a fingerprint or key
TORCH_ATTRIBUTES = set(vars(nn.Module())) | {"training"}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
CONSTANTS = (bool, int, float, complex, str, bytes, PurePath, torch.dtype, torch.device)
CONTAINERS = (tuple, list, dict, set, frozenset, deque, SimpleNamespace)
VALUES = (*CONSTANTS, *CONTAINERS, Tensor, np.ndarray, np.generic)
LIBRARIES = {"lightning_rob", "lightning", "torch", "torchvision", "torchmetrics", "kornia"}
LIBRARIES |= {"numpy", "timm"}
# A class's annotations since Python 3.14: a function that holds the namespace it lies in.
ANNOTATE = {"__annotate__", "__annotate_func__"}
# Stands for an object without a description, so that no other process takes it for one of its own.
PROCESS = f"process {uuid4().hex}"
LONGEST = 10_000  # characters of a description that is kept as it is; of a longer one, its digest
# While a value is described: whether a function reads it, and what is described so far, by this and
# the value's id. It holds the values, too, so that their ids stay their own.
READ: ContextVar[bool] = ContextVar("READ", default=False)
DONE: ContextVar[dict[tuple[int, bool], tuple[Any, Any]] | None] = ContextVar("DONE", default=None)


def import_path(value: Any) -> str:
    """Return the shortest path under which a class or function can be imported."""
    module, name = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    parts = module.split(".")
    for count in range(1, len(parts)):
        package = ".".join(parts[:count])
        if getattr(sys.modules.get(package), name, None) is value:
            return f"{package}.{name}"
    return f"{module}.{name}"


def attack_spec(value: Any) -> Any:
    """Return an attack with all its arguments as plain data, ready for JSON and for recipes.

    Args:
        value: an attack, or anything that is an argument of one.

    Returns:
        {"class_path": …, "init_args": {…}} for an attack, threat or other object, the import path
        for a function such as the objective, and numbers, texts, lists and mappings as themselves.
        An infinite number is the text "inf", for JSON has none.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, int | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): attack_spec(part) for key, part in value.items()}
    if isinstance(value, Sequence | AbstractSet):
        return [attack_spec(part) for part in value]
    if inspect.ismethod(value) and not isinstance(value.__self__, type):
        owner = attack_spec(_public_attributes(value.__self__))
        return {"class_path": import_path(value), "init_args": owner}
    if isinstance(value, type) or inspect.isroutine(value):
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


def to_plain_data(value: Any) -> Any:
    """Return plain data that is equal for equal values and differs for all others.

    Functions are represented by their code, arrays by a digest, objects by class and attributes.
    An object that has none of these is represented by a text that no other process produces.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    done = DONE.get()
    if done is None:
        token = DONE.set({})
        try:
            return to_plain_data(value)
        finally:
            DONE.reset(token)
    key = id(value), READ.get()
    if key not in done:
        done[key] = value, "outer value"  # found again if the value holds itself
        done[key] = value, _shortened(_described(value))
    return done[key][1]


def _shortened(found: Any) -> Any:
    """Return a long description's digest: values that share parts would grow exponentially."""
    if len(text := str(found)) <= LONGEST:
        return found
    return _undescribed() if PROCESS in text else hashlib.sha256(text.encode()).hexdigest()


def _undescribed() -> str:
    return f"{PROCESS} {uuid4().hex}"


def _described(value: Any) -> Any:
    if isinstance(value, Tensor | np.ndarray):
        return _tensor_digest(value)
    if isinstance(value, Mapping):
        pairs = [(to_plain_data(key), to_plain_data(part)) for key, part in value.items()]
        return sorted(pairs, key=lambda pair: str(pair[0]))
    if isinstance(value, AbstractSet):
        return sorted(map(str, map(to_plain_data, value)))
    if isinstance(value, range | slice | PurePath | torch.device | torch.dtype | torch.Size):
        return str(value)
    if isinstance(value, Sequence):
        return [to_plain_data(part) for part in value]
    if isinstance(value, partial):
        return ["partial", *map(to_plain_data, (value.func, value.args, value.keywords))]
    if not inspect.isfunction(value) and callable(getattr(value, "__wrapped__", None)):
        return to_plain_data(value.__wrapped__)  # by functools.cache
    if isinstance(value, type) or inspect.isroutine(value):
        return _routine(value)
    if isinstance(value, ModuleType | logging.Logger):
        return f"{type(value).__name__} {getattr(value, '__name__', '') or value.name}"
    if isinstance(value, Enum):
        return f"{type(value).__module__}.{value}"
    return _object(value)


def _routine(value: Any) -> Any:
    """Return a class by its name, a function by its code and all that it reads."""
    name = f"{getattr(value, '__module__', '')}.{value.__qualname__}"
    if inspect.isfunction(value):
        reads = [value.__defaults__, value.__kwdefaults__, _closure(value)]
        described = [name, _code(value.__code__), *map(to_plain_data, reads)]
        return described if READ.get() else [*described, _globals_of(value)]
    if inspect.ismethod(value):
        return [to_plain_data(value.__func__), to_plain_data(value.__self__)]
    return name


def _closure(function: Any) -> list[Any]:
    cells = function.__closure__ or ()
    return [None if cell == CellType() else cell.cell_contents for cell in cells]


def _globals_of(function: Any) -> list[Any]:
    """Return the code of the user's functions, and the values, that a function reads."""
    found, waiting, seen = [], [function], set()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        waiting += _functions_in([current.__defaults__, current.__kwdefaults__, _closure(current)])
        if _is_library(current.__module__):
            continue
        for name, value in sorted(_read_by(current).items()):
            found.append([name, _global(value)])
            waiting += _functions_in(value)
    return found


def _read_by(function: Any) -> dict[str, Any]:
    """Return the global values that a function reads, by name, and those of the user's modules."""
    names = _names(function.__code__)
    read = {name: function.__globals__[name] for name in names & {*function.__globals__}}
    imported = {name: sys.modules[name] for name in names & {*sys.modules}}  # in the function
    modules, seen = [*read.values(), *imported.values()], set()
    while modules:
        module = modules.pop()
        if not isinstance(module, ModuleType) or module in seen or _is_library(module.__name__):
            continue
        seen.add(module)
        inside = {name: vars(module)[name] for name in names & {*vars(module)}}
        modules += inside.values()
        read |= inside
    return {name: value for name, value in read.items() if not isinstance(value, ModuleType)}


def _functions_in(value: Any, depth: int = 3) -> list[Any]:
    """Return the functions in a value: itself, wrapped, or in a container."""
    if inspect.isfunction(value):
        return [value, *_functions_in(getattr(value, "__wrapped__", None))]
    if isinstance(value, partial):
        return _functions_in(value.func)
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (list, tuple, set, frozenset)) and depth:
        return [function for part in value for function in _functions_in(part, depth - 1)]
    wrapped = inspect.isroutine(value) and getattr(value, "__wrapped__", None)
    return _functions_in(wrapped) if wrapped else []


def _global(value: Any) -> Any:
    """Return a global value as plain data; what has no description, by its class."""
    if inspect.isfunction(value) and _is_library(value.__module__):
        return import_path(value)
    if type(value).__module__ == "weakref":  # a cache
        return import_path(type(value))
    if isinstance(value, type):
        own = {} if _is_library(value.__module__) else vars(value)
        members = {k: v for k, v in own.items() if _is_value(v) and not k.startswith("__")}
        return [import_path(value), _plain_global(members)]
    found = _plain_global(value)
    return found if _is_value(value) or PROCESS not in str(found) else import_path(type(value))


def _plain_global(value: Any) -> Any:
    """Return a global value as plain data; functions in it without what they read in turn."""
    token = READ.set(True)
    try:
        return to_plain_data(value)
    finally:
        READ.reset(token)


def _names(code: CodeType) -> set[str]:
    """Return the names that code reads, and the functions and comprehensions in it."""
    inner = [_names(part) for part in code.co_consts if inspect.iscode(part)]
    return {*code.co_names}.union(*inner)


def _is_value(value: Any) -> bool:
    """Whether something is a constant, an array, a container or a dataclass of the user's."""
    if isinstance(value, type):
        return False
    return isinstance(value, VALUES) or (
        is_dataclass(value) and not _is_library(type(value).__module__)
    )


def _is_library(module: str) -> bool:
    """Whether code is Python's or a package's, which changes with its version, not the user's."""
    package = (module or "builtins").split(".")[0]
    return package in LIBRARIES or (package in sys.stdlib_module_names and package != "__main__")


def _object(value: Any) -> Any:
    if isinstance(value, nn.Module):
        state = [*value.named_parameters(), *value.named_buffers()]
        return [_module(value), [(name, _tensor_digest(tensor)) for name, tensor in state]]
    kind = _kind(type(value))
    if is_dataclass(value):
        return [kind, [(f.name, to_plain_data(getattr(value, f.name))) for f in fields(value)]]
    if isinstance(getattr(value, "__dict__", None), dict) and vars(value):
        return [kind, to_plain_data(_arguments(value))]
    text = repr(value)
    return [kind, _undescribed() if " at 0x" in text else text]


def _module(value: nn.Module) -> list[Any]:
    """Return a module without its weights: classes, code, arguments, hooks, layers."""
    children = [(name, _module(part)) for name, part in value.named_children()]
    if isinstance(value, torch.fx.GraphModule):
        children.append(("code", [value.code]))
    hooks = [[name, *getattr(value, name).values()] for name in HOOKS if getattr(value, name)]
    described = [*map(to_plain_data, (_arguments(value), *hooks))]
    return [_kind(type(value)), *described, children]


def _arguments(value: Any) -> dict[str, Any]:
    """Return an object's public attributes and, of a user's class, private values.

    Private containers and objects count for networks alone: others may keep records in them.
    """
    if _is_library(type(value).__module__):  # whose private state may be a cache
        return _public_attributes(value)
    counts = _is_private_value if isinstance(value, nn.Module) else _is_private_number
    own = {k: v for k, v in vars(value).items() if k.startswith("_") and k not in _volatile()}
    return _public_attributes(value) | {k: v for k, v in own.items() if counts(v)}


def _is_private_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str, tuple, Tensor))


def _is_private_value(value: Any) -> bool:
    """Whether a private attribute of a network counts, as opposed to a lock of a library."""
    if isinstance(value, Mapping):
        return bool(value)  # Lightning adds an empty one
    users = _is_value(value) or not _is_library(type(value).__module__)
    return users or PROCESS not in str(to_plain_data(value))


def _volatile() -> set[str]:
    """Return the private attributes of torch and of a LightningModule, which change in a run."""
    lightning = sys.modules.get("lightning.pytorch")  # not imported here: attacks need only torch
    return _attributes_of(getattr(lightning, "LightningModule", nn.Module))


@cache
def _attributes_of(kind: type[nn.Module]) -> set[str]:
    return TORCH_ATTRIBUTES | {*vars(kind())} | {"_current_fx_name"}


def _kind(kind: type) -> list[Any]:
    """Return a class by its name and, if it is the user's, its methods and constants."""
    found: list[Any] = [f"{kind.__module__}.{kind.__qualname__}"]
    for base in kind.__mro__:
        for name, value in () if _is_library(base.__module__) else vars(base).items():
            if name in ANNOTATE:
                continue
            if isinstance(value, property):
                parts = [part for part in (value.fget, value.fset) if part]
            elif isinstance(value, partialmethod):
                parts = [partial(value.func, *value.args, **value.keywords)]
            else:
                value = getattr(value, "__func__", value)
                parts = [value.func if isinstance(value, cached_property) else value]
            found += [[name, _routine(part)] for part in parts if inspect.isfunction(part)]
            others = (partial, type, nn.Module)
            found += [
                [name, to_plain_data(part)]
                for part in parts
                if not name.startswith("__")
                and (_is_value(part) or isinstance(part, others) or inspect.isbuiltin(part))
            ]
    return found


def _public_attributes(value: Any) -> dict[str, Any]:
    """Return an object's arguments, without private state and torch's bookkeeping."""
    own = vars(value) if hasattr(value, "__dict__") else {}
    return {k: v for k, v in own.items() if k not in TORCH_ATTRIBUTES and not k.startswith("_")}


def _code(code: Any) -> str:
    """Return a digest of a function's code and of the functions defined inside it."""
    constants = [_constant(c) for c in code.co_consts]
    text = f"{code.co_code.hex()} {code.co_names} {constants}"
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _constant(value: Any) -> str:
    if inspect.iscode(value):
        return _code(value)
    # The order of a set differs from process to process.
    return repr(sorted(map(repr, value))) if isinstance(value, frozenset) else repr(value)


def _tensor_digest(value: Tensor | np.ndarray) -> str:
    try:
        tensor = torch.as_tensor(value).detach().cpu().resolve_conj().resolve_neg()
        content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        kind = f"{tensor.dtype} {list(tensor.shape)}"
    except (TypeError, ValueError, RuntimeError):  # text, sparse, lazy
        if isinstance(value, Tensor):
            return _tensor_digest(value.to_dense()) if value.is_sparse else _undescribed()
        content, kind = repr(value.tolist()).encode(), f"{value.dtype.str} {list(value.shape)}"
    return f"{kind} {hashlib.sha256(content).hexdigest()}"


def fingerprint(module: nn.Module) -> str:
    """Return a digest of a module: layers, arguments, rule, weights, buffers.

    Args:
        module: a network or a defense.
    """
    token = DONE.set({})
    try:
        arguments: Any = _module(module)
        layers = re.sub(r"<function ([\w.<>]+) at 0x[0-9a-f]+>", r"\1", repr(module))
    except RecursionError:  # very many layers, one inside the other
        arguments, layers = _undescribed(), ""
    finally:
        DONE.reset(token)
    digest = hashlib.sha256(f"{layers} {arguments}".encode())
    # Not the state dict: normalisation and sampling probabilities are buffers that it leaves out.
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(f"{name} {_tensor_digest(tensor)}".encode())
    return digest.hexdigest()[:DIGITS]


def cache_key(**circumstances: Any) -> str:
    """Return a name for everything that a stored result depends on.

    Args:
        **circumstances: attacks, settings and arrays; of modules give the `fingerprint`.
    """
    text = json.dumps(to_plain_data(circumstances))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def check_describable(value: Any) -> None:
    """Raise ValueError where a value has no description, so that a cache would never find it."""
    if PROCESS in str(to_plain_data(value)):
        raise ValueError(
            f"files in a cache are named after what they depend on, and {value!r} does not tell "
            "what it does: make it a frozen dataclass or a named function, or give no cache"
        )
