"""Working copies of modules, which attacks and evaluations change in place of the originals.

A signal handler, another thread, an asynchronous checkpoint or a callback that averages weights may
read a module at any moment. Eval mode, frozen and folded weights, and all that a network writes
into itself when it predicts are therefore those of a copy.
"""

import copy
import sys
from collections.abc import Callable
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

M = TypeVar("M", bound=nn.Module)
Memo = dict[int, Any]  # id of a module, weight or tensor -> its copy

# The state of each working copy when it was made. A deep copy of one is another module, which
# adapts as it likes.
_states: WeakKeyDictionary[nn.Module, dict[str, Any]] = WeakKeyDictionary()

ORIGIN = "_working_copy_of"  # the attribute of a copy that refers to its original, weakly
OWN_FIELDS = ("_parameters", "_buffers", "_modules")
SHARED_FROM = 2**26  # bytes of a plain tensor from which it is taken for a data set, and shared
NO_STATE = {"training", ORIGIN, *OWN_FIELDS}  # attributes that evaluations set themselves
LONGEST = 1000  # entries of a list or dict that may hold modules


def working_copy(module: M) -> M:
    """Return a copy of a module with weights, buffers and attributes of its own.

    Weights are constants without gradients, and no tensor is one of inference mode. Attributes,
    hooks and functions that refer to modules inside refer to the copies of these. Parts that refer
    to themselves in compiled code (TorchScript, `torch.compile`) and lazy modules without weights
    are shared with the original.
    """
    shared = {id(inner) for part in module.modules() if _is_bound(part) for inner in part.modules()}
    tree = [part for part in module.modules() if id(part) not in shared]
    memo: Memo = {id(part): object.__new__(type(part)) for part in tree}
    with torch.inference_mode(False):
        for part in tree:
            _fill(memo[id(part)], part, memo)
    copied: M = memo.get(id(module), module)
    _states[copied] = _state(copied)
    return copied


def private(module: M) -> M:
    """Return the module itself if it is made of working copies, else a working copy of it."""
    own = any(ORIGIN in part.__dict__ for part in module.modules())
    return module if own else working_copy(module)


def fresh(copied: M) -> M:
    """Return a working copy as it was made: itself, or a new one if it has changed since."""
    return working_copy(original(copied)) if copied in _states and changes(copied) else copied


def changes(copied: nn.Module) -> list[str]:
    """Return the names of the weights, buffers and attributes that a copy has changed since.

    Attributes that are new are left out: a constant that a first forward stores changes nothing.
    """
    before, after = _states[copied], _state(copied)
    return [name for name, value in before.items() if name in after and after[name] != value]


def keep_changes(copied: nn.Module) -> None:
    """Take the present state of a working copy for that in which it was made."""
    _states[copied] = _state(copied)


def original(module: M) -> M:
    """Return the module of which this is a working copy; itself if it is none."""
    origin = module.__dict__.get(ORIGIN)
    return (origin and origin()) or module


def _state(module: nn.Module) -> dict[str, Any]:
    """Return what shows a change of each weight, buffer and attribute, by name."""
    found: dict[str, Any] = {}
    for prefix, part in module.named_modules():
        own: dict[str, Any] = dict(part.named_parameters(recurse=False))
        own |= part.named_buffers(recurse=False)
        if not _is_built_in(part):
            own |= {name: value for name, value in part.__dict__.items() if name not in NO_STATE}
        dots = prefix and f"{prefix}."
        found |= {f"{dots}{name}": _mark(value) for name, value in own.items()}
    return found


def _mark(value: Any, depth: int = 2) -> Any:
    """Return something small that differs once a value has changed."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version
    if isinstance(value, list | tuple | set | dict) and depth and len(value) <= LONGEST:
        names = tuple(map(repr, value)) if isinstance(value, dict) else ()
        parts = value.values() if isinstance(value, dict) else value
        return type(value), names, tuple(_mark(part, depth - 1) for part in parts)
    return id(value)


def _is_built_in(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.modules")


def _is_bound(module: nn.Module) -> bool:
    """Whether code outside of Python refers to the very object, or its weights do not exist yet."""
    if isinstance(module, torch.jit.ScriptModule):
        return True
    if module.__dict__.get("_compiled_call_impl") is not None:  # by `module.compile()`
        return True
    # Not by isinstance: to import the class loads all of the compiler.
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    if compiler is not None and isinstance(module, compiler.OptimizedModule):
        return True
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and is_lazy(tensor) for tensor in tensors)


def _fill(copied: nn.Module, module: nn.Module, memo: Memo) -> None:
    values = module.__dict__
    simple = _is_built_in(module) and not isinstance(module, nn.RNNBase)
    numbers_only = simple and not _has_hooks(module)
    for name, value in values.items():
        copied.__dict__[name] = value if numbers_only else _copied(value, memo)
    for field in OWN_FIELDS:
        parts = {name: _copied(part, memo) for name, part in values[field].items()}
        copied.__dict__[field] = type(values[field])(parts)
    copied.__dict__[ORIGIN] = ref(original(module))


def _has_hooks(module: nn.Module) -> bool:
    hooks = (value for name, value in module.__dict__.items() if name.endswith("_hooks"))
    return "forward" in module.__dict__ or any(hooks)


def _copied(value: Any, memo: Memo, depth: int = 3) -> Any:
    """Return a value in which the copies take the place of modules, weights and tensors."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, Tensor):
        return memo.setdefault(id(value), _copied_tensor(value))
    if depth == 0:
        return value
    inside = partial(_copied, memo=memo, depth=depth - 1)
    if type(value) in (list, tuple, set) and len(value) <= LONGEST:
        return type(value)(map(inside, value))
    if isinstance(value, dict) and len(value) <= LONGEST:
        copied = copy.copy(value)  # of its own kind, such as the ordered ones that hold hooks
        for key, part in value.items():
            copied[key] = inside(part)
        return copied
    if isinstance(value, MethodType):
        return MethodType(value.__func__, inside(value.__self__))
    if isinstance(value, partial):
        named = {name: inside(part) for name, part in value.keywords.items()}
        return partial(inside(value.func), *map(inside, value.args), **named)
    return _copied_function(value, inside) if isinstance(value, FunctionType) else value


def _copied_tensor(value: Tensor) -> Tensor:
    if isinstance(value, nn.Parameter):
        return nn.Parameter(value.detach().clone(), requires_grad=False)
    large = value.numel() * value.element_size() > SHARED_FROM
    return value if large else value.detach().clone()


def _copied_function(value: FunctionType, inside: Callable[[Any], Any]) -> FunctionType:
    """Return a function whose closure refers to copies; itself where it refers to no module."""
    cells = value.__closure__ or ()
    try:
        before = [cell.cell_contents for cell in cells]
    except ValueError:  # a name that is not bound yet
        return value
    after = [inside(content) for content in before]
    pairs = zip(before, after, strict=True)
    if not any(isinstance(b, nn.Module | MethodType) and a is not b for a, b in pairs):
        return value
    copied = FunctionType(
        value.__code__,
        value.__globals__,
        value.__name__,
        value.__defaults__,
        tuple(map(CellType, after)),
    )
    copied.__kwdefaults__ = value.__kwdefaults__
    copied.__dict__.update(value.__dict__)
    return copied
