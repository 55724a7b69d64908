"""Working copies of modules, which attacks and evaluations change in place of the originals.

A signal handler, another thread or an asynchronous checkpoint may read a module at any moment.
Eval mode, frozen and folded weights, and all that a network writes into itself when it predicts
therefore belong to a copy.
"""

import copy
import pickle
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_rob.runtime.identity import is_library

M = TypeVar("M", bound=nn.Module)
Memo = dict[int, Any]  # id of an object -> its copy

# The state of each working copy when it was made. A deep copy of one is another module, which
# adapts as it likes.
_states: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

ORIGIN = "_working_copy_of"  # the attribute of a copy that refers to its original, weakly
OWN_FIELDS = ("_parameters", "_buffers", "_modules")
SHARED_FROM = 2**26  # bytes of a plain tensor or array from which it is a data set, and shared
NO_STATE = {"training", ORIGIN, *OWN_FIELDS}  # attributes that evaluations set themselves
LONGEST = 1000  # entries of a container that are copied; longer ones, as of paths, share theirs
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def working_copy(module: M) -> M:
    """Return a copy of a module with weights, buffers and attributes of its own.

    Weights are constants without gradients, and no tensor is one of inference mode. Containers,
    arrays, generators, functions and objects of the user's classes are copied too, so that they
    refer to the copy. Shared with the original are compiled parts (TorchScript, `torch.compile`),
    lazy modules without weights, plain tensors and arrays above 64 MiB, the entries of containers
    of over 1,000, and all that `copy.copy` does not copy.
    """
    with torch.inference_mode(False):
        copied: M = _copied(module, {})
    _states[copied] = _state(copied)
    return copied


def own_copy(module: M) -> M:
    """Return the module itself if it is made of working copies, else a working copy of it."""
    # An attack inside another one, or a mixture of adapted models, has copies already.
    own = any(ORIGIN in part.__dict__ for part in module.modules())
    return module if own else working_copy(module)


def fresh(copied: M) -> M:
    """Return a working copy as it was made: itself, or a new one if it has changed since."""
    return working_copy(original(copied)) if copied in _states and changes(copied) else copied


def changes(copied: nn.Module) -> list[str]:
    """Return the names of the weights, buffers and attributes that a copy has changed since."""
    # New attributes are left out: a constant that a first forward stores changes nothing.
    before, after = _states[copied], _state(copied)
    return [name for name, value in before.items() if name in after and after[name] != value]


def keep_changes(copied: nn.Module) -> None:
    """Take the present state of a working copy for that in which it was made."""
    _states[copied] = _state(copied)


def original(module: M) -> M:
    """Return the module that was copied; a module that is no working copy itself."""
    origin = module.__dict__.get(ORIGIN)
    return (origin and origin()) or module


def _state(module: nn.Module) -> dict[str, Any]:
    """Return what shows a change of each weight, buffer and attribute, by name."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for prefix, part in module.named_modules():
        own: dict[str, Any] = dict(part.named_parameters(recurse=False))
        own |= part.named_buffers(recurse=False)
        # Kornia's modules keep what they drew last, for whoever wants to draw the same again.
        if not type(part).__module__.startswith(("torch.nn.modules.", "kornia.")):
            own |= {name: value for name, value in part.__dict__.items() if name not in NO_STATE}
        dots = prefix and f"{prefix}."
        found |= {f"{dots}{name}": _mark(value, seen) for name, value in own.items()}
    return found


def _mark(value: Any, seen: set[int]) -> Any:
    """Return something small that differs once a value has changed."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return id(value), 0 if is_lazy(value) or value.is_inference() else value._version
    if isinstance(value, np.ndarray):
        # numpy does not count changes, so that the content itself is looked at.
        small = value.nbytes <= SHARED_FROM and not value.dtype.hasobject
        return id(value), zlib.crc32(value.tobytes()) if small else 0
    if isinstance(value, torch.Generator):  # a pickled tensor has other bytes at times
        return value.get_state().numpy().tobytes()
    if isinstance(value, GENERATORS):
        return pickle.dumps(value)
    parts = _parts(value)
    if parts is None or id(value) in seen:
        return id(value)
    seen.add(id(value))
    if len(parts) > LONGEST:
        return id(value), len(parts)
    names = tuple(map(repr, parts)) if isinstance(parts, dict) else ()
    inside = parts.values() if isinstance(parts, dict) else parts
    return id(value), names, tuple(_mark(part, seen) for part in inside)


