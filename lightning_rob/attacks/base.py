"""What all attacks share: they are functions of tensors that leave nothing behind."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_rob.attacks.folding import folded
from lightning_rob.attacks.oom import retry_with_smaller_batches
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import PerImageLayer
from lightning_rob.objectives import Objective, check_logits, over_draws
from lightning_rob.precision import in_float32
from lightning_rob.randomness import Generator
from lightning_rob.rules import random_member
from lightning_rob.threat import Threat


@contextmanager
def evaluating(defense: nn.Module) -> Iterator[None]:
    """Eval mode, restored module by module, so that frozen parts stay frozen; full float32."""
    modes = [(module, module.training) for module in defense.modules()]
    defense.eval()
    try:
        with in_float32():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def attacking(defense: nn.Module) -> Iterator[None]:
    """Eval mode, gradients for images and none for weights; all as before afterwards.

    Works inside `torch.inference_mode` and inside autocast, whose cache of cast weights is left
    alone: a copy made here would have no gradient for the training step. Meanwhile BatchNorm is
    folded into the convolutions (`lightning_rob.attacks.folding`), and TF32 is off unless an
    `in_float32` around this asks for it (`lightning_rob.precision`).
    """
    grads = [(weight, weight.requires_grad) for weight in defense.parameters()]
    with (
        evaluating(defense),
        torch.inference_mode(False),
        torch.enable_grad(),
        _uncached_autocast(),
        folded(_called_as_a_whole(defense)),
    ):
        try:
            for weight, _ in grads:
                weight.requires_grad_(False)
            yield
        finally:
            for weight, grad in grads:
                weight.requires_grad_(grad)


def _called_as_a_whole(defense: nn.Module) -> list[nn.Module]:
    if not isinstance(defense, Defense):
        return [defense]
    try:
        return defense.foldable_networks
    except TypeError:
        return []


@contextmanager
def _uncached_autocast() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def check_images(x: Tensor, bounds: tuple[float, float]) -> None:
    """Raise ValueError unless x is a floating [B, …] batch of finite images within the bounds."""
    x = x.detach()
    if not x.is_floating_point():
        raise ValueError(f"images must be floating point in {list(bounds)}, got {x.dtype}")
    if x.dim() < 2:
        raise ValueError(f"images must be a batch [B, …], got shape {list(x.shape)}")
    if not len(x):
        return
    low, high = float(x.min()), float(x.max())
    if not (bounds[0] - 1e-4 <= low and high <= bounds[1] + 1e-4):
        raise ValueError(
            f"images must lie in {list(bounds)}, got values in [{low:.4g}, {high:.4g}]"
        )


def height(
    objective: Objective,
    draws: int | None,
    defense: Defense,
    x: Tensor,
    y: Tensor,
    generator: Generator,
    check: bool = False,
    right: list[Tensor] | None = None,
) -> Tensor:
    """The objective [B] of images [B, C, H, W] with labels [B], over so many draws of the defense.

    With `check` labels out of range and logits that are not numbers raise a ValueError. To `right`
    is added how probable the right answer is: [B].
    """
    logits, weights = defense.sample_logits(x, generator, draws)
    if check:
        check_logits(logits, y)
    if right is not None:
        right.append(defense.rule(logits.detach(), weights).gather(1, y[:, None])[:, 0])
    return objective(logits.float() if logits.itemsize < 4 else logits, weights, y)


def slope(
    objective: Objective,
    draws: int | None,
    defense: Defense,
    x: Tensor,
    y: Tensor,
    generator: Generator,
    check: bool = False,
    right: list[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The objective [B] and its gradient by the images [B, C, H, W]; see `height`.

    A mixture is seen one part after the other where the objective is the mean of the draws' own or
    the least of them: memory does not grow with the number of parts.
    """
    pooled = right is not None and defense.rule is not random_member
    if defense.kind == "mixture" and over_draws(objective) and not pooled:
        return _part_by_part(objective, draws, defense, x, y, generator, check, right)
    leaf = x.detach().requires_grad_()
    climbed = height(objective, draws, defense, leaf, y, generator, check, right)
    (gradient,) = torch.autograd.grad(climbed.sum(), leaf)
    return climbed.detach(), gradient


