"""The base class of attacks."""

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_rob.attacks.backward import Backwards, InsideBounds, entered
from lightning_rob.attacks.budget import Counted
from lightning_rob.attacks.contexts import attacking, evaluating, foldable_networks
from lightning_rob.attacks.execution import Work, restoring, run_in_chunks, towards_acceptance
from lightning_rob.attacks.folding import FoldingError
from lightning_rob.attacks.nested import mapped_arguments, walk
from lightning_rob.attacks.sight import Sight, own_sight
from lightning_rob.defenses import Defense
from lightning_rob.defenses.copies import own_copy
from lightning_rob.defenses.per_image import per_image_layers
from lightning_rob.defenses.rejection import behind_labels
from lightning_rob.randomness import Generator, Streams, own_streams, seed_of, seeded_global_rng
from lightning_rob.rules import Rule
from lightning_rob.runtime.errors import ZeroGradientWarning
from lightning_rob.runtime.memory import images_at_once
from lightning_rob.threat import Norm, Threat, pixels

ENOUGH = 16  # images without a gradient are no accident
HAIR = 1e-4  # of the pixels' range, from the bounds


def check_images(x: Tensor, bounds: tuple[float, float]) -> None:
    """Raise ValueError unless x is a floating [B, …] batch of finite images within the bounds."""
    x = x.detach()
    if not x.is_floating_point():
        advice = ": give x.float() / 255" if x.dtype == torch.uint8 else ""
        raise ValueError(f"images must be floating point in {list(bounds)}, got {x.dtype}{advice}")
    if x.dim() < 2:
        raise ValueError(f"images must be a batch [B, …], got shape {list(x.shape)}")
    if not len(x):
        return
    low, high = float(x.min()), float(x.max())
    if math.isnan(low):
        raise ValueError(f"images must lie in {list(bounds)}, got pixels that are NaN")
    if not (bounds[0] - 1e-4 <= low and high <= bounds[1] + 1e-4):
        advice = "divide them, by 255 if they are 8-bit images"
        if low < bounds[0]:
            advice = "give them unnormalised, and the normalization as `preprocess=`"
        raise ValueError(
            f"images must lie in {list(bounds)}, got values in [{low:.4g}, {high:.4g}]: {advice}"
        )


def check_label_type(y: Tensor, images: int) -> None:
    """Raise ValueError unless y is one whole number for each image."""
    if y.shape != (images,):
        advice = ": if they are one-hot, give y.argmax(1)" if y.dim() == 2 else ""
        raise ValueError(f"{images} images need labels [{images}], got {list(y.shape)}{advice}")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise ValueError(f"labels must be whole numbers, got {y.dtype}: give y.long()")


def check_norm(attack: "Attack", *orders: float) -> None:
    """Raise ValueError unless the threat's norm is one of these, 2 or infinity."""
    if attack.threat.p not in orders:
        names = " and ".join("linf" if p == math.inf else f"l{p:g}" for p in orders)
        raise ValueError(f"{type(attack).__name__} is for {names}, not {attack.threat.norm}")


def check_start(attack: Any) -> None:
    """Raise ValueError unless the attack to start from, if any, has the same threat."""
    # Its images may be returned as they are: a larger ball would make an attack look strong.
    if attack.start is not None and attack.start.threat != attack.threat:
        raise ValueError(f"start must be an attack within {attack.threat}, got {attack.start}")


def set_step_size(attack: Any) -> None:
    """Set `step_size` in pixel units, None as it is; raise ValueError unless it is positive."""
    if attack.step_size is not None:
        object.__setattr__(attack, "step_size", pixels(attack.step_size))
        if not attack.step_size > 0:
            raise ValueError(f"step_size must be positive, got {attack.step_size}")
        threat, (low, high) = attack.threat, attack.threat.bounds
        # The usual slip, 2 in place of 2/255, makes a weak attack; a single step may be 2.5 eps.
        longest = max(high - low, 2.5 * float(threat.eps)) if threat.p == math.inf else math.inf
        if not threat.relative and attack.step_size > longest:
            size = f"{attack.step_size:g}"
            raise ValueError(f"a step of {size} crosses all images: did you mean {size}/255?")


