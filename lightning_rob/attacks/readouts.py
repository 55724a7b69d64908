"""Binary readouts in place of networks' last layers, which a planted image is sure to fool."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_rob.attacks.active_set import positions
from lightning_rob.attacks.backward import Backward, Forward, other_forward
from lightning_rob.defenses import Defense, random_transforms_in
from lightning_rob.defenses.network import logits_in
from lightning_rob.randomness import Generator
from lightning_rob.threat import TINY, scale

RIDGE = 1.0  # in units of the mean eigenvalue of the covariance


class Place(NamedTuple):
    """Where the readouts of one network stand."""

    layer: str  # name of the linear layer whose input they read; empty: they read the logits
    behind: bool  # whether they stand behind the whole network, not in place of this layer
    seen: Tensor  # [B, D] what the network sees of the images


class Layer(NamedTuple):
    """The features and the logits at the place of readouts, in S draws of B images."""

    features: Tensor  # [S, B, F]
    outputs: Tensor  # [S, B, K]


def networks(defense: Defense) -> list[nn.Module]:
    """Return the networks of a defense, each once; TypeError if it names none."""
    return list(dict.fromkeys(defense.foldable_networks))


@torch.no_grad()
def places(defense: Defense, x: Tensor, generator: Generator) -> list[Place]:
    """Find where each network's readouts stand; TypeError if a network is never called."""
    seen: dict[nn.Module, Tensor] = {}

    def note(net: nn.Module, args: tuple[Any, ...]) -> None:
        seen.setdefault(net, args[0])

    nets = networks(defense)
    with ExitStack() as stack:
        for net in nets:
            stack.enter_context(net.register_forward_pre_hook(note))
        defense.sample_logits(x, generator)
    if len(seen) < len(nets):
        raise TypeError(f"{type(defense).__name__} does not call the networks that it names")
    # Noisy copies are nearest to the image itself, if they are more than the images.
    given = [seen[net] if len(seen[net]) == len(x) else x.to(seen[net]) for net in nets]
    return [_place(net, one, defense.rejects) for net, one in zip(nets, given, strict=True)]


def _place(net: nn.Module, seen: Tensor, rejects: int | None) -> Place:
    """Find the linear layer that alone makes a network's logits, or those that are accepted."""
    some = torch.cat([seen[:4], seen[:4].flip(-1)])  # two images at least
    called: list[tuple[nn.Module, torch.Size]] = []

    def note(layer: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        called.append((layer, output.shape))

    names: dict[nn.Module, str] = {
        part: name for name, part in net.named_modules() if isinstance(part, nn.Linear)
    }
    with ExitStack() as stack:
        for layer in names:
            stack.enter_context(layer.register_forward_hook(note))
        logits = logits_in(net(some))
    last, shape = called[-1] if called else (net, logits.shape)
    accepted = [k for k in range(logits.shape[1]) if k != rejects]
    name = names.get(last, "")
    if len(shape) == 2 and shape[1] in (logits.shape[1], len(accepted)):
        # Without this layer the logits must not depend on the image any more.
        with other_forward([last], lambda plain: lambda x: 0 * plain(x)):  # keeps its slope
            constant = logits_in(net(some))[:, accepted]
        once = [layer for layer, _ in called].count(last) == 1
        if name and once and bool((constant == constant[:1]).all()):
            return Place(name, shape != logits.shape, seen.flatten(1))
    return Place("", True, seen.flatten(1))


@torch.no_grad()
def features(
    defense: Defense,
    where: Sequence[Place],
    x: Tensor,
    generator: Generator,
    draws: int | None = None,
) -> list[Layer]:
    """Return the features of images in each network."""
    calls: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in where]

    def note(into: list[Tensor], given: bool, part: nn.Module, args: Any, output: Any) -> None:
        into.append(args[0] if given else logits_in(output))

    # By hooks: what is read is what the networks compute inside the defense, transforms and all.
    with ExitStack() as stack:
        for net, place, (read, out) in zip(networks(defense), where, calls, strict=True):
            layer = net.get_submodule(place.layer)
            end = net if place.behind else layer
            stack.enter_context(end.register_forward_hook(partial(note, out, False)))
            hook = partial(note, read, bool(place.layer))
            stack.enter_context(layer.register_forward_hook(hook))
        defense.sample_logits(x, generator, draws)
    whole = [[torch.cat(parts).float() for parts in each] for each in calls]
    return [Layer(*(part.reshape(-1, len(x), part.shape[1]) for part in each)) for each in whole]


