"""The base class of attacks, and the contexts in which they run and leave no trace."""

import math
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_rob.attacks.acceptance import rejects, towards_acceptance
from lightning_rob.attacks.backward import Backwards, InsideBounds, entered
from lightning_rob.attacks.folding import FoldingError, folded
from lightning_rob.attacks.oom import Work, run_in_chunks, run_in_halves
from lightning_rob.attacks.passes import PassCount
from lightning_rob.attacks.sight import Sight, own_sight
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import private
from lightning_rob.defenses.per_image import PerImageLayer
from lightning_rob.randomness import (
    Generator,
    Streams,
    own_streams,
    seed_of,
    seeded_global_rng,
)
from lightning_rob.rules import Rule
from lightning_rob.runtime.errors import ZeroGradientWarning
from lightning_rob.runtime.memory import images_at_once
from lightning_rob.runtime.precision import in_float32
from lightning_rob.threat import Norm, Threat

M = TypeVar("M", bound=nn.Module)

ENOUGH = 16  # images without a gradient are no accident
HAIR = 1e-4  # of the pixels' range, from the bounds


@contextmanager
def evaluating(defense: M) -> Iterator[M]:
    """Yield a working copy of a defense in eval mode, with full float32.

    The defense itself is not touched: a signal handler or another thread that reads it meanwhile
    sees its own weights and modes, and what its forward writes is written to the copy. A working
    copy is taken as it is. Parts that compiled code refers to are shared with the defense (see
    `lightning_rob.defenses.copies`): their modes are restored on exit.
    """
    with torch.inference_mode(False), in_float32():
        copied = private(defense)
        modes = [(module, module.training) for module in copied.modules()]
        copied.eval()
        try:
            yield copied
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def attacking(defense: M) -> Iterator[M]:
    """As `evaluating`, with gradients for images but not for weights.

    Works inside `torch.inference_mode` and inside autocast. Autocast's cache of cast weights is not
    used: a copy cast here would have no gradient in the training step. In the working copy
    BatchNorm is folded into the convolutions (`lightning_rob.attacks.folding`), and TF32 is off
    unless an enclosing `in_float32` allows it (`lightning_rob.runtime.precision`).
    """
    with evaluating(defense) as copied, torch.enable_grad(), _uncached_autocast():
        grads = [(weight, weight.requires_grad) for weight in copied.parameters()]
        with folded(_foldable_networks(copied)):
            try:
                for weight, _ in grads:
                    weight.requires_grad_(False)
                yield copied
            finally:
                for weight, grad in grads:
                    weight.requires_grad_(grad)


def _foldable_networks(defense: nn.Module) -> list[nn.Module]:
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
    if math.isnan(low):
        raise ValueError(f"images must lie in {list(bounds)}, got pixels that are NaN")
    if not (bounds[0] - 1e-4 <= low and high <= bounds[1] + 1e-4):
        raise ValueError(
            f"images must lie in {list(bounds)}, got values in [{low:.4g}, {high:.4g}]: give them "
            "unnormalised, and the normalization as `preprocess=`"
        )