class Attack(Counted, ABC):
    """A search for images that a defense misclassifies. Subclasses are frozen dataclasses.

    Where they have `draws`, it is how often a random defense is drawn for each evaluation; None for
    as often as for a prediction.
    """

    threat: Threat
    batch_dependent: ClassVar[bool] = False  # whether an image's result depends on other images
    knowledge: ClassVar[str] = "all of the defense but its private randomness"
    lengths: ClassVar[tuple[str, ...]] = ()  # the fields that are lengths in the threat's norm
    made_for: ClassVar[tuple[str, ...]] = ()  # kinds (`SuiteKind` of auto.py) that it adapts to
    rehearses: ClassVar[bool] = False  # whether it lets the defense adapt to the whole batch
    smallest_norm: ClassVar[bool] = False  # whether it searches the nearest image that fools
    takes_radii: ClassVar[bool] = False  # whether the threat may be a `ThreatPerImage`
    ignores_state: ClassVar[bool] = False  # whether it sees nothing of a defense's adapted state
    splits_rounds: ClassVar[bool] = False  # whether it has several turns in a round
    splits_batches: ClassVar[bool] = False  # whether it chooses itself how many images at a time
    stops_on_gradient_logits: ClassVar[bool] = False  # whether logits of gradient passes decide

    @property
    def shown(self) -> tuple[str, ...]:
        """Texts about the last call that a later run may show; most attacks keep none."""
        return ()

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
        """
        if not isinstance(defense, Defense):
            kind = type(defense).__name__
            raise TypeError(f"attacks are on a Defense, got {kind}: wrap a network, Single(net)")
        check_images(x, self.threat.bounds)
        check_label_type(y, len(x))
        if isinstance(generator, Streams) and len(generator) != len(x):
            raise ValueError(f"{len(generator)} random streams for {len(x)} images")
        restore = restoring(generator)
        # A network may draw from the global streams: with a generator, they are seeded by it.
        streams = nullcontext() if generator is None else own_streams(seed_of(generator), x.device)
        with torch.inference_mode(False), streams:
            # Copies, for a network or a user's attack may write to them.
            x, y = x.detach().clone(), y.clone().long()
            if not len(x):
                return x
            copied, backward, again = own_copy(defense), None, False
            with own_sight(len(x), x.device, generator) as sight:
                while True:
                    try:
                        x_adv = self._attack(copied, x, y, generator, backward)
                    except FoldingError:
                        if again:  # an attack around this one has folded the network
                            raise
                        again = True  # the network is not folded a second time
                        restore()
                        continue
                    if backward or not (bool(sight.nonfinite) and foldable_networks(copied)):
                        break
                    # A gradient may be missing at the bounds alone: look just inside of them.
                    restore()
                    sight.recovered, (low, high) = True, self.threat.bounds
                    backward = InsideBounds(HAIR * (high - low), self.threat.bounds)
                    again = False  # another network may call other layers at these images
                if not sight.watched:
                    _warn_if_blind(copied, x_adv, y, sight)
        return x_adv

    def _attack(
        self, defense: Defense, x: Tensor, y: Tensor, generator: Generator, backward: Backwards
    ) -> Tensor:
        """Attack all images at once, in chunks, or in as small parts as memory allows."""
        restore = restoring(generator)
        with attacking(defense), entered(backward, defense):  # in place: it is a working copy
            separable = is_batch_separable(self, defense)
            size = len(x) if self.splits_batches or not separable else images_at_once(x, defense)
            perturb: Work = self.perturb
            # A defense may also hide that it rejects, from an outer attack.
            if defense.may_reject or behind_labels(defense):
                perturb = partial(towards_acceptance, perturb, separable)
            while True:
                try:
                    if size == len(x):
                        return perturb(defense, x, y, generator).detach()
                    return run_in_chunks(perturb, size, defense, x, y, generator).detach()
                except torch.OutOfMemoryError as error:
                    if not separable and not getattr(error, "__notes__", None):
                        error.add_note(
                            f"{type(self).__name__} attacks a round of {len(x)} images as a whole: "
                            "play rounds of fewer images (protocol.images, or eval_batch_size)"
                        )
                    if not separable or size < 2:
                        raise
                # outside the handler, whose traceback keeps the failed attempt's tensors alive;
                # only an accelerator's memory: a process that exhausts the host's is killed
                half = (size + 1) // 2
                warnings.warn(
                    f"an attack on {size} images at once ran out of memory and goes on with "
                    f"{half}: save the attempt by Chunked(images=…) or a smaller eval_batch_size",
                    stacklevel=3,
                )
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                size = half
                restore()

    def is_made_for(self, suite_kind: str, rule: Rule) -> bool:
        """Return whether the attack is adaptive on a kind of defense that predicts by this rule.

        The kind is that of `lightning_rob.attacks.auto.suite_kind`.
        """
        return suite_kind in self.made_for

    @property
    def averages(self) -> bool:
        """Whether it averages over noise that a network draws."""
        return (getattr(self, "draws", 0) or 0) > 1

    def strategies(self, defense: Defense) -> "list[tuple[float, Attack]]":
        """Return the attacker's strategies against this defense with their probabilities.

        Most attacks have one. An evaluation averages over strategies, which is exact, whereas
        drawing one would be an estimate.
        """
        return [(1.0, self)]

    def turns(self, images: int) -> "Iterator[tuple[Tensor, int, Attack]]":
        """Yield an order of a round's images, how many of its last are attacked, and by what.

        A defense adapts anew in each turn. Most attacks have one, in which they attack all images.
        """
        yield torch.arange(images), images, self

    def aimed_at(self, y: Tensor) -> Tensor:
        """Return on which images [B] with labels [B] an error is a success of a rehearsal."""
        return torch.ones_like(y, dtype=torch.bool)

    def rescaled(self, eps: float, norm: Norm | None = None) -> "Attack":
        """Return the attack for another radius; its `lengths` keep their share of it.

        Attacks among its arguments are rescaled too.

        Args:
            norm: the new norm; None keeps that of each attack.
        """
        changes = mapped_arguments(self, lambda inner: inner.rescaled(eps, norm))
        if "threat" in changes:
            changes["threat"] = replace(self.threat, eps=eps, norm=norm or self.threat.norm)
            if self.lengths and self.threat.eps == 0:
                names = ", ".join(self.lengths)
                raise ValueError(f"{names} cannot be scaled with eps: it is 0 in {self}")
            for name in self.lengths:
                length = getattr(self, name)
                changes[name] = None if length is None else length * (eps / self.threat.eps or 1)
        return replace(self, **changes)  # type: ignore[type-var]

    @abstractmethod
    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """Run the attack, inside `attacking`; shapes as in `__call__`."""


def _warn_if_blind(defense: Defense, x_adv: Tensor, y: Tensor, sight: Sight) -> None:
    """Warn where many images had no gradient to follow, and the defense is right on them."""
    blind = sight.blind == 1
    if defense.transductive or int(blind.sum()) < ENOUGH:
        return
    # Only a suspicion pays for one more prediction.
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad(), seeded_global_rng(noise, x_adv.device), evaluating(defense):
        right = defense(x_adv, noise).argmax(1) == y
    stuck = int((blind & right).sum())
    if stuck >= ENOUGH:
        kind = "not finite or zero" if bool(sight.nonfinite) else "exactly zero"
        warnings.warn(
            f"the gradient is {kind} for {stuck} of {len(y)} images, which are not misclassified: "
            "this attack cannot move them, and its accuracy says nothing of them. "
            "Auto (`lightning-rob attack`) looks for a way around; Square needs no gradient",
            ZeroGradientWarning,
            stacklevel=4,
        )


def may_leave(defense: Defense) -> bool:
    """Return whether predictions stay the same when other images leave the batch."""
    separable = all(layer.separable for layer in per_image_layers(defense))
    return separable and not defense.transductive


def is_batch_separable(attack: Attack, defense: Defense) -> bool:
    """Whether a batch may be attacked in parts: no result depends on the other images."""
    adapts = any(isinstance(part, _BatchNorm) and part.training for part in defense.modules())
    batch_dependent = adapts or any(part.batch_dependent for part in walk(attack))
    return may_leave(defense) and not batch_dependent