@dataclass(frozen=True)
class Readout:
    """A linear function of each image's features: below 0 on inner points, above on the planted."""

    weight: Tensor  # [B, F]
    centre: Tensor  # [B, F] of the inner points
    bias: Tensor  # [B]
    size: Tensor  # [B] the largest magnitude on all these points

    def __call__(self, h: Tensor, rows: Tensor) -> Tensor:
        """Read the features [..., b, F] of the images at some positions [b]."""
        apart = h.to(self.weight) - self.centre[rows]
        return (apart * self.weight[rows]).sum(-1) + self.bias[rows]

    def between(
        self, inner: Tensor, planted: Tensor, size: Tensor, close: float
    ) -> tuple["Readout", Tensor]:
        """Return the readout with a threshold and of some size, and whether [B] it separates.

        Args:
            inner: features [n, S, B, F] of n points in S draws.
            planted: features [S, B, F] of one, in other draws than those that found it.
            size: the largest magnitude [B].
            close: place of the threshold between the highest inner point, 0, and the planted, 1.
        """
        rows = positions(size)
        low, high = self(inner, rows).mean(1).aminmax(dim=0)
        draws = self(planted, rows)
        # A prediction is by the mean of the draws: it has to stay above the threshold.
        error = draws.std(0, correction=0) / len(draws) ** 0.5
        top, gap = draws.mean(0), draws.mean(0) - high
        line = top - torch.minimum(torch.maximum((1 - close) * gap, 3 * error), gap)
        factor = size / torch.maximum(top - line, line - low).clamp_min(TINY)
        return Readout(scale(self.weight, factor), self.centre, -line * factor, size), gap > 0


def directions(
    inner: Sequence[Tensor], planted: Sequence[Tensor], allowed: Tensor
) -> tuple[list[Readout], Tensor]:
    """Choose of C planted points that which stands out most, and fit readouts towards it.

    Args:
        inner: of each network, the features [n, S, B, F] of n points in S draws.
        planted: of each network, the features [C, S, B, F].
        allowed: which of the planted points [C, B] may be chosen.

    Returns:
        The readouts of all networks, without a threshold, and the chosen points [B].
    """
    found, gaps = [], []
    for points, candidates in zip(inner, planted, strict=True):
        samples = points.flatten(0, 1).transpose(0, 1)
        centre = samples.mean(1)
        rest, aims = samples - centre[:, None], (candidates.mean(1) - centre).movedim(0, 2)
        # The discriminant (rest' rest + r)^-1 aims: [B, F, C]. The ridge r keeps it off directions
        # in which nothing varies.
        few = rest.shape[1] < rest.shape[2]  # points, than features
        gram = rest @ rest.mT if few else rest.mT @ rest
        size = gram.diagonal(dim1=1, dim2=2).sum(1) / rest.shape[1]
        ridge = RIDGE * size.clamp_min(TINY)[:, None, None] * torch.eye(gram.shape[1]).to(gram)
        if few:  # by Woodbury
            w = aims - rest.mT @ torch.linalg.solve(gram + ridge, rest @ aims)
        else:
            w = torch.linalg.solve(gram + ridge, aims * size[:, None, None])
        w = w / torch.linalg.vector_norm(w, dim=1, keepdim=True).clamp_min(TINY)
        scores = rest @ w  # [B, nS, C]
        gap = (aims * w).sum(1) - scores.amax(1)
        gaps.append(gap / scores.std(1).clamp_min(TINY))
        found.append((w, centre))
    # The point has to stand out in all networks.
    best = torch.stack(gaps).amin(0).masked_fill(~allowed.T, -torch.inf).argmax(1)
    rows, none = positions(best), torch.zeros_like(centre[:, 0])
    return [Readout(w[rows, :, best], centre, none, none) for w, centre in found], best


