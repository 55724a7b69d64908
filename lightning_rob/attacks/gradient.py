"""The value and the gradient of an objective on a defense, and gradients of single draws."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_rob.attacks.backward import Backward
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.contexts import attacking
from lightning_rob.attacks.sight import image_gradient
from lightning_rob.defenses import Defense
from lightning_rob.objectives import (
    Loss,
    check_logits,
    climbed,
    expected_ce,
    expected_margin,
    reduction_of,
)
from lightning_rob.randomness import Generator, Streams
from lightning_rob.rules import Rule, random_member
from lightning_rob.threat import choose

_seen: ContextVar[list[Tensor] | None] = ContextVar("seen", default=None)  # see `recorded`
Draws = tuple[Rule, Tensor, Tensor]  # a rule, the logits [S, B, K] it decides on, their weights [S]


@dataclass(frozen=True)
class ObjectiveAt:
    """Value and gradient of an objective at a batch of images."""

    value: Tensor  # [B] the objective
    gradient: Tensor  # [B, C, H, W] its gradient with respect to the images
    logits: Tensor  # [S, B, K] of all draws, detached
    weights: Tensor  # [S] of the draws
    deciders: tuple[Draws, ...]  # the draws of each part with a rule of its own

    def fooled(self, y: Tensor) -> Tensor:
        """Return the images [B] that the defense predicts correctly with probability 0."""
        correct = [
            rule(logits, weights).gather(1, y[:, None])[:, 0]
            for rule, logits, weights in self.deciders
        ]
        return torch.stack(correct).amax(0) <= 0


@dataclass(frozen=True)
class ObjectiveGradient:
    """An objective of a defense's draws, as a function of the images."""

    objective: Loss
    draws: int | None = None

    def value(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator, check: bool = False
    ) -> Tensor:
        """Return the objective [B] of images [B, C, H, W] with labels [B]."""
        if _draws_a_rule(defense) and reduction_of(self.objective) is None:
            parts = [(share, part) for share, part in defense.components() if share]
            values = [share * self.value(part, x, y, generator, check) for share, part in parts]
            return torch.stack(values).sum(0)
        logits, weights = defense.sample_logits(x, generator, self.draws)
        return self._of(logits, weights, y, check)

    def __call__(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator, check: bool = False
    ) -> ObjectiveAt:
        """Return the objective and its gradient at images [B, C, H, W] with labels [B]."""
        seen = _seen.get()
        before = len(seen or ())
        splits = reduction_of(self.objective) is not None or _draws_a_rule(defense)
        if len(defense.components()) > 1 and splits:
            at = self._of_mixture(defense, x, y, generator, check)
        else:
            x = x.detach().requires_grad_()
            if self.draws is None:
                logits, weights = defense.logits(x, generator), defense.weights
            else:
                logits, weights = defense.sample_logits(x, generator, self.draws)
            value = self._of(logits, weights, y, check)
            gradient = image_gradient(value, x, generator)
            draws = (defense.rule, logits.detach(), weights)
            at = ObjectiveAt(value.detach(), gradient, logits.detach(), weights, (draws,))
        if seen is not None:
            margin = -expected_margin(at.logits, at.weights, y)
            columns = at.value[0], margin[0], at.gradient[0].norm()
            row = torch.stack([number.detach().float() for number in columns])
            seen[before:] = [row]  # in place of those of a mixture's parts
        return at

    def _of(self, logits: Tensor, weights: Tensor, y: Tensor, check: bool) -> Tensor:
        if check:
            check_logits(logits, y)
        # Half precision would round away the differences that the objective measures.
        precise = logits.float() if logits.itemsize < 4 else logits
        return climbed(self.objective, precise, weights, y)

    def _of_mixture(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator, check: bool
    ) -> ObjectiveAt:
        """Evaluate the parts in turn, so that memory does not grow with their number."""
        reduction = reduction_of(self.objective)
        smallest = reduction == "min"
        value = x.new_full((len(x),), torch.inf if smallest else 0.0)
        gradient, draws = torch.zeros_like(x), []
        deciders: tuple[Draws, ...] = ()
        for share, member in defense.components():
            if share == 0:
                continue
            # The graph of this part is free before the next one is evaluated.
            part = self(member, x, y, generator, check)
            # That of the part with the smallest value, or the mean by the parts' shares.
            if smallest:
                gradient = choose(part.value < value, part.gradient, gradient)
                value = torch.where(part.value < value, part.value, value)
            else:
                value, gradient = value + share * part.value, gradient + share * part.gradient
            draws.append((part.logits, share * part.weights))
            deciders += part.deciders
        logits, weights = (torch.cat(values) for values in zip(*draws, strict=True))
        # As `value`: the continuation of a small objective is not linear in the parts.
        if reduction == "mean":
            value = self._of(logits, weights, y, check=False)
        if defense.rule is not random_member:  # the parts' predictions are pooled
            deciders = ((defense.rule, logits, weights),)
        return ObjectiveAt(value, gradient, logits, weights, deciders)


