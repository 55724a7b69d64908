"""Slopes of conditions, whole numbers, and places of the largest or smallest values."""

from collections.abc import Callable
from math import inf
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad, softmax

from lightning_rob.attacks.backward import ValueWithGradientOf

REMAINS = {"remainder", "fmod", "frac", "__mod__"}  # what rounding takes away
COMPARES = {"gt", "ge", "lt", "le", "greater", "greater_equal", "less", "less_equal"}
LOOKS_UP = {"embedding": (0, 1), "__getitem__": (1, 0), "index_select": (2, 0), "gather": (2, 0)}
LOOKS_UP["take_along_dim"] = (1, 0)
NEGATES = {"logical_not", "bitwise_not", "__invert__"}
JOINS = {"logical_and", "bitwise_and", "__and__"}
LOGIC = dict.fromkeys(JOINS, 1)  # factor of the product of both; others have their sum too
LOGIC |= {"logical_or": -1, "bitwise_or": -1, "__or__": -1}
LOGIC |= {"logical_xor": -2, "bitwise_xor": -2, "__xor__": -2}
BOUNDS = {"clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "relu6", "hardsigmoid"}
# Of whole numbers: what only bounds them, and what divides or multiplies them.
LIMITS = BOUNDS | {"minimum", "maximum"}
SHIFTS = {"__rshift__": -1, "bitwise_right_shift": -1, "__lshift__": 1, "bitwise_left_shift": 1}
EQUALS = {"eq", "__eq__", "ne", "isclose"}
# Of conditions, by what they do to numbers.
REDUCES: dict[str, Callable[..., Tensor]] = {"count_nonzero": torch.sum}
REDUCES |= {"any": torch.amax, "all": torch.amin}
PRODUCTS = {"matmul", "__matmul__", "mm", "bmm", "linear", "einsum"}  # of one type of numbers
DIRECTED = {"topk": "largest", "sort": "descending", "argsort": "descending"}
NEAR = 16  # places that a choice is among, for the temperature of its slope
MOST = 2.0**25  # numbers by which places are looked up


def chosen_along(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Return along which dimension values are chosen, None if none is given; and if the largest."""
    at = 2 if name == "topk" else 1
    dim = kwargs.get("dim", args[at] if len(args) > at else None)
    largest = name in ("argmax", "max", "topk")
    if name in DIRECTED:
        largest = kwargs.get(DIRECTED[name], args[at + 1] if len(args) > at + 1 else largest)
    return dim, largest


def hidden_source(value: Any) -> Tensor | None:
    """Return what a value without a gradient was computed from, as far as that is known."""
    return vars(value).get("hidden_source") if isinstance(value, Tensor) else None


def hiding(out: Tensor, source: Tensor) -> Tensor:
    """Keep with a value without a gradient what it was computed from."""
    vars(out)["hidden_source"] = source
    return out


def choice(scores: Tensor, index: Tensor, dim: int) -> Tensor:
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


def difference(name: str, first: Any, second: Any) -> Any:
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
    source = hidden_source(value)
    known = source is not None and source.dim() == value.dim() + 1 and source.numel() <= most
    return source if known else None


def _soft(value: Any) -> Any:
    """Return a condition or whole numbers as numbers, with the slope of what they come from."""
    source = hidden_source(value)
    if source is None or (source.dim() > value.dim() and source.numel() > MOST):
        return value
    if _likely(value) is not None:
        source = source @ torch.arange(source.shape[-1]).to(source)
    return ValueWithGradientOf.apply(value.to(source), source)


def as_list(other: Any) -> list[Tensor]:
    """Return nothing, one tensor, or several as a list."""
    return [] if other is None else [other] if isinstance(other, Tensor) else [*other]


def with_slope(out: Tensor, other: Tensor) -> Tensor:
    """Return values with the slope of others, or keep those with values that can have none."""
    if out.is_floating_point():
        return ValueWithGradientOf.apply(out, other.to(out))
    return hiding(out, other)


def as_if_smooth(func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
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
            return _chosen_by(
                *(args if hidden_source(first) is not None else (second, first, args[2]))
            )
        if name in ("masked_fill", "__setitem__"):
            return _chosen_by(second, args[2], first, rows=True)
        if name in COMPARES:
            return difference(name, _soft(first), _soft(second))
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
    alike = hidden_source(first) is not None and getattr(out, "shape", None) == first.shape
    return _soft(first) if alike and not out.is_floating_point() else None


def _chosen_by(condition: Any, a: Any, b: Any, rows: bool = False) -> Tensor | None:
    """Return what is chosen by a condition with a slope; None if it has none, or for odd shapes.

    Args:
        rows: whether the condition may be one of rows of b, as in z[mask] = a.
    """
    if hidden_source(condition) is None:
        return None
    soft = _soft(condition)
    if rows:
        each = (*condition.shape, *[1] * (b.dim() - condition.dim()))
        condition, soft = condition.view(each), soft.view(each)
    taken = torch.where(condition, a, b)
    zeros = torch.zeros_like(taken).detach()
    change = ((zeros + a) - (zeros + b)).detach()
    return taken + soft * change.nan_to_num(0, 0, 0)  # where scores are masked by -inf


def _equal(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    first, second = args[:2] if hidden_source(args[0]) is not None else args[1::-1]
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
    if isinstance(index, tuple) and hidden_source(index[-1]) is not None:  # as in z[row, place]
        return _of_each(index[-1], rows[index[:-1]])
    if hidden_source(index) is None:  # places of which some are taken
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
        return as_list(func(numbers.to(args[0].dtype), *args[1:], **kwargs))

    found = []
    for one, *at in zip(as_list(out), *map(moved, (high, low, 127 - low)), strict=True):
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
    source: Any = hidden_source(index)
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