def check_label_type(y: Tensor, images: int) -> None:
    """Raise ValueError unless y is one whole number for each image."""
    if y.shape != (images,):
        raise ValueError(f"{images} images need labels [{images}], got {list(y.shape)}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"labels must be whole numbers, got {y.dtype}")


class Attack(ABC):
    """A search for images that a defense misclassifies. Subclasses are frozen dataclasses."""

    threat: Threat
    batch_dependent: ClassVar[bool] = False  # whether an image's result depends on other images
    knowledge: ClassVar[str] = "all of the defense but its private randomness"
    lengths: ClassVar[tuple[str, ...]] = ()  # the fields that are lengths in the threat's norm
    made_for: ClassVar[tuple[str, ...]] = ()  # kinds of defenses whose adaptive attack this is
    rehearses: ClassVar[bool] = False  # whether it lets the defense adapt to the whole batch
    smallest_norm: ClassVar[bool] = False  # whether it searches the nearest image that fools
    takes_radii: ClassVar[bool] = False  # whether the threat may be a `ThreatPerImage`
    length: ClassVar[str] = "steps"  # the field that a budget of passes sets
    ignores_state: ClassVar[bool] = False  # whether it sees nothing of a defense's adapted state
    splits_batches: ClassVar[bool] = False  # whether it chooses itself how many images at a time

    def __call__(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator = None
    ) -> Tensor:
        """Perturb a batch of images.

        Args:
            defense: the defense under attack; its modes, weights and gradients stay unchanged.
            x: [B, C, H, W] images within the threat's bounds.
            y: [B] their true labels.
            generator: the source of random starts and of the defense's draws. With one, the
                global streams of torch, numpy and Python are as before afterwards.

        Returns:
            [B, C, H, W] images within the threat's ball and bounds, detached.

        Raises:
            TypeError: the defense is a plain network.
            ValueError: images or labels are out of range.
        """
        if not isinstance(defense, Defense):
            kind = type(defense).__name__
            raise TypeError(f"attacks are on a Defense, got {kind}: wrap a network, Single(net)")
        check_images(x, self.threat.bounds)
        check_label_type(y, len(x))
        restore = _restoring(generator)
        # A network may draw from the global streams: with a generator, they are seeded by it.
        streams = nullcontext() if generator is None else own_streams(seed_of(generator), x.device)
        with torch.inference_mode(False), streams:
            x, y = x.detach().clone(), y.clone()
            if not len(x):
                return x
            copied = private(defense)
            with own_sight(len(x), x.device, generator) as sight:
                x_adv = self._attempt(copied, x, y, generator, restore)
                if bool(sight.nonfinite) and _has_networks(copied):
                    restore()
                    sight.recovered = True
                    low, high = self.threat.bounds
                    inside = InsideBounds(HAIR * (high - low), self.threat.bounds)
                    x_adv = self._attempt(copied, x, y, generator, restore, inside)
                if not sight.watched:
                    _warn_if_blind(copied, x_adv, y, sight)
        return x_adv

    def _attempt(
        self,
        defense: Defense,
        x: Tensor,
        y: Tensor,
        generator: Generator,
        restore: Callable[[], object],
        backward: Backwards = None,
        again: bool = True,
    ) -> Tensor:
        """Attack all images at once, in chunks, or in as small parts as memory allows."""
        try:
            with attacking(defense), entered(backward, defense):  # in place: it is a working copy
                separable = is_batch_separable(self, defense)
                perturb: Work = self.perturb
                if rejects(defense):
                    perturb = partial(towards_acceptance, perturb, separable)
                try:
                    size = len(x) if self.splits_batches or not separable else images_at_once(x)
                    if size == len(x):
                        return perturb(defense, x, y, generator).detach()
                    return run_in_chunks(perturb, size, defense, x, y, generator).detach()
                except torch.OutOfMemoryError as error:
                    if not separable:
                        self._suggest_smaller_rounds(error, len(x))
                        raise
                    if len(x) < 2:
                        raise
                # outside the handler, whose traceback keeps the failed attempt's tensors alive
                restore()
                return run_in_halves(perturb, defense, x, y, generator).detach()
        except FoldingError:
            if not again:
                raise
        restore()  # and attack once more: this network is not folded a second time
        return self._attempt(defense, x, y, generator, restore, backward, again=False)

    def _suggest_smaller_rounds(self, error: torch.OutOfMemoryError, images: int) -> None:
        if not getattr(error, "__notes__", None):
            error.add_note(
                f"{type(self).__name__} attacks a round of {images} images as a whole: play rounds "
                "of fewer images (protocol.images, or eval_batch_size)"
            )

    @property
    def stops_on_gradient_logits(self) -> bool:
        """Whether logits computed for a gradient decide which images are already fooled."""
        return False

    def is_made_for(self, suite_kind: str, rule: Rule) -> bool:
        """Return whether the attack is adaptive on a kind of defense that predicts by this rule.

        Args:
            suite_kind: as `lightning_rob.evaluation.suites.suite_kind` has it: "ensemble",
                "randomized", "random", "transformed" or "transductive"; not `Defense.kind`.
            rule: the defense's.
        """
        return suite_kind in self.made_for

    def require_package(self) -> None:  # noqa: B027 (most attacks need none)
        """Raise ModuleNotFoundError without an optional package that the attack needs."""

    def cost(self, count: PassCount) -> int:
        """Return the largest number of passes that an image costs; fewer where it leaves early.

        Args:
            count: of networks and classes.

        Raises:
            TypeError: an attack whose passes are not known before it runs.
        """
        raise TypeError(
            f"{type(self).__name__} has no number of passes that is known before it runs: put "
            "Budgeted around an attack inside it, if it has one"
        )

    def least(self, count: PassCount) -> int:
        """Return the passes that an image costs with the fewest steps."""
        return self._of_length(1).cost(count)

    def within(self, passes: int, count: PassCount) -> "Attack":
        """Return the attack with the most steps that cost an image no more than these passes.

        Args:
            passes: the largest number, forward and backward passes together.
            count: of networks and classes.

        Raises:
            TypeError: an attack whose passes are not known before it runs.
            ValueError: a single step costs more.
        """
        passes = affordable(self, passes, count)
        lengths = range(1, passes + 1)
        return self._of_length(
            bisect_right(lengths, passes, key=lambda length: self._of_length(length).cost(count))
        )

    def _of_length(self, length: int) -> "Attack":
        return replace(self, **{self.length: length})  # type: ignore[type-var]

    def strategies(self, defense: Defense) -> "list[tuple[float, Attack]]":
        """Return the attacker's strategies against this defense with their probabilities.

        Most attacks have one. An evaluation averages over strategies, which is exact, whereas
        drawing one would be an estimate.
        """
        return [(1.0, self)]

    def rescaled(self, eps: float, norm: Norm | None = None) -> "Attack":
        """Return the attack for another radius; its `lengths` keep their share of it.

        Attacks among its arguments are rescaled too.

        Args:
            eps: the new radius, in pixel units.
            norm: the new norm; None keeps that of each attack.

        Raises:
            ValueError: the attack is not a dataclass, is not made for the norm, or has a length
                and a radius of 0.
        """
        changes = _map_inner(self, lambda inner: inner.rescaled(eps, norm))
        if "threat" in changes:
            changes["threat"] = replace(self.threat, eps=eps, norm=norm or self.threat.norm)
            if self.lengths and self.threat.eps == 0:
                names = ", ".join(self.lengths)
                raise ValueError(f"{names} cannot be scaled with eps: it is 0 in {self}")
            for name in self.lengths:
                length = getattr(self, name)
                changes[name] = None if length is None else length * (eps / self.threat.eps)
        return replace(self, **changes)  # type: ignore[type-var]

    @abstractmethod
    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """Run the attack, inside `attacking`; shapes as in `__call__`."""


def affordable(attack: Attack, passes: int, count: PassCount) -> int:
    """Return the passes that are left for an attack, after those for the number of classes.

    Raises:
        TypeError: an attack whose passes are not known before it runs.
        ValueError: it cannot take a step in them.
    """
    attack.cost(count)  # an error where it is not known
    least = attack.least(count)
    if passes < least + count.asked:
        kind = type(attack).__name__
        raise ValueError(f"{kind} needs {least + count.asked} passes or more here, got {passes}")
    return passes - count.asked


def shared(attacks: Sequence[Attack], passes: int, count: PassCount) -> list[Attack]:
    """Return the attacks with steps that together cost these passes, in the same proportions.

    Args:
        attacks: that run one after the other.
        passes: at least the sum of what each needs.
        count: of networks and classes.
    """
    least, costs = [a.least(count) for a in attacks], [a.cost(count) for a in attacks]
    free = passes - sum(least)
    shares = [low + free * cost // sum(costs) for low, cost in zip(least, costs, strict=True)]
    return [a.within(share + count.asked, count) for a, share in zip(attacks, shares, strict=True)]


def _has_networks(defense: Defense) -> bool:
    """Whether it names the networks whose gradients can be taken elsewhere."""
    try:
        return bool(defense.foldable_networks)
    except TypeError:
        return False


def _warn_if_blind(defense: Defense, x_adv: Tensor, y: Tensor, sight: Sight) -> None:
    """Warn where many images had no gradient to follow, and the defense is right on them."""
    blind = sight.blind == 1
    if defense.transductive or int(blind.sum()) < ENOUGH:
        return
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad(), seeded_global_rng(noise, x_adv.device), evaluating(defense):
        right = defense(x_adv, noise).argmax(1) == y
    stuck = int((blind & right).sum())
    if stuck >= ENOUGH:
        kind = "not finite or zero" if bool(sight.nonfinite) else "exactly zero"
        warnings.warn(
            f"the gradient is {kind} for {stuck} of {len(y)} images, which are not misclassified: "
            "this attack cannot move them, and its accuracy says nothing of them. "
            "`lightning-rob audit` finds out why; Square needs no gradient",
            ZeroGradientWarning,
            stacklevel=4,
        )


def _restoring(generator: Generator) -> Callable[[], object]:
    """Return a function that sets a source of noise back to its current state."""
    if isinstance(generator, Streams):
        return partial(setattr, generator, "counter", generator.counter)
    if generator is None:
        return lambda: None
    return partial(generator.set_state, generator.get_state())


def init_fields(attack: Attack) -> dict[str, Any]:
    """Return the arguments that the attack was created with.

    Raises:
        ValueError: the attack is not a dataclass.
    """
    if not is_dataclass(attack):
        raise ValueError(f"{type(attack).__name__} cannot be changed: it is not a dataclass")
    return {field.name: getattr(attack, field.name) for field in fields(attack) if field.init}


def inner_attacks(attack: Attack) -> Iterator[Attack]:
    """Yield the attacks among its arguments, and in lists and mappings there."""
    if not is_dataclass(attack):
        return
    yield from _attacks_in(list(init_fields(attack).values()))


def _attacks_in(value: Any) -> Iterator[Attack]:
    if isinstance(value, Attack):
        yield value
    elif isinstance(value, list | tuple | set | frozenset | Mapping):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _attacks_in(part)


def walk(attack: Attack) -> Iterator[Attack]:
    """Yield the attack and all attacks inside it."""
    yield attack
    for inner in inner_attacks(attack):
        yield from walk(inner)


def map_attacks(attack: Attack, change: Callable[[Attack], dict[str, Any]]) -> Attack:
    """Return a copy of the attack with fields changed, in the attacks inside it too.

    Args:
        attack: a dataclass.
        change: attack -> the fields to replace, with their new values.
    """
    inner = _map_inner(attack, lambda part: map_attacks(part, change))
    return replace(attack, **inner | change(attack))  # type: ignore[type-var]


def _map_inner(attack: Attack, change: Callable[[Attack], Attack]) -> dict[str, Any]:
    """Return its arguments with `change` applied to attacks, also in lists and mappings."""

    def changed(value: Any) -> Any:
        if next(_attacks_in(value), None) is None:
            return value
        if isinstance(value, tuple):
            return tuple(map(changed, value))
        if isinstance(value, list | set | frozenset):
            return type(value)(map(changed, value))
        if isinstance(value, Mapping):
            return {key: changed(item) for key, item in value.items()}
        return change(value)

    return {name: changed(value) for name, value in init_fields(attack).items()}


def is_batch_separable(attack: Attack, defense: Defense) -> bool:
    """Whether a batch may be attacked in parts: no result depends on the other images."""
    layers = list(defense.modules())
    per_image = (layer for layer in layers if isinstance(layer, PerImageLayer))
    adapts = defense.transductive or not all(layer.separable for layer in per_image)
    adapts |= any(isinstance(layer, _BatchNorm) and layer.training for layer in layers)
    return not adapts and not any(part.batch_dependent for part in walk(attack))