@dataclass(frozen=True)
class Readouts(Backward):
    """The readouts of all networks of a defense, which change its predictions too, for one batch.

    Which image a network sees is known by the nearest clean image, as attacks drop images, reorder
    them, and call networks without the defense. The defense stays a function of the image alone.
    """

    x: Tensor  # [B, D] the images
    y: Tensor  # [B] their labels, the classes of inner points
    target: Tensor  # [B] the classes of planted points
    where: Sequence[Place]
    made: Sequence[Readout]
    rejects: int | None
    inverted: bool  # whether it accepts exactly what the network rejects

    @contextmanager
    def __call__(self, defense: Defense) -> Iterator[None]:
        """Put the readouts in place inside this context, in a defense that is not shared."""
        # To a transformed copy another image may be nearest: copies are known by their places.
        copies: dict[nn.Module, Tensor] = {}

        def transformed(net: nn.Module, plain: Any, x: Tensor, *args: Any) -> Tensor:
            images: Tensor = plain(x, *args)
            copies[net] = _nearest(x, self.x).repeat(len(images))
            return images

        with ExitStack() as stack:
            for part in random_transforms_in(defense):
                part.__dict__["transformed"] = partial(transformed, part.net, part.transformed)
                stack.callback(part.__dict__.pop, "transformed")
            for net, place, readout in zip(networks(defense), self.where, self.made, strict=True):
                rows: list[Tensor] = []
                given: list[Tensor] = []
                layer = net.get_submodule(place.layer)
                read = partial(self._reading, readout, rows, given if place.layer else None)
                see = partial(self._seeing, net, place.seen, rows, copies)
                stack.enter_context(other_forward([net if place.behind else layer], read))
                if place.layer:
                    stack.enter_context(other_forward([layer], partial(_keeping, given)))
                stack.enter_context(other_forward([net], see))
            yield

    def _seeing(
        self,
        net: nn.Module,
        seen: Tensor,
        rows: list[Tensor],
        copies: dict[nn.Module, Tensor],
        plain: Forward,
    ) -> Forward:
        """Return the network's forward that first finds out which images it sees."""

        def forward(x: Tensor) -> Tensor:
            if net not in copies:
                rows[:] = [_nearest(x, seen)]
            elif len(copies[net]) >= len(x):
                rows[:], copies[net] = [copies[net][: len(x)]], copies[net][len(x) :]
            # else it sees the same images again, for their gradient
            return plain(x)

        return forward

    def _reading(
        self, readout: Readout, rows: list[Tensor], given: list[Tensor] | None, plain: Forward
    ) -> Forward:
        """Return the forward with the logits [b, K] of readouts of what a layer was `given`."""

        def forward(x: Tensor) -> Tensor:
            own, images = logits_in(plain(x)), rows[0]
            value = readout(own if given is None else given[0], images)
            highest, rejects = torch.zeros_like(value), self.rejects
            if rejects is not None:
                # The higher of both classes takes the network's own highest logit: so it is
                # accepted where the network accepts.
                accepted = [k for k in range(own.shape[1]) if k != rejects]
                highest = own[:, accepted].amax(1).to(value)
            # Below the lowest of both classes, or attacks on the runner-up follow others at first.
            logits = (highest - 2 * readout.size[images])[:, None].expand(own.shape)
            logits = _with(logits, self.y[images], highest - value.clamp_min(0))
            logits = _with(logits, self.target[images], highest + value.clamp_max(0))
            if rejects is not None:
                rejected = own[:, rejects].to(value)
                rejected = 2 * highest - rejected if self.inverted else rejected
                logits = _with(logits, torch.full_like(images, rejects), rejected)
            return logits.to(own.dtype)

        return forward


def _keeping(given: list[Tensor], plain: Forward) -> Forward:
    """Return a layer's forward that keeps its input."""

    def forward(h: Tensor) -> Tensor:
        given[:] = [h]
        return plain(h)

    return forward


def _with(logits: Tensor, column: Tensor, values: Tensor) -> Tensor:
    return logits.scatter(1, column[:, None], values[:, None])


def _nearest(x: Tensor, images: Tensor) -> Tensor:
    """Return the positions [b] of the images [B, D] nearest to x [b, …]."""
    with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
        flat = x.flatten(1).to(images)
        return (flat @ images.T - images.square().sum(1) / 2).argmax(1)
