"""Other slopes for operations of a forward pass whose values stay the same, bit by bit."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from itertools import takewhile
from math import inf
from typing import Any, Literal, Self, TypeGuard

import torch
from torch import Tensor, inference_mode, no_grad
from torch.nn.functional import one_hot, pad, softmax
from torch.overrides import TorchFunctionMode, get_testing_overrides
from torch.utils.hooks import RemovableHandle

from lightning_rob.attacks.backward import ValueWithGradientOf

Slope = Literal["rounding", "detached", "saturating", "custom"]
ROUNDS = {"round", "floor", "ceil", "trunc", "fix", "sign", "sgn", "heaviside", "bernoulli"}
ROUNDS |= {"floor_divide", "__floordiv__"}
REMAINS = {"remainder", "fmod", "frac", "__mod__"}  # what rounding takes away
COMPARES = {"gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal"}
CHOOSES = {"argmax", "max", "topk", "argmin", "min", "sort", "argsort"}
DIRECTED = {"topk": "largest", "sort": "descending", "argsort": "descending"}
LOOKS_UP = {"embedding": (0, 1), "__getitem__": (1, 0), "index_select": (2, 0), "gather": (2, 0)}
LOOKS_UP["take_along_dim"] = (1, 0)
NEGATES = {"logical_not", "bitwise_not", "__invert__"}
JOINS = {"logical_and", "bitwise_and", "__and__"}
LOGIC = dict.fromkeys(JOINS, 1)  # factor of the product of both; others have their sum too
LOGIC |= {"logical_or": -1, "bitwise_or": -1, "__or__": -1}
LOGIC |= {"logical_xor": -2, "bitwise_xor": -2, "__xor__": -2}
DRAWS = ("rand", "normal", "bernoulli", "multinomial", "dropout", "exponential", "uniform")
BOUNDS = {"clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "relu6", "hardsigmoid"}
SATURATES = BOUNDS | {"sigmoid", "tanh", "erf", "softsign"}
# Of whole numbers: what only bounds them, and what divides or multiplies them.
LIMITS = BOUNDS | {"minimum", "maximum"}
SHIFTS = {"__rshift__": -1, "bitwise_right_shift": -1, "__lshift__": 1, "bitwise_left_shift": 1}
EQUALS = {"eq", "__eq__", "ne", "isclose"}
IN_PLACE = {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
CUTS = {"_set_grad_enabled", "detach", "detach_", "requires_grad_"}
LEAVES_TORCH = {"numpy", "__array__", "tolist", "item"}
COPIES = {"tensor", "new_tensor", "as_tensor", "asarray"}  # of a tensor, or of what left torch
# Of conditions, by what they do to numbers.
REDUCES: dict[str, Callable[..., Tensor]] = {"count_nonzero": torch.sum}
REDUCES |= {"any": torch.amax, "all": torch.amin}
PRODUCTS = {"matmul", "__matmul__", "mm", "bmm", "linear", "einsum"}  # of one type of numbers
NEAR = 16  # places that a choice is among, for the temperature of its slope
MOST = 2.0**25  # numbers by which places are looked up
STEEP = 20.0  # lead of the largest score, in the median, from which a softmax only picks


def _hidden(value: Any) -> Tensor | None:
    """Return what a value without a gradient was computed from, as far as that is known."""
    return vars(value).get("hidden_source") if isinstance(value, Tensor) else None


def _hiding(out: Tensor, source: Tensor) -> Tensor:
    """Keep with a value without a gradient what it was computed from."""
    vars(out)["hidden_source"] = source
    return out


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
    functions and methods; a name that ends in an underscore changes its input in place.
    """

    def __init__(self, slopes: Sequence[Slope], images: int) -> None:
        super().__init__()
        self.slopes = frozenset(slopes)
        self.images = images
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
            return func(first.detach(), *args[1:], **kwargs)
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
        return _given(out, source) if "detached" in self.slopes else out

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
            return _hiding(value, alike[-1])
        # Of several networks, the output that came back as it went; else what went last.
        same = (one for one in alike if torch.equal(one, value.to(one)))
        gone = next(same, alike[-1])
        return ValueWithGradientOf.apply(value.to(gone), gone)

    def _with_slope(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        first: Any = args[1 if name == "searchsorted" else 0] if args else None
        joined = first if name in ("stack", "cat", "concat") else ()
        joined = args[1] if len(args) > 1 and isinstance(args[1], tuple) else joined
        hidden = any(_hidden(value) is not None for value in (first, *args[1:4], *joined))
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
                parts = _parts(_as_if_smooth(func, name, args, kwargs, out))
            if parts and isinstance(out, Tensor):
                out = _given(out, parts[0])
                if func.__name__ in ("__setitem__", f"{name}_", *IN_PLACE):
                    kept = first.copy_(out)
                    return kept if out.is_floating_point() else _hiding(kept, parts[0])
                return out
            if parts:
                given = [*map(_given, out, parts), *out[len(parts) :]]
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
        if isinstance(out, Tensor) and not out.is_floating_point() and out.shape == first.shape:
            self.met.add("rounding")  # a cast to whole numbers
            return _hiding(out, first) if "rounding" in self.slopes else out
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
        at = 2 if name == "topk" else 1
        dim = kwargs.get("dim", args[at] if len(args) > at else None)
        dim = -1 if dim is None and (first.dim() == 1 or "sort" in name or at > 1) else dim
        if index.is_floating_point() or not isinstance(dim, int):
            return out  # the larger one of two tensors, or the largest of all values
        largest = name in ("argmax", "max", "topk")
        if name in DIRECTED:
            largest = kwargs.get(DIRECTED[name], args[at + 1] if len(args) > at + 1 else largest)
        if "rounding" in self.slopes:
            _hiding(index, _choice(first if largest else -first, index, dim % first.dim()))
        else:
            _hiding(index, first)
        return out

    def _rounded(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        first, second = args[0], args[1] if len(args) > 1 else None
        if name in REMAINS:
            return self._through(func, args, kwargs, first.detach())
        if name in COMPARES | EQUALS:
            return _hiding(func(*args, **kwargs), _difference(name, first, second))
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


def _choice(scores: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return how likely each place [*index.shape, N] is the one with the largest score.

    Softmax, at a temperature of half the lead of the first place over the last of the next ones.
    """
    places = scores.shape[dim]
    moved = scores.movedim(dim, -1)
    if not places:
        return moved
    best = moved.detach().topk(min(NEAR, places)).values
    lead = (best[..., :1] - best[..., -1:]) / 2
    likely = softmax(moved / lead.clamp_min(torch.finfo(lead.dtype).tiny ** 0.5), -1)
    if index.dim() == scores.dim():
        likely = likely.unsqueeze(dim).expand(*index.shape, places)
    return likely


def _difference(name: str, first: Any, second: Any) -> Any:
    """Return a number that is the larger the more two values compare so."""
    difference = first - second
    if name in EQUALS:  # near the distance to the next value that is another one
        away = difference.detach().abs()
        near = away.masked_fill(away == 0, inf).amin(-1).median().clamp(1e-30, 1e30)
        alike = (-(difference / near).square() / 2).exp()
        value = first if differentiated(first) else second
        sizes = (1,) * (alike.dim() - value.dim()) + value.shape
        levels = [dim for dim, size in enumerate(alike.shape) if sizes[dim] < size]
        if levels:  # a value with many, of which it is one
            alike = alike / alike.sum(levels, keepdim=True).clamp_min(1e-30)
        return -alike if name == "ne" else alike
    return difference if name[0] == "g" else -difference


def _likely(value: Any, most: float = MOST) -> Tensor | None:
    """Return how likely each place [*value.shape, N] was chosen; None for other values.

    Also for more numbers than memory has room for, as of all places in their order, which are
    expanded and may still be cut.
    """
    source = _hidden(value)
    known = source is not None and source.dim() == value.dim() + 1 and source.numel() <= most
    return source if known else None


def _soft(value: Any) -> Any:
    """Return a condition or whole numbers as numbers, with the slope of what they come from."""
    source = _hidden(value)
    if source is None or (source.dim() > value.dim() and source.numel() > MOST):
        return value
    if _likely(value) is not None:
        source = source @ torch.arange(source.shape[-1]).to(source)
    return ValueWithGradientOf.apply(value.to(source), source)


def _parts(other: Any) -> list[Tensor]:
    return [] if other is None else [other] if isinstance(other, Tensor) else [*other]


def _given(out: Tensor, other: Tensor) -> Tensor:
    """Return values with the slope of others, or keep those with values that can have none."""
    if out.is_floating_point():
        return ValueWithGradientOf.apply(out, other.to(out))
    return _hiding(out, other)


def _as_if_smooth(func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """Return what an operation on conditions or whole numbers gives if they have slopes; or None.

    A choice between two values changes by their difference with its condition. Others do what they
    would on numbers with slopes, or pass the slope on where they are for whole numbers alone.
    """
    first: Any = args[0]
    second: Any = args[1] if len(args) > 1 else None
    try:
        if (found := _of_places(func, name, args, kwargs, out)) is not None:
            return found
        if name == "where" and len(args) == 3:
            # Also x.where(condition, other).
            return _chosen_by(*(args if _hidden(first) is not None else (second, first, args[2])))
        if name in ("masked_fill", "__setitem__"):
            alike = getattr(second, "shape", None) == first.shape
            return _chosen_by(second, args[2], first) if alike else None
        if name in COMPARES:
            return _difference(name, _soft(first), _soft(second))
        if name in REMAINS:
            return _soft(first).detach()
        if name in REDUCES:
            return REDUCES[name](_soft(first), *args[1:], **kwargs)
        if name in SHIFTS:
            return _soft(first) * 2.0 ** (SHIFTS[name] * second)
        if "floor" in name:
            return _soft(first) / second
        if name in NEGATES:
            return 1 - _soft(first)
        if name in LOGIC:
            a, b = _soft(first), _soft(second)
            return LOGIC[name] * a * b + (0 if name in JOINS else a + b)
        given = [_soft(first.clone() if differentiated(first) else first), *map(_soft, args[1:])]
        given[0] = [*map(_soft, first)] if isinstance(first, list | tuple) else given[0]
        if name in PRODUCTS:
            kind = next(one.dtype for one in given if differentiated(one))
            given = [one.to(kind) if isinstance(one, Tensor) else one for one in given]
        other = None if name in LIMITS else func(*given, **kwargs)
        if isinstance(other, tuple) or differentiated(other):
            return other
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):  # in another form
        pass
    alike = _hidden(first) is not None and getattr(out, "shape", None) == first.shape
    return _soft(first) if alike and not out.is_floating_point() else None


def _chosen_by(condition: Any, a: Any, b: Any) -> Tensor | None:
    """Return what is chosen by a condition with a slope; None if it has none, or for odd shapes."""
    if _hidden(condition) is None or (isinstance(a, Tensor) and a.dim() not in (0, b.dim())):
        return None
    taken = torch.where(condition, a, b)
    zeros = torch.zeros_like(taken).detach()
    change = ((zeros + a) - (zeros + b)).detach()
    return taken + _soft(condition) * change.nan_to_num(0, 0, 0)  # where scores are masked by -inf


def _equal(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    first, second = args[:2] if _hidden(args[0]) is not None else args[1::-1]
    if first.dtype == torch.bool:
        a, b = _soft(first), _soft(second)
        b = b.to(a) if isinstance(b, Tensor) else b
        same = 1 - a - b + 2 * a * b
    elif (likely := _likely(first)) is None:
        many = isinstance(second, Tensor) and second.numel() > 1
        ends = (second.min(), second.max()) if many else None
        same = _by_steps(first, ends, lambda index: index == second)
    else:
        if (other := _likely(second)) is None:  # whether a given place was chosen
            places = torch.arange(likely.shape[-1], device=likely.device)
            other = torch.as_tensor(second, device=likely.device)[..., None] == places
        same = (likely * other).sum(-1)
    return 1 - same if name == "ne" and same is not None else same


def _scattered(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    first, dim, index, added = args
    if dim % first.dim() != first.dim() - 1:
        return None
    if (likely := _likely(index)) is None:
        scatter, ends = getattr(torch, name), (0, first.shape[dim] - 1)
        return _by_steps(index, ends, lambda index: scatter(first, dim, index, added))
    added = added[..., None].to(likely) if isinstance(added, Tensor) else added
    return first + (_padded(likely, first.shape[dim]) * added).sum(-2)


def _put(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    first, places, added = args[:3]
    if len(places) < 2 or (likely := _likely(places[-1])) is None:
        return None
    added = _padded(likely, first.shape[-1]) * added[..., None]
    return first.detach().to(added).index_put(places[:-1], added, accumulate=True)


def _counted(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    likely = _likely(args[0])
    return None if likely is None else _padded(likely.sum(0), max(least, int(args[0].max()) + 1))


def _most_often(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    likely, dim = _likely(args[0]), kwargs.get("dim", args[1] if len(args) > 1 else -1)
    return None if likely is None else likely.mean(dim % args[0].dim())


def _coded(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    index = args[0]
    classes = kwargs.get("num_classes", args[1] if len(args) > 1 else -1)
    classes = classes if classes > 0 else int(index.max()) + 1
    if (likely := _likely(index)) is None:
        return _by_steps(index, (0, classes - 1), lambda index: one_hot(index, classes))
    return _padded(likely, classes)


def _looked_up(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return rows [N, …] of a table, or of one for each image, by how likely each of them is."""
    if len(args) <= max(LOOKS_UP[name]):  # others are given by name
        return None
    index, rows = (args[place] for place in LOOKS_UP[name])
    if isinstance(index, tuple) and _hidden(index[-1]) is not None:  # as in z[row, place]
        return _of_each(index[-1], rows[index[:-1]])
    if _hidden(index) is None:  # places of which some are taken
        likely = _likely(rows, inf)
        every = (*index, slice(None)) if isinstance(index, tuple) else index
        return None if likely is None or name != "__getitem__" else likely[every]
    if not isinstance(rows, Tensor) or index.dtype == torch.bool:
        return None
    dim = args[1] if name == "gather" else None
    if name == "take_along_dim" and (dim := kwargs.get("dim", (*args, None)[2])) is None:
        return None  # a place in all of them
    if (likely := _likely(index)) is None:
        return _by_steps(index, (0, len(rows) - 1), rows.__getitem__) if dim is None else None
    if not rows.is_floating_point() and (dim is not None or rows.dim() == 1):  # labels
        rows = one_hot(rows.long(), int(rows.max()) + 1)
    rows = rows.to(likely)
    if dim is None:
        return torch.tensordot(likely, rows, 1)
    if rows.dim() > index.dim():
        return likely @ rows if dim % index.dim() == index.dim() - 1 else None
    return (likely * rows.movedim(dim, -1).unsqueeze(dim)).sum(-1)


OF_PLACES = {
    **dict.fromkeys(EQUALS, _equal),
    **dict.fromkeys(("scatter", "scatter_add"), _scattered),
    **dict.fromkeys(LOOKS_UP, _looked_up),
    **{"index_put": _put, "bincount": _counted, "mode": _most_often, "one_hot": _coded},
}


def _of_places(func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
    """Return what an operation on places that were chosen gives if the choice has a slope; or None.

    The probability of each place takes the place of its number.
    """
    if name in OF_PLACES:
        return OF_PLACES[name](name, args, kwargs)
    if (likely := _likely(args[0])) is None or not likely.numel():
        return None
    # An operation that moves any numbers in the same way moves the probabilities, too.
    places = torch.arange(args[0].numel(), device=likely.device).view(args[0].shape)
    high, low = places // 128, places % 128  # small enough for all types

    def moved(numbers: Tensor) -> list[Tensor]:
        return _parts(func(numbers.to(args[0].dtype), *args[1:], **kwargs))

    found = []
    for one, *at in zip(_parts(out), *map(moved, (high, low, 127 - low)), strict=True):
        above, below, reverse = (part.long() for part in at)
        place = 128 * above + below
        fits = place.numel() * likely.shape[-1] <= MOST and not one.is_floating_point()
        if not fits or (reverse != 127 - below).any() or (place >= places.numel()).any():
            return None
        if (args[0].flatten()[place] != one).any():
            return None
        found.append(likely.flatten(0, -2)[place])
    return found if isinstance(out, list | tuple) else found[0]


def _padded(likely: Any, places: int) -> Tensor:
    return pad(likely, (0, places - likely.shape[-1]))


def _of_each(index: Tensor, rows: Tensor) -> Any:
    """Return one of the rows [*index.shape, N, …] of each place as `_looked_up` does."""
    if (likely := _likely(index)) is None or not rows.is_floating_point():
        return None
    at = likely.dim() - 1
    return (likely.view(*likely.shape, *[1] * (rows.dim() - at - 1)).to(rows) * rows).sum(at)


def _by_steps(index: Tensor, ends: Any, rows: Callable[[Tensor], Tensor]) -> Any:
    """Return rows with the slope of whole numbers that come from rounding; None for others.

    The row changes by the mean difference to its neighbors, of which none is beyond the ends.
    """
    source: Any = _hidden(index)
    if source is None or source.shape != index.shape:
        return None
    step = source.detach() - source.detach().mean()
    width = step.square().sum() / (step * index).sum()  # of a whole number
    up, down = index + 1, index - 1
    if ends is not None:
        up, down = up.clamp(max=ends[1]), down.clamp(min=ends[0])
    change = rows(up).to(source) - rows(down).to(source)
    each = (*source.shape, *[1] * (change.dim() - source.dim()))
    change = change / ((up - down) * width).view(each)
    return source.view(each) * change.nan_to_num(0, 0, 0)


def differentiated(value: Any) -> TypeGuard[Tensor]:
    """Return whether gradients of a value are asked for."""
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()
