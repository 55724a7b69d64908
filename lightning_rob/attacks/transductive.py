"""Attacks on adapting defenses: before adaptation, through adaptation, on a part of a batch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_rob.attacks.active_set import rows_of
from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.decorators import AttackDecorator
from lightning_rob.attacks.nested import mapped_arguments, walk
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.randomness import Generator
from lightning_rob.runtime.errors import at_least
from lightning_rob.threat import Threat


@dataclass(frozen=True)
class TransferFromStatic(AttackDecorator):
    """Attack the network before its adaptation to test images (Chen et al. 2022, "AA")."""

    knowledge: ClassVar[str] = "the defense before it adapts"
    ignores_state: ClassVar[bool] = True
    strategies = Attack.strategies  # the attack sees the base model, not this defense

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        return self.attack(defense.base_model, x, y, generator)


@dataclass(frozen=True)
class ThroughAdaptation(AttackDecorator):
    """Let the defense adapt anew to every iterate of the attack (DENT-AA).

    The gradient is that of the adapted network; its weights are treated as constants.
    """

    batch_dependent: ClassVar[bool] = True
    knowledge: ClassVar[str] = f"{Attack.knowledge}, and sees it adapt to every image tried"
    strategies = Attack.strategies  # the attack sees the adapting defense, not this one

    def __post_init__(self) -> None:
        if any(isinstance(part, PartialBatchAttack | FewAttacked) for part in walk(self.attack)):
            raise TypeError("ThroughAdaptation adapts to whole rounds, not to a part of one")

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        return self.attack(_AdaptsToEveryBatch(defense), x, y, generator)


class _AdaptsToEveryBatch(Defense):
    """A defense that adapts to each batch before it predicts."""

    def __init__(self, defense: Defense) -> None:
        super().__init__(torch.ones(1), defense.rule)
        self.defense = defense

    @property
    def transductive(self) -> bool:
        return True

    @property
    def foldable_networks(self) -> list[nn.Module]:
        raise TypeError("an adapting defense copies its network: it has to stay as it is")

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        adapted = self.defense.adapt(x, generator)
        adapted.eval()
        return adapted.logits(x, generator)


@dataclass(frozen=True)
class PartialBatchAttack(AttackDecorator):
    """Attack the last images of a batch only: x~ = [z; attacked] (Goldwasser et al. 2020).

    The place in the batch decides which images are attacked: one batch is one round.

    Args:
        clean: the share in [0, 1] of the batch that is z, its first images.
        natural: the perturbation of z, such as `CommonCorruption`; None leaves z unchanged.
        all_count: whether an error on z is a success of a rehearsal, as in eq. 1 of the paper.
    """

    batch_dependent: ClassVar[bool] = True
    clean: float = 0.5
    natural: Attack | None = None
    all_count: bool = True

    def __post_init__(self) -> None:
        for part in walk(self.attack):
            name = type(part).__name__
            if part.rehearses:
                raise TypeError(
                    f"{name} rehearses whole rounds: write {name}(inner=PartialBatchAttack(…))"
                )
            if isinstance(part, ThroughAdaptation | FewAttacked):
                raise TypeError(f"{name} needs whole rounds: not in a part of a batch")

    @property
    def threat(self) -> Threat:  # type: ignore[override]
        """The attack's threat model; all images within the bounds if that of `natural` differs."""
        if self.natural is None or self.natural.threat == self.attack.threat:
            return self.attack.threat
        low, high = bounds = self.attack.threat.bounds
        return Threat("linf", high - low, bounds)

    def is_clean(self, y: Tensor) -> Tensor:
        """Return which images [B] are z, for labels [B]."""
        return torch.arange(len(y), device=y.device) < round(self.clean * len(y))

    def aimed_at(self, y: Tensor) -> Tensor:
        return super().aimed_at(y) if self.all_count else ~self.is_clean(y)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        x_adv, z = x.clone(), self.is_clean(y)
        for rows, attack in ((z, self.natural), (~z, self.attack)):
            if attack and rows.any():
                noise = rows_of(generator, rows)
                with restricted_to(defense, rows.nonzero()[:, 0]):
                    x_adv[rows] = attack.perturb(defense, x[rows], y[rows], noise)
        return x_adv


@dataclass(frozen=True)
class FewAttacked(AttackDecorator):
    """Attack few images of a round at a time; the others of the round stay clean.

    A defense that recognizes a batch of attacked images may miss one among clean ones. A round is
    played again for every few images, so it adapts that often; each image is scored in the turn in
    which it is attacked. Outside of an evaluation, all images are attacked at once.

    Args:
        attack: on those images; one that rehearses (GMSA) rehearses the whole round.
        images: number of images attacked together.
    """

    batch_dependent: ClassVar[bool] = True
    made_for: ClassVar[tuple[str, ...]] = ("transductive",)
    splits_rounds: ClassVar[bool] = True
    images: int = 1

    def __post_init__(self) -> None:
        at_least(1, images=self.images)
        next(self.turns(2))  # raises for an attack that cannot be on a part of a batch

    def turns(self, images: int) -> Iterator[tuple[Tensor, int, Attack]]:
        everything = torch.arange(images)
        for few in torch.split(everything, self.images):
            clean = everything[~torch.isin(everything, few)]
            share, part = len(clean) / max(images, 1), self.attack
            on_few = partial(PartialBatchAttack, clean=share, all_count=False)
            if part.rehearses:
                part = replace(part, **mapped_arguments(part, on_few))  # type: ignore[type-var]
            else:
                part = on_few(part)
            yield torch.cat([clean, few]), len(few), part

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        return self.attack.perturb(defense, x, y, generator)