def _parts(value: Any) -> Any:
    """Return a container's entries or a user's object's attributes; None for what is shared."""
    if isinstance(value, list | tuple | set | deque | dict):
        return value
    kind = type(value)
    # Objects of packages are shared: trainers, loggers, locks, files.
    foreign = is_library(kind.__module__) and kind is not SimpleNamespace
    if foreign or isinstance(value, type | nn.Module | Enum | BaseException):
        return None
    plain = hasattr(value, "__dict__") and not hasattr(kind, "__del__")
    return vars(value) if plain else None


def _is_bound(module: nn.Module) -> bool:
    """Whether code outside of Python refers to the very object, or its weights do not exist yet."""
    # Not imported: the class loads all of the compiler. The attribute is set by `module.compile()`.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    kinds = (torch.jit.ScriptModule, *([compiler.OptimizedModule] if compiler else []))
    if isinstance(module, kinds) or module.__dict__.get("_compiled_call_impl") is not None:
        return True
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and is_lazy(tensor) for tensor in tensors)


def _copied_module(module: nn.Module, memo: Memo) -> nn.Module:
    for part in module.modules():
        if _is_bound(part):
            memo.update((id(inner), inner) for inner in part.modules())
    tree = [part for part in module.modules() if id(part) not in memo]
    # Empty copies of all modules come first, for modules may refer to each other in any order.
    memo.update((id(part), object.__new__(type(part))) for part in tree)
    for part in tree:
        copied, values = memo[id(part)], part.__dict__
        for field in OWN_FIELDS:  # first: these tensors are copied whatever their size
            own = {name: _copied(each, memo, True) for name, each in values[field].items()}
            copied.__dict__[field] = type(values[field])(own)
        for name in (name for name in values if name not in OWN_FIELDS):
            copied.__dict__[name] = _copied(values[name], memo)
        copied.__dict__[ORIGIN] = ref(original(part))
    return memo[id(module)]


def _copied(value: Any, memo: Memo, registered: bool = False) -> Any:
    """Return a value in which the copies take the place of modules, weights and tensors."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, nn.Module):
        return _copied_module(value, memo)
    if isinstance(value, nn.Parameter):
        return memo.setdefault(id(value), nn.Parameter(value.detach().clone(), False))
    if isinstance(value, Tensor | np.ndarray):
        if value.nbytes > SHARED_FROM and not registered:
            return value
        own = value.detach().clone() if isinstance(value, Tensor) else value.copy()
        return memo.setdefault(id(value), own)
    if isinstance(value, GENERATORS):
        return memo.setdefault(id(value), copy.deepcopy(value))
    inside = partial(_copied, memo=memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, inside(value.__self__))
    if isinstance(value, partial):
        named = {name: inside(part) for name, part in value.keywords.items()}
        return partial(inside(value.func), *map(inside, value.args), **named)
    if isinstance(value, FunctionType):
        return _copied_function(value, inside)
    if (parts := _parts(value)) is None:
        return value
    if isinstance(value, tuple):  # by value: whatever holds itself does so by something else
        make: Any = getattr(type(value), "_make", type(value))  # with names
        return make(map(inside, value))
    try:
        copied = copy.copy(value)  # of its own kind, such as the ordered ones that hold hooks
    except Exception:  # it holds a lock, a file or the like
        return value
    memo[id(value)] = copied
    if len(parts) > LONGEST or copied is value:
        return copied
    if isinstance(value, list):
        copied[:] = map(inside, value)
    elif isinstance(value, set | deque):
        copied.clear()
        getattr(copied, "update" if isinstance(value, set) else "extend")(map(inside, value))
    else:
        held = copied if isinstance(value, dict) else copied.__dict__
        for key, part in parts.items():
            held[key] = inside(part)
    return copied


def _copied_function(value: FunctionType, inside: Callable[[Any], Any]) -> FunctionType:
    """Return a function whose closure refers to copies; itself where it refers to no module."""
    try:
        before = [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:  # a name that is not bound yet
        return value
    after = [inside(content) for content in before]
    pairs = zip(before, after, strict=True)
    if not any(isinstance(b, nn.Module | MethodType) and a is not b for a, b in pairs):
        return value  # a list in which it records its calls is the caller's
    cells = tuple(map(CellType, after))
    copied = FunctionType(
        value.__code__, value.__globals__, value.__name__, value.__defaults__, cells
    )
    copied.__kwdefaults__ = value.__kwdefaults__
    copied.__dict__.update(value.__dict__)
    return copied
