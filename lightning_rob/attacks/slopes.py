"""Other slopes for operations of a forward pass whose values stay the same, bit by bit."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import cache
from inspect import signature
from itertools import takewhile
from typing import Any, Literal, Self

import torch
from torch import Tensor, inference_mode, no_grad
from torch.nn.functional import softmax
from torch.overrides import TorchFunctionMode, get_testing_overrides
from torch.utils.hooks import RemovableHandle

from lightning_rob.attacks.backward import ValueWithGradientOf
from lightning_rob.attacks.decisions import Decisions, Number
from lightning_rob.attacks.discrete import (
    BOUNDS,
    COMPARES,
    DIRECTED,
    EQUALS,
    REMAINS,
    as_if_smooth,
    as_list,
    choice,
    chosen_along,
    difference,
    differentiated,
    hidden_source,
    hiding,
    with_slope,
)

Slope = Literal["rounding", "detached", "saturating", "custom"]
ROUNDS = {"round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside", "bernoulli"}
ROUNDS |= {"floor_divide", "__floordiv__"}
CHOOSES = {"argmax", "max", "topk", "argmin", "min", "sort", "argsort"}
DRAWS = ("rand", "normal", "bernoulli", "multinomial", "dropout", "exponential", "uniform")
SATURATES = BOUNDS | {"sigmoid", "tanh", "erf", "softsign"}
IN_PLACE = {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
CUTS = {"_set_grad_enabled", "detach", "detach_", "requires_grad_"}
LEAVES_TORCH = {"numpy", "__array__", "tolist", "item"}
COPIES = {"tensor", "new_tensor", "as_tensor", "asarray"}  # of a tensor, or of what left torch
STEEP = 20.0  # lead of the largest score, in the median, from which a softmax only picks


@cache
def _required(func: Any) -> tuple[str, ...]:
    """Return the names of the arguments that a function of torch requires, as far as known."""
    known = get_testing_overrides().get(func)
    given = signature(known).parameters.values() if known else ()
    return tuple(one.name for one in given if one.default is one.empty)


def _by_place(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments that a function requires by their places, also those given by name."""
    if not kwargs:
        return args, kwargs
    kwargs = {"dim" if key == "axis" else key: value for key, value in kwargs.items()}
    names = [*takewhile(kwargs.__contains__, _required(func)[len(args) :])]
    return (*args, *(kwargs.pop(name) for name in names)), kwargs