def _draws_a_rule(defense: Defense) -> bool:
    """Return whether a mixture draws one of several parts that each decide by their own draws.

    An objective over all draws, such as that of a vote, is then one of each part, and its mean.
    """
    parts = defense.components()
    several = any(len(part.weights) > 1 for _, part in parts)
    return len(parts) > 1 and defense.rule is random_member and several


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """Yield what an attack on one image sees: value, margin and l2 norm of each gradient, [3]."""
    seen: list[Tensor] = []
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def draw_gradients(
    defense: Defense,
    x: Tensor,
    y: Tensor,
    draws: int,
    generator: Generator = None,
    objective: Loss = expected_ce,
    backward: Backward | None = None,
) -> Tensor:
    """Return the gradients of single draws of a random defense, drawn as in a step of PGD.

    Of images [B, C, H, W] with labels [B] and n draws they are [n, B, C, H, W].
    """
    gradients: list[Tensor] = []
    with attacking(defense) as defense, backward(defense) if backward else nullcontext():
        x, y = x.detach().clone().requires_grad_(), y.clone()
        logits, weights = defense.sample_logits(x, generator, draws)
        check_logits(logits, y)
        # Each draw stands for a whole defense: its weights sum to one again.
        weights = (weights * draws).view(draws, -1)
        for draw, weight in zip(logits.view(draws, -1, *logits.shape[1:]), weights, strict=True):
            value = objective(draw, weight, y)
            gradients.append(image_gradient(value, x, generator, keep=len(gradients) < draws - 1))
    return torch.stack(gradients)


@dataclass(frozen=True)
class Trace:
    """The objective's values [B, T] in T gradient steps; NaN after an image has left."""

    x_adv: Tensor  # [B, C, H, W] the images that the attack returned
    loss: Tensor  # [B, T] the objective that it climbs
    margin: Tensor  # [B, T] the label's logit minus the largest other one, its mean over draws
    gradient_norm: Tensor  # [B, T] the l2 norm of the gradient by the image


def trace(
    attack: Attack, defense: Defense, x: Tensor, y: Tensor, generator: Generator = None
) -> Trace:
    """Attack images [B, C, H, W] one by one, and return what each step saw before it moved.

    The images are bit for bit those that the attack makes of each alone, with this source of noise.
    Restarts, targets and the attacks inside of others follow one another. `plots.trace` draws it.

    Raises:
        ValueError: no image, or an attack that asks for no gradient of an objective (Square, FAB).
    """
    found, steps = [], []
    for i in range(len(x)):
        row = torch.tensor([i], device=x.device)
        noise = generator[row] if isinstance(generator, Streams) else generator
        with recorded() as seen:
            found.append(attack(defense, x[row], y[row], noise))
        steps.append(torch.stack(seen) if seen else x.new_zeros(0, 3, dtype=torch.float32))
    if not sum(map(len, steps)):
        kind = type(attack).__name__
        raise ValueError(f"{kind} asked for no gradient of an objective on {len(x)} images")
    loss, margin, norm = pad_sequence(steps, True, torch.nan).unbind(2)
    return Trace(torch.cat(found), loss, margin, norm)
