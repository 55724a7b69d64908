"""An accelerator for machines that have none: it knows where tensors are, and computes on the CPU.

Inside `emulated()` the device "meta" holds tensors with values. As on a GPU, an operation on a
tensor there and one on the CPU is refused, numbers of dimension 0, indices and copies excepted, and
so is a generator of the CPU for a tensor there. Kernels, rounding, memory and generators of the
device's own (those of AutoAttack) are not emulated.

With LIGHTNING_ROB_DEVICE=cuda:0 the same tests run on that device.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device(os.environ.get("LIGHTNING_ROB_DEVICE", "meta"))
COPIES = {"aten::_to_copy", "aten::copy_", "aten::_copy_from", "aten::copy"}
INDEXED = {f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_")}
INDEXED |= {"aten::_unsafe_index", "aten::_unsafe_index_put"}


class Misplaced(RuntimeError):
    """Tensors of two devices in one operation."""


class There(Tensor):
    """A tensor on the device; its values are on the CPU.

    Args:
        values: on the CPU.
    """

    @staticmethod
    def __new__(cls, values: Tensor) -> "There":
        like = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        like |= {"dtype": values.dtype, "layout": values.layout, "device": DEVICE}
        return Tensor._make_wrapper_subclass(cls, values.size(), **like)

    def __init__(self, values: Tensor) -> None:
        self.values_here = values

    def __repr__(self, **_: Any) -> str:
        return f"There({self.values_here})"

    def tolist(self) -> Any:
        """Numbers, which are taken off the device as on a GPU."""
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Tensor:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


def _without_lists(index: Any) -> Any:
    """An index, of whose lists torch would make tensors on the real "meta", without values."""
    if isinstance(index, tuple):
        return tuple(_without_lists(part) for part in index)
    return torch.tensor(index) if isinstance(index, list) else index


class _Factories(TorchDispatchMode):
    """Catches what makes tensors of nothing, such as `torch.zeros(…, device=x.device)`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _there(kwargs.get("device")) or any(isinstance(t, There) for t in tree_leaves(args)):
            return _computed(func, args, kwargs)
        return func(*args, **kwargs)


def _there(device: Any) -> bool:
    return device is not None and torch.device(device) == DEVICE


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation, on the device if it was asked for there, or by tensors there."""
    leaves = tree_leaves((args, kwargs))
    there = [leaf for leaf in leaves if isinstance(leaf, There)]
    _check(func._schema.name, args, leaves, there, kwargs)
    known = {id(leaf.values_here): leaf for leaf in there}
    inner_args, inner = tree_map(_unwrapped, (args, kwargs))
    wanted = inner.get("device")
    if _there(wanted):
        inner["device"] = torch.device("cpu")
    found = func(*inner_args, **inner)
    if not (bool(there) if wanted is None else _there(wanted)):
        return found

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, There):
            return value
        # An operation in place returns its argument.
        tensor = known[id(value)] if id(value) in known else There(value)
        if tensor.shape != value.shape:
            raise NotImplementedError(f"{func} changed a shape in place, which is not emulated")
        return tensor

    return tree_map(wrapped, found)


def _unwrapped(value: Any) -> Any:
    return value.values_here if isinstance(value, There) else value


def _check(name: str, args: Any, leaves: list[Any], there: list[There], kwargs: Any) -> None:
    """Raise Misplaced where a GPU would raise a RuntimeError."""
    if name in COPIES:
        return
    here = [t for t in leaves if isinstance(t, Tensor) and not isinstance(t, There) and t.dim()]
    if name in INDEXED and isinstance(args[0], There):
        indices = {id(index) for index in tree_leaves(args[1])}
        here = [tensor for tensor in here if id(tensor) not in indices]
    if any(_there(tensor.device) for tensor in here):
        raise NotImplementedError(f"{name}: a tensor without values, which is not emulated")
    if there and here:
        shapes = [[list(tensor.shape) for tensor in some] for some in (there, here)]
        raise Misplaced(f"{name}: {shapes[0]} on the device, {shapes[1]} on the CPU")
    if any(isinstance(leaf, torch.Generator) for leaf in leaves) and (
        there or _there(kwargs.get("device"))
    ):
        raise Misplaced(f"{name}: a generator of the CPU for a tensor on the device")


@contextmanager
def emulated() -> Iterator[torch.device]:
    """The device, for as long as the context lasts; modules and tensors get there by `to`."""
    if DEVICE.type != "meta":
        yield DEVICE
        return
    made, made_like = torch.tensor, Tensor.new_tensor

    def tensor(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
        here = made(data, *args, device=None if _there(device) else device, **kwargs)
        return here.to(DEVICE) if _there(device) else here

    def new_tensor(self: Tensor, data: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, There):
            return made_like(self, data, **kwargs)
        return made(data, dtype=kwargs.get("dtype", self.dtype)).to(DEVICE)

    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            patch.object(torch, "tensor", tensor),
            patch.object(torch, "autocast", lambda *_, **__: nullcontext()),  # it has none
            patch.object(Tensor, "new_tensor", new_tensor),
            _Factories(),
        ):
            yield DEVICE
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


# operations that return a number, or a length that depends on the values
READS = "_local_scalar_dense equal masked_select nonzero repeat_interleave _unique2 unique_dim"
READING = {f"aten::{name}" for name in (*READS.split(), "unique_consecutive")}


class Waits(TorchDispatchMode):
    """Lists the operations for which the host would wait for a GPU; used inside `emulated`.

    They read a number or a length from a tensor, take a mask for an index, or copy from the device,
    or to it without `non_blocking`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        there = any(isinstance(leaf, There) for leaf in tree_leaves((args, kwargs)))
        if _copies_and_waits(name, args, kwargs) or (
            there and (name in READING or (name in INDEXED and _masked(args[1])))
        ):
            self.found.append(name.removeprefix("aten::"))
        return func(*args, **kwargs)


def _masked(indices: Any) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _copies_and_waits(name: str, args: Any, kwargs: Any) -> bool:
    if name == "aten::_to_copy":
        source, target = isinstance(args[0], There), kwargs.get("device")
        target = source if target is None else _there(target)
    elif name == "aten::copy_":
        target, source = (isinstance(tensor, There) for tensor in args[:2])
    else:
        return False
    return source != target and (source or not (kwargs.get("non_blocking") or True in args[2:]))