class OtherSlopes(TorchFunctionMode):
    """Give operations other slopes, and keep the values that may be logits.

    Values stay the same, bit by bit. Operations are known by their names, which are the same for
    functions and methods; a name that ends in an underscore changes its input in place. Decisions
    that are held have no slope, and may change the values.
    """

    def __init__(
        self, slopes: Sequence[Slope], images: int, decisions: Decisions | None = None
    ) -> None:
        super().__init__()
        self.slopes = frozenset(slopes)
        self.images = images
        self.decisions = decisions
        self.met: set[Slope] = set()  # slopes that would change something
        self.leads: list[Tensor] = []  # median of each softmax: kept, as a GPU would wait
        self.values: list[Tensor] = []  # [n, B, K] or [n B, K], in the order of the calls
        self.gone: list[Tensor] = []  # batches that went to numpy

    def __enter__(self) -> Self:
        # Inference mode calls no function of torch, and cuts off the same as no_grad.
        self.kept = inference_mode.__enter__, inference_mode.__exit__
        inference_mode.__enter__ = no_grad.__enter__  # type: ignore[assignment,method-assign]
        inference_mode.__exit__ = no_grad.__exit__  # type: ignore[assignment,method-assign]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        inference_mode.__enter__, inference_mode.__exit__ = self.kept  # type: ignore[method-assign]
        if self.decisions:
            self.decisions.ended = True

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = _by_place(func, args, kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ is Tensor.data:
            name = "detach"
        if name in ("grad", "backward"):  # a purifier's, of values that the attack may climb too
            return func(*args, **kwargs | {"retain_graph": True})
        if name == "register_hook" and differentiated(args[0]):
            self.met.add("custom")
            left_out = "custom" in self.slopes
            return RemovableHandle(OrderedDict()) if left_out else func(*args, **kwargs)
        if name in CUTS | LEAVES_TORCH:
            if self.decisions:
                self.decisions.use(args, kwargs)
            if name in LEAVES_TORCH and hidden_source(args[0]) is not None:
                self.met.add("rounding")
            return self._detached(func, name, args, kwargs)
        if name in COPIES:
            return self._copied(func, args, kwargs)
        if name == "softmin":
            func, name, args = softmax, "softmax", (-args[0], *args[1:])
        if self.gone:
            args = tuple(map(self._returned, args))
        plain = name if name.endswith("__") else name.removesuffix("_")
        plain = name.replace("__i", "__") if name in IN_PLACE else plain
        out = self._with_slope(func, plain, args, kwargs)
        if self.decisions:
            out = self.decisions.held(plain, args, kwargs, out)
        if isinstance(out, Tensor):
            if self.gone:
                vars(out)["known"] = True
            # Logits of each image, or of some copies of it.
            copies = out.dim() == 2 and len(out) and len(out) % self.images == 0
            by_draws = out.dim() == 3 and self.images in out.shape[:2]
            if (copies or by_draws) and differentiated(out):
                self.values.append(out)
            if out.dim() == 1 and len(out) and len(out) % self.images == 0 and differentiated(out):
                # The difference of the logits of two classes, of which either may be the first.
                self.values += [torch.stack(pair, 1) for pair in ((out, -out), (-out, out))]
        return out

    def _detached(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Let gradients pass where the network cuts them off."""
        first = args[0]
        cuts = first is False if name == "_set_grad_enabled" else differentiated(first)
        if not cuts:
            return func(*args, **kwargs)
        if name != "requires_grad_":
            self.met.add("detached")
        attached = "detached" in self.slopes
        if name in LEAVES_TORCH:
            if first.dim() > 1 and attached:
                self.gone.append(first)
            out = func(first.detach(), *args[1:], **kwargs)
            if self.decisions and isinstance(out, float):
                return Number(out, first.reshape(()), self.decisions)
            if self.decisions and isinstance(out, list) and first.dim() == 1:
                parts = zip(out, first.unbind(), strict=True)
                return [Number(value, part, self.decisions) for value, part in parts]
            return out
        if not attached:
            return func(*args, **kwargs)
        if name == "_set_grad_enabled":
            return None
        if name == "detach_":
            return first
        if name == "requires_grad_":  # it is no leaf any more; loss.backward() may look for .grad
            first.retain_grad()
            return first
        return first.clone()

    def _copied(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Let gradients pass where numbers are copied; a copy of an array comes back from numpy."""
        out, source = func(*args, **kwargs), args[-1] if args else None
        if not differentiated(source) or differentiated(out):
            return out
        self.met.add("detached")
        return with_slope(out, source) if "detached" in self.slopes else out

    def _returned(self, value: Any) -> Any:
        """Return a batch that comes back from numpy in its shape, with the identity's slope."""
        if isinstance(value, list | tuple):
            parts = map(self._returned, value)
            return list(parts) if isinstance(value, list) else tuple(parts)
        if not isinstance(value, Tensor) or value.requires_grad or "known" in vars(value):
            return value
        alike = [one for one in self.gone if one.shape == value.shape]
        if not alike:
            return value
        if not value.is_floating_point():  # as from a comparison in numpy
            return hiding(value, alike[-1])
        # Of several networks, the output that came back as it went; else what went last.
        same = (one for one in alike if torch.equal(one, value.to(one)))
        gone = next(same, alike[-1])
        return ValueWithGradientOf.apply(value.to(gone), gone)

    def _with_slope(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        first: Any = args[1 if name == "searchsorted" else 0] if args else None
        joined = first if name in ("stack", "cat", "concat") else ()
        joined = args[1] if len(args) > 1 and isinstance(args[1], tuple) else joined
        hidden = any(hidden_source(value) is not None for value in (first, *args[1:4], *joined))
        hidden &= not any(word in name for word in DRAWS)  # which would draw twice
        if hidden and "rounding" not in self.slopes:  # what was chosen by its place is used
            self.met.add("rounding")
            return func(*args, **kwargs)
        if hidden:
            with torch.no_grad():
                copied = first.clone() if isinstance(first, Tensor) else first
                out = func(copied, *args[1:], **kwargs)
            out = copied if name == "__setitem__" else [*out] if name == "__iter__" else out
            parts, many = [], isinstance(out, list | tuple)
            if isinstance(out, Tensor) or (many and all(map(torch.is_tensor, out))):
                parts = as_list(as_if_smooth(func, name, args, kwargs, out))
            if parts and isinstance(out, Tensor):
                out = with_slope(out, parts[0])
                if func.__name__ in ("__setitem__", f"{name}_", *IN_PLACE):
                    kept = first.copy_(out)
                    return kept if out.is_floating_point() else hiding(kept, parts[0])
                return out
            if parts:
                given = [*map(with_slope, out, parts), *out[len(parts) :]]
                return iter(given) if name == "__iter__" else type(out)(given)
        numbers = all(isinstance(value, Tensor | float | int) for value in args[:2])
        compared = name in COMPARES | EQUALS and numbers and any(map(differentiated, args[:2]))
        if not (differentiated(first) or compared):
            return func(*args, **kwargs)
        rounded = name in ROUNDS | REMAINS or kwargs.get("rounding_mode") is not None
        rounded |= compared
        if name in CHOOSES:
            return self._chosen(func, name, args, kwargs)
        if rounded or name in SATURATES:
            self.met.add("rounding" if rounded else "saturating")
        if rounded and "rounding" in self.slopes:
            return self._rounded(func, name, args, kwargs)
        if name in SATURATES and "saturating" in self.slopes:
            return self._through(func, args, kwargs, first)
        if name in ("softmax", "exp"):
            return self._picked(func, name, args, kwargs)
        out = func(*args, **kwargs)
        whole = isinstance(out, Tensor) and not (out.is_floating_point() or out.is_complex())
        if whole and out.shape == first.shape:  # a cast to whole numbers
            self.met.add("rounding")
            source = -first if name == "signbit" else first
            return hiding(out, source) if "rounding" in self.slopes else out
        return out

    def _picked(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give a softmax that only picks one value a slope.

        By exp it may be written by hand, or as a sum of kernels, which underflow.
        """
        first, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if not isinstance(dim, int) or first.dim() == 0 or first.shape[dim] < 2:
            return func(*args, **kwargs)
        best = first.detach().topk(2, dim).values
        lead, low = -best.diff(dim=dim), -best.narrow(dim, 0, 1) if name == "exp" else 0
        self.leads.append((lead + low).median())
        if "saturating" not in self.slopes:
            return func(*args, **kwargs)
        # Where two scores are close, the usual lead, so that no value outweighs all others.
        usual = lead.nan_to_num(0, 0, 0).median()  # scores may be masked by -inf
        picks = (lead.maximum(usual) / 2).nan_to_num(1.0).clamp(1, 1e6)
        honest = func(first.clone(), *args[1:], **kwargs)  # it may work in place
        other = torch.where(self.leads[-1] > STEEP, softmax(first / picks, dim), honest)
        return self._through(func, args, kwargs, other)

    def _chosen(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Keep with the places of the largest or smallest values how likely each place is."""
        first, out = args[0], func(*args, **kwargs)
        index = out if isinstance(out, Tensor) else out[1]  # with the values
        dim, largest = chosen_along(name, args, kwargs)
        dim = -1 if dim is None and (first.dim() == 1 or name in DIRECTED) else dim
        if index.is_floating_point() or not isinstance(dim, int):
            return out  # the larger one of two tensors, or the largest of all values
        if "rounding" in self.slopes:
            hiding(index, choice(first if largest else -first, index, dim % first.dim()))
        else:
            hiding(index, first)
        return out

    def _rounded(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        first, second = args[0], args[1] if len(args) > 1 else None
        if name in REMAINS:
            return self._through(func, args, kwargs, first.detach())
        if name in COMPARES | EQUALS:
            return hiding(func(*args, **kwargs), difference(name, first, second))
        divides = second is not None and ("div" in name or "rounding_mode" in kwargs)
        return self._through(func, args, kwargs, first / second if divides else first)

    def _through(self, func: Any, args: Any, kwargs: dict[str, Any], other: Tensor) -> Tensor:
        """Return the operation's values with another slope, in place where it is in place."""
        first = args[0]
        with torch.no_grad():
            value = func(first.detach().clone(), *args[1:], **kwargs)
        out: Tensor = ValueWithGradientOf.apply(value, other)
        name = func.__name__
        return first.copy_(out) if name.endswith("_") and not name.endswith("__") else out
