"""Decisions with one outcome an image, as of a detector or a router, held while logits are climbed.

A forward pass that takes one of several ways for an image has no slope towards the other ways, and
the slope of the way that it takes does not say where it is left. Held at an outcome, the pass is
smooth, and what is left to do is to make the defense decide so.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn

from lightning_rob.attacks.discrete import COMPARES, chosen_along, differentiated, hidden_source
from lightning_rob.defenses.per_image import PerImageValues

MOST = 10.0  # of the usual margin and lead, beyond which neither counts
FAR = 1e30  # comparisons with larger numbers are no decisions
COLUMNS = 8  # thresholds of an image that are compared at once
CHOOSES = ("argmax", "argmin", "max", "min", "topk")
ASKS = COMPARES | {"signbit"}
PLACES = {"argmax": 1.0, "max": 1.0, "argmin": -1.0, "min": -1.0}
STEPS = {"sign": -1.0, "sgn": -1.0, "heaviside": 0.0}  # their value below zero; above it is 1
# From a whole number to the middle of the values that are rounded to it.
ROUNDS = {"round": 0.0, "ceil": -0.5}
ROUNDS |= dict.fromkeys(("floor", "trunc", "fix", "int", "long", "to", "type"), 0.5)
LEVELS = 8  # whole numbers from 0, of which one is given
SKIPPED = ("torch.", "lightning_rob.attacks.")  # modules whose code is not that of a network
# Operation or, in a loop over images, place in the code; number of outcomes; how often they came.
Key = tuple[str, int, int]


def _place() -> str:
    """Return the place in the network's code from which this function is called."""
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(SKIPPED):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno}:{frame.f_lasti}"


class Number(float):
    """A number that left torch by `item` or `tolist`; a comparison of it decides on its image."""

    source: Tensor | None
    decisions: "Decisions | None"

    def __new__(
        cls, value: Any = 0.0, source: Tensor | None = None, decisions: "Decisions | None" = None
    ) -> Self:
        number = super().__new__(cls, value)
        # Values may change in place later.
        number.source, number.decisions = None if source is None else source.clone(), decisions
        return number

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        return float, (float(self),)

    def _decided(self, answer: Any, other: Any, sign: float) -> Any:
        plain = isinstance(other, float | int) and abs(other) < FAR
        if not plain or (source := self.known()) is None or self.decisions is None:
            return answer  # of arrays, tensors and other kinds of numbers
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            lead = sign * (source - _with_source(other))
            ways = torch.stack([-lead, lead])
            return bool(self.decisions.of_an_image(answer, ways, _place()))

    def known(self) -> Tensor | None:
        """Return what the number was computed from, in the forward pass that goes on."""
        ended = self.decisions is None or self.decisions.ended
        return None if ended else self.source

    def __gt__(self, other: Any) -> Any:
        return self._decided(super().__gt__(other), other, 1.0)

    def __ge__(self, other: Any) -> Any:
        return self._decided(super().__ge__(other), other, 1.0)

    def __lt__(self, other: Any) -> Any:
        return self._decided(super().__lt__(other), other, -1.0)

    def __le__(self, other: Any) -> Any:
        return self._decided(super().__le__(other), other, -1.0)


def _with_source(number: float) -> Tensor | float:
    source = number.known() if isinstance(number, Number) else None
    return float(number) if source is None else source


def _keeps_source(name: str) -> Callable[..., Any]:
    """Return the operation of this name on a `Number`, whose result is a `Number` too."""

    def operation(number: Number, *others: Any) -> Any:
        if not all(type(other) in PLAIN for other in others):
            return NotImplemented  # numpy and others know what to do with a number
        value = getattr(float, name)(number, *others)
        known = isinstance(value, float) and all(abs(other) < FAR for other in others)
        if not known or (source := number.known()) is None:
            return value
        with torch._C.DisableTorchFunction(), torch.enable_grad():
            source = getattr(source, name)(*map(_with_source, others))
        return Number(value, source, number.decisions)

    return operation


PLAIN = (int, bool, float, Number)
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "abs"):
    setattr(Number, f"__{_name}__", _keeps_source(f"__{_name}__"))