def _part_by_part(
    objective: Objective,
    draws: int | None,
    defense: Defense,
    x: Tensor,
    y: Tensor,
    generator: Generator,
    check: bool,
    right: list[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """`slope`, the sum of the parts' by their shares, or for each image that of the least part."""
    least = over_draws(objective) == "min"
    value = x.new_full((len(x),), torch.inf if least else 0.0)
    gradient = torch.zeros_like(x)
    for share, part in defense.components():
        if share == 0:
            continue
        height_of_part, slope_of_part = slope(objective, draws, part, x, y, generator, check, right)
        if least:
            wins = height_of_part < value
            value = torch.where(wins, height_of_part, value)
            wins = wins.view(-1, *[1] * (x.dim() - 1))
            gradient = torch.where(wins, slope_of_part, gradient)
        else:
            value = value + share * height_of_part
            gradient = gradient + share * slope_of_part
    return value, gradient


def is_batch_separable(attack: "Attack", defense: Defense) -> bool:
    """Whether a batch may be attacked in parts: neither goes by the whole of it."""
    layers = (layer for layer in defense.modules() if isinstance(layer, PerImageLayer))
    whole = defense.transductive or not all(layer.separable for layer in layers)
    return not whole and not any(part.batch_dependent for part in parts(attack))


class Backward(ABC):
    """How an attack sees a defense as long as it lasts: other gradients, the same answers."""

    @abstractmethod
    def __call__(self, defense: Defense) -> AbstractContextManager[None]:
        """A context in which the defense is seen so."""


Backwards = Backward | Sequence[Backward] | None


@contextmanager
def entered(backward: Backwards, defense: Defense) -> Iterator[None]:
    """Enter one backward or several, in turn."""
    chosen = backward or ()
    with ExitStack() as stack:
        for each in chosen if isinstance(chosen, Sequence) else (chosen,):
            stack.enter_context(each(defense))
        yield


Forward = Callable[[Tensor], Tensor]


@contextmanager
def other_forward(nets: list[nn.Module], change: Callable[[Forward], Forward]) -> Iterator[None]:
    """Give networks another forward, made of their own, for this context only."""
    before = {net: net.__dict__.get("forward") for net in nets}
    try:
        for net in before:
            net.__dict__["forward"] = change(net.forward)
        yield
    finally:
        for net, forward in before.items():
            net.__dict__.pop("forward", None)
            net.__dict__.update({"forward": forward} if forward else {})


class Attack(ABC):
    """A search for images that a defense gets wrong. Subclasses are frozen dataclasses."""

    threat: Threat
    batch_dependent: ClassVar[bool] = False  # whether an image's result depends on the others
    knowledge: ClassVar[str] = "all of the defense but its private randomness"
    lengths: ClassVar[tuple[str, ...]] = ()  # the fields that are lengths in the threat's norm

    def __call__(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator = None
    ) -> Tensor:
        """Perturb a batch of images.

        Args:
            defense: what is attacked; its modes, weights and gradients are left as they are.
            x: [B, C, H, W] images within the threat's bounds.
            y: [B] their true labels.
            generator: where random starts and the defense's draws come from.

        Returns:
            [B, C, H, W] images within the threat's ball and bounds, detached.

        Raises:
            TypeError: a plain network.
            ValueError: images or labels out of range.
        """
        if not isinstance(defense, Defense):
            kind = type(defense).__name__
            raise TypeError(f"attacks are on a Defense, got {kind}: wrap a network, Single(net)")
        check_images(x, self.threat.bounds)
        if y.shape != x.shape[:1]:
            raise ValueError(f"{len(x)} images need labels [{len(x)}], got {list(y.shape)}")
        with attacking(defense):
            x, y = x.detach().clone(), y.clone()
            if not len(x):
                return x
            if is_batch_separable(self, defense):
                return retry_with_smaller_batches(self.perturb, defense, x, y, generator).detach()
            return self._whole(defense, x, y, generator).detach()

    def _whole(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """`perturb`; where that runs out of memory the error says how to need less."""
        try:
            return self.perturb(defense, x, y, generator)
        except torch.OutOfMemoryError as error:
            if not getattr(error, "__notes__", None):
                error.add_note(
                    f"{type(self).__name__} attacks a round of {len(x)} images as a whole: play "
                    "rounds of fewer images (protocol.images, or eval_batch_size)"
                )
            raise

    def strategies(self, defense: Defense) -> "list[tuple[float, Attack]]":
        """What the attacker may do against this defense, each with its probability; mostly one.

        An evaluation averages the outcomes, which is exact where a drawn strategy is an estimate.
        """
        return [(1.0, self)]

    def rescaled(self, eps: float) -> "Attack":
        """The attack within a ball of another radius, of which its `lengths` keep their share.

        So do the attacks that it is made of.

        Raises:
            ValueError: it is not a dataclass, or has a length and a radius of 0.
        """
        changes = _with_parts(self, lambda part: part.rescaled(eps))
        if "threat" in changes:
            changes["threat"] = replace(self.threat, eps=eps)
            if self.lengths and self.threat.eps == 0:
                names = ", ".join(self.lengths)
                raise ValueError(f"{names} cannot be scaled with eps: it is 0 in {self}")
            for name in self.lengths:
                changes[name] = getattr(self, name) * (eps / self.threat.eps)
        return replace(self, **changes)  # type: ignore[type-var]

    @abstractmethod
    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """The attack itself, called inside `attacking`; same shapes as `__call__`."""


def arguments(attack: Attack) -> dict[str, Any]:
    """Return the arguments that the attack was made with.

    Raises:
        ValueError: it is not a dataclass.
    """
    if not is_dataclass(attack):
        raise ValueError(f"{type(attack).__name__} cannot be changed: it is not a dataclass")
    return {field.name: getattr(attack, field.name) for field in fields(attack) if field.init}


def inner_attacks(attack: Attack) -> Iterator[Attack]:
    """The attacks among its arguments, or in tuples there; not those that these are made of."""
    if not is_dataclass(attack):
        return
    for value in arguments(attack).values():
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Attack):
                yield part


def parts(attack: Attack) -> Iterator[Attack]:
    """The attack and all that it is made of."""
    yield attack
    for inner in inner_attacks(attack):
        yield from parts(inner)


def rebuilt(attack: Attack, change: Callable[[Attack], dict[str, Any]]) -> Attack:
    """The attack with fields changed, those of the attacks it is made of as well.

    Args:
        attack: a dataclass.
        change: attack -> its fields that become others.
    """
    made_of = _with_parts(attack, lambda part: rebuilt(part, change))
    return replace(attack, **made_of | change(attack))  # type: ignore[type-var]


def _with_parts(attack: Attack, change: Callable[[Attack], Attack]) -> dict[str, Any]:
    """The attack's arguments, those that are attacks, or tuples of attacks, changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(changed(part) for part in value)
        return change(value) if isinstance(value, Attack) else value

    return {name: changed(value) for name, value in arguments(attack).items()}
