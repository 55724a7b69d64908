"""Attacks on one sub-model of a transformation ensemble, in the space of its own images."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.strongest import Strongest
from lightning_rob.defenses import Defense, Single, TransformEnsemble, is_transform_ensemble
from lightning_rob.randomness import Generator
from lightning_rob.rules import random_member
from lightning_rob.threat import Threat
from lightning_rob.transforms import Transform


@dataclass(frozen=True)
class TAA(Attack):
    """Attack one sub-model, the target, and hope for the others (Liao et al. 2020, "TAA").

    x_adv = x + undo(inner(t(x)) - t(x)): the inner attack sees the target's network and images as
    this network sees them, and what it adds is carried back. Pixels that a shift has lost keep
    their value, so ball and bounds are the inner attack's. What it would add where a shift has
    filled in could not be carried back, and is hidden from the network: DeepFool, which spends no
    more than it needs, would else fool one digit in seven in place of all. A transformation that
    cannot be undone but has a gradient is attacked through.

    Args:
        inner: how the target is attacked; its threat is the whole attack's.
        target: the target by its transformation's name or its index. None attacks every member
            that can be attacked in turn and keeps, per image, what leaves the fewest members
            right, the earlier target on ties.

    Raises:
        TypeError: when called on a defense that is no `TransformEnsemble`, or with a target that
            can neither be undone nor has a gradient.
        ValueError: when called, there is no such target.
    """

    knowledge: ClassVar[str] = "one sub-model, in its own space, and the predictions of the others"
    inner: Attack
    target: str | int | None = None

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The inner attack's."""
        return self.inner.threat

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        ensemble = transformation_ensemble(defense, self)
        if self.target is not None:
            target = ensemble.place(self.target)
            return attacked_alone(self.inner, ensemble, target, x, y, generator)
        each = Strongest(tuple(TAA(self.inner, i) for i in attackable(ensemble)))
        return each.perturb(counting(ensemble), x, y, generator)


@dataclass(frozen=True)
class OnDifferentiable(Attack):
    """Attack the members with a gradient, all at once and through their transformations.

    Args:
        attack: such as PGD on `expected_ce` or `ce_of_mean_probs`.

    Raises:
        TypeError: when called on a defense that is no `TransformEnsemble`, or on one without such
            members.
    """

    knowledge: ClassVar[str] = "the sub-models that have a gradient"
    attack: Attack

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's own."""
        return self.attack.threat

    def strategies(self, defense: Defense) -> list[tuple[float, Attack]]:
        """Those of the attack on the part with a gradient."""
        chances = self.attack.strategies(self._part(defense))
        return [(p, OnDifferentiable(attack)) for p, attack in chances]

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], inside `attacking`."""
        return self.attack.perturb(self._part(defense), x, y, generator)

    def _part(self, defense: Defense) -> TransformEnsemble:
        ensemble = transformation_ensemble(defense, self)
        kinds = ensemble.transforms.values()
        chosen = [i for i, transform in enumerate(kinds) if transform.differentiable]
        if not chosen:
            raise TypeError(f"no member has a gradient, of {', '.join(ensemble.names)}")
        return ensemble.part(chosen)


def transformation_ensemble(defense: Defense, attack: Attack) -> TransformEnsemble:
    """The defense, checked to be one that such an attack is made for.

    Raises:
        TypeError: it is another.
    """
    if not is_transform_ensemble(defense):
        name, kind = type(attack).__name__, type(defense).__name__
        raise TypeError(f"{name} is an attack on a TransformEnsemble, got {kind}: use PGD")
    return defense


def attackable(ensemble: TransformEnsemble) -> list[int]:
    """The members whose transformation can be undone or has a gradient.

    Raises:
        TypeError: there are none.
    """
    kinds = ensemble.transforms.values()
    found = [i for i, kind in enumerate(kinds) if kind.reversible or kind.differentiable]
    if not found:
        raise TypeError(
            f"none of {', '.join(ensemble.names)} can be undone or has a gradient: attack an "
            "ensemble of other members, and let this one answer (SurrogateTransforms)"
        )
    return found


def attacked_alone(
    inner: Attack,
    ensemble: TransformEnsemble,
    member: int,
    x: Tensor,
    y: Tensor,
    generator: Generator,
) -> Tensor:
    """Images [B, C, H, W] that attack a member in its own space, carried back, inside `attacking`.

    Raises:
        TypeError: its transformation can neither be undone nor has a gradient.
    """
    transform = ensemble.transform(member)
    if member not in attackable(ensemble):
        names = ", ".join(ensemble.names[i] for i in attackable(ensemble))
        raise TypeError(
            f"{ensemble.names[member]} can neither be undone nor has a gradient: attack another "
            f"member, of {names}"
        )
    if not transform.reversible:
        return inner.perturb(ensemble.one(member), x, y, generator)
    with torch.no_grad():
        seen = transform(x)
    target = Single(_Returning(transform, ensemble.members[member]))
    x_adv = inner.perturb(target, seen.clone(), y, generator)
    return inner.threat.apply(transform.undo(x_adv.detach() - seen), x)


class _Returning(nn.Module):
    """A network that sees of images in its space what can be carried back."""

    def __init__(self, transform: Transform, net: nn.Module) -> None:
        super().__init__()
        self.transform = transform
        self.net = net

    def forward(self, z: Tensor) -> Tensor:
        """Logits [B, K] of transformed images [B, C, H, W]."""
        if self.transform.differentiable:
            z = self.transform(self.transform.undo(z))
        logits: Tensor = self.net(z)
        return logits


def counting(ensemble: TransformEnsemble) -> TransformEnsemble:
    """The same, but what it answers is how many members vote for each class: [B, K]."""
    view = ensemble.part(range(len(ensemble.members)))
    view.rule = _votes
    return view


def _votes(logits: Tensor, weights: Tensor) -> Tensor:
    return random_member(logits, torch.ones_like(weights))  # whole numbers: ties are exact