class Decisions:
    """The decisions of a forward pass on B images, as if they had no slope.

    Args:
        images: B.
        outcomes: the outcome [B] of decisions that are held, by their keys. Others are taken, and
            those at None left as they are.
    """

    def __init__(self, images: int, outcomes: Mapping[Key, Tensor | None] | None = None) -> None:
        self.images, self.outcomes = images, outcomes or {}
        self.together: dict[Key, Tensor] = {}  # scores [B, n] of n outcomes: the largest is taken
        self.alone: dict[str, list[Tensor]] = {}  # by place: [n] of one image after the other
        self.ended = False  # whether the forward pass has ended
        self._used: set[Key] = set()
        self._met: Counter[tuple[str, int]] = Counter()

    @property
    def scores(self) -> dict[Key, Tensor]:
        """Scores [B, n] of the n outcomes of each decision, those of a loop over images last."""
        columns = {}
        for place, rows in self.alone.items():
            each = self._of_each(rows)
            for at in range(each):
                columns[(place, len(rows[at]), at)] = torch.stack(rows[at::each])
        return self.together | columns

    @property
    def used(self) -> set[Key]:
        """Keys of the decisions that are more than a value's place."""
        each = {place: self._of_each(rows) or 1 for place, rows in self.alone.items()}
        found = {(name, n, at % each.get(name, at + 1)) for name, n, at in self._used}
        return found & self.scores.keys()

    def keep_those_of_an_image(self, x: Tensor) -> None:
        """Leave out those of a loop that is not one over the images x [B, …]."""
        for place, rows in [*self.alone.items()]:
            each = self._of_each(rows)
            parts = ((0, rows[:each]), (-1, rows[-each:])) if each else ()
            if not parts or not all(self._is_of_image(at, part, x) for at, part in parts):
                del self.alone[place]

    def _of_each(self, rows: list[Tensor]) -> int:
        """Return how many rows belong to each image, 0 if they are none of a loop over images."""
        each, more = divmod(len(rows), self.images)
        alike = (len({len(row) for row in rows[at::each]}) == 1 for at in range(each))
        return each if not more and all(alike) else 0

    def _is_of_image(self, image: int, rows: list[Tensor], x: Tensor) -> bool:
        """Return whether scores have a slope at one image of x [B, …] alone."""
        total = torch.stack([row[1:].sum() for row in rows]).sum()
        (slope,) = torch.autograd.grad(total, x, retain_graph=True, allow_unused=True)
        if slope is None:
            return False
        others = slope.clone()
        others[image] = 0
        return not others.any()

    def use(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Note that what was decided goes into an operation, or leaves torch."""
        inner = (value for value in args if isinstance(value, list | tuple))
        for value in chain(args, kwargs.values(), *inner):
            if isinstance(value, Tensor):
                self._used |= vars(value).get("decisions", set())

    def held(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        """Return what an operation gave, or where it decides what it gives if it decides so."""
        self.use(args, kwargs)
        index = out[1] if isinstance(out, tuple) and len(out) == 2 else out
        if not args or not isinstance(index, Tensor):
            return out
        if index.numel() == 1 and (self.images > 1 or not index.dim()):
            if (taken := self._alone(name, args[0], index)) is None:
                return out
            if index is out:
                return taken
            value = args[0].reshape(-1)[taken.view(-1)]
            return type(out)((value.view_as(out[0]), taken))
        if not index.dim():
            return out
        if len(index) != self.images or not 0 < index.numel() <= COLUMNS * self.images:
            return out
        if (scores := self._scores(name, args, kwargs, index)) is None:
            return out
        least = STEPS.get(name)
        own = (index if least is None else index > 0).long().view(self.images, -1).unbind(1)
        keys, ways = [], []
        for score, way in zip(scores, own, strict=True):
            kind = (name, score.shape[1])
            keys.append((*kind, self._met[kind]))
            self._met[kind] += 1
            self.together[keys[-1]] = score
            given = self.outcomes.get(keys[-1])
            ways.append(way if given is None else given)
        taken = torch.stack(ways, 1)
        if least is not None:
            taken = torch.where(taken > 0, 1.0, least)
        taken = taken.to(index.dtype).view_as(index)
        vars(taken)["decisions"] = {*keys}
        if index is out:
            return taken
        return type(out)((args[0].gather(1, ways[0][:, None]).view_as(out[0]), taken))

    def _alone(self, name: str, first: Any, index: Tensor) -> Tensor | None:
        """Return the decision of one image, as in a loop over the images, or what is held."""
        source = hidden_source(index) if name in ASKS else first
        placed = name in PLACES and not index.is_floating_point()
        if not differentiated(source) or not (placed or name in ASKS):
            return None
        scores = source.reshape(-1)
        scores = scores * PLACES[name] if placed else torch.cat([-scores, scores])
        place = _place()
        way: Tensor = self.of_an_image(index.clone(), scores, place)
        taken = way.to(index.dtype).view_as(index)
        vars(taken)["decisions"] = {(place, len(scores), len(self.alone[place]) - 1)}
        return taken

    def of_an_image(self, own: Any, scores: Tensor, place: str) -> Any:
        """Return which of n scores is taken for one image, its own one or what is held for it."""
        rows, n = self.alone.setdefault(place, []), len(scores)
        at = len(rows)
        rows.append(scores)
        self._used |= set() if isinstance(own, Tensor) else {(place, n, at)}
        each = sum(name == place for name, *_ in self.outcomes)
        if at >= each * self.images:
            return own
        image, which = divmod(at, each)
        way = self.outcomes.get((place, n, which))
        return own if way is None else way[image]

    def _scores(
        self, name: str, args: Any, kwargs: dict[str, Any], index: Tensor
    ) -> list[Tensor] | None:
        first = args[0]
        levels = self._levels(name, args, kwargs, index)
        if levels is not None:
            return [levels]
        if name in ASKS or name in STEPS:
            source = hidden_source(index) if name in ASKS else first
            if source is None or source.numel() != index.numel() or not source.requires_grad:
                return None
            columns = source.reshape(self.images, -1).unbind(1)
            return [torch.stack([-one, one], 1) for one in columns]
        rows = name in CHOOSES and differentiated(first) and not index.is_floating_point()
        if not rows or first.dim() != 2 or len(first) != self.images or first.shape[1] < 2:
            return None
        dim, largest = chosen_along(name, args, kwargs)
        if dim not in (None, 1, -1) or index.numel() != self.images:
            return None
        return [first if largest else -first]

    def _levels(self, name: str, args: Any, kwargs: dict[str, Any], index: Tensor) -> Any:
        """Return by how much a value of each image is inside each level of a rounding; or None."""
        if not differentiated(args[0]) or index.numel() != self.images or kwargs:
            return None
        if name in ("to", "type") and index.is_floating_point():
            return None
        value, index = args[0].reshape(-1, 1), index.detach()
        if name == "bucketize":
            ends = value.detach().abs().max() + 1
            bounds = torch.cat([-ends[None], args[1].to(value), ends[None]])
            return torch.minimum(value - bounds[:-1], bounds[1:] - value)
        if name not in ROUNDS or bool((index < 0).any() | (index >= LEVELS).any()):
            return None
        middle = torch.arange(LEVELS).to(value) + ROUNDS[name]
        return 0.5 - (value - middle).abs()


class HeldOutcomes(nn.Module):
    """The outcome of each decision that is held for the images of a batch, and their labels."""

    def __init__(self, found: Decisions, ranks: Sequence[int], y: Tensor) -> None:
        super().__init__()
        chosen = [
            of.detach().topk(min(max(rank, 0) + 1, of.shape[1])).indices[:, -1]
            for of, rank in zip(found.scores.values(), ranks, strict=False)
        ]
        self.ranks = dict(zip(found.scores, ranks, strict=False))
        self.values = PerImageValues(torch.stack([y, *chosen], 1))
        self.sizes: dict[Key | None, Tensor] = {}  # of each lead and the margin, at the images

    @property
    def outcomes(self) -> dict[Key, Tensor | None]:
        """The outcome [B] of each decision, None for those that are not held."""
        ways = self.values()[:, 1:].unbind(1)
        both = zip(self.ranks.items(), ways, strict=True)
        return {key: way if rank >= 0 else None for (key, rank), way in both}

    def _leads(self, scores: Mapping[Key, Tensor]) -> Iterator[tuple[Key, Tensor]]:
        """Yield by how much the score of each held outcome leads all others [B]."""
        for key, way in self.outcomes.items():
            if way is not None and key in scores:
                of, index = scores[key], way[:, None]
                others = of.scatter(1, index, -torch.inf).amax(1)
                yield key, of.gather(1, index)[:, 0] - others

    def bounded(self, logits: Tensor, scores: Mapping[Key, Tensor]) -> Tensor:
        """Return logits [n, B, K] whose margin is at most the smallest lead, at least in float32.

        Both are in units of their median at the images that are attacked.
        """
        kind = torch.promote_types(logits.dtype, torch.float32)
        logits, leads = logits.to(kind), {k: lead.to(kind) for k, lead in self._leads(scores)}
        index = self.values()[:, 0].expand(logits.shape[:-1])[..., None]
        label = logits.gather(-1, index)
        if not leads:  # as with other draws than were looked at
            return logits
        top = logits.scatter(-1, index, -torch.inf).amax(-1, keepdim=True)
        if not self.sizes:
            self.sizes = {None: _usual(top - label)} | {k: _usual(one) for k, one in leads.items()}
        size = self.sizes[None]
        label = label.maximum((top - MOST * size).detach())  # it may be masked by -inf
        ratios = [lead / self.sizes.get(key, size) for key, lead in leads.items()]
        least = size * torch.stack(ratios).amin(0).clamp_max(MOST)
        return logits.minimum(label + least[:, None]).scatter(-1, index, label)


def _usual(values: Tensor) -> Tensor:
    """Return the median size of values of which some may be infinite."""
    sizes = values.detach().abs()
    sizes = sizes[sizes.isfinite()]
    return sizes.median().clamp_min(1e-9) if len(sizes) else values.new_ones(())
