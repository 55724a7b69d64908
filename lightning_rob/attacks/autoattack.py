"""AutoAttack, the suite that ranks robust networks."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from lightning_rob.attacks.active_set import ActiveBatch, derived, positions
from lightning_rob.attacks.apgd import APGD
from lightning_rob.attacks.base import Attack, check_norm, may_leave
from lightning_rob.attacks.budget import PassCount, shared
from lightning_rob.attacks.execution import Work, run_in_chunks
from lightning_rob.attacks.fab import FAB
from lightning_rob.attacks.foreign import ScoreNetwork, scores
from lightning_rob.attacks.pgd import is_certain
from lightning_rob.attacks.square import Square
from lightning_rob.defenses import Defense
from lightning_rob.defenses.per_image import restricted_to
from lightning_rob.objectives import check_logits, expected_ce, expected_dlr
from lightning_rob.randomness import Generator
from lightning_rob.rules import Rule, mean_logits, mean_probs
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.memory import images_at_once
from lightning_rob.threat import Threat

STAGES = {"standard": ("apgd-ce", "apgd-t", "fab-t", "square"), "rand": ("apgd-ce", "apgd-dlr")}
CLASSES = {"apgd-ce": 2, "apgd-dlr": 3, "apgd-t": 4, "fab-t": 2, "square": 2}  # needed
TARGETS = 9  # wrong classes attacked in turn
Version = Literal["standard", "rand", "custom"]


@dataclass(frozen=True)
class AutoAttack(Attack):
    """APGD, FAB and Square Attack, each on the images that are still right (Croce and Hein 2020).

    It attacks a single function: the logits of a single network, the mean logits under the rule
    `mean_logits`, else the log of the mean probabilities. An image that this function gets wrong is
    returned unchanged: AutoAttack cannot judge a defense that predicts by one draw or by vote, on
    which it stops where the defense is still right half of the time. Use ARC or PGD on the expected
    loss there.

    The stages have the settings of the authors' code. Noise is drawn for each image: its result
    does not depend on the batch.

    Args:
        threat: a ball for linf, l2 or l1.
        version: "standard" (APGD-CE, APGD-T, FAB-T, Square with 5,000 queries; for l1 with five
            restarts of APGD-CE and five classes of APGD-T), "rand" (APGD-CE and APGD-DLR on the
            mean gradient of 20 predictions), or "custom". APGD-T, whose loss needs four classes, is
            APGD-DLR for three; for two both versions are without either.
        attacks: the attacks of a "custom" version, in this order and with one restart, else as in
            the standard version: "apgd-ce", "apgd-dlr", "apgd-t", "fab-t", "square".
        batch_size: number of images attacked at a time; None for as many as a CPU's caches hold,
            on other devices for the whole batch. The images that a stage leaves are put together
            for the next: give the evaluation a large `group_size`, and this the size that fills
            the device.
        early_stop: as of `APGD`, where the attacked function is what the defense predicts by.
        passes: forward and backward passes of an image through the attacked function, in place of
            the numbers of steps and queries, whose proportions stay; None leaves these.
    """

    made_for: ClassVar[tuple[str, ...]] = ("ensemble",)
    splits_batches: ClassVar[bool] = True
    stops_on_gradient_logits: ClassVar[bool] = True
    knowledge: ClassVar[str] = "the weights and the predictions; Square uses the predictions alone"
    threat: Threat
    version: Version = "standard"
    attacks: tuple[str, ...] | None = None
    draws: int | None = None
    batch_size: int | None = None
    queries: int = 5000
    early_stop: bool = True
    passes: int | None = None

    def __post_init__(self) -> None:
        attacks = None if self.attacks is None else tuple(self.attacks)
        object.__setattr__(self, "attacks", attacks)
        check_norm(self, math.inf, 2, 1)
        if self.version not in get_args(Version):
            raise ValueError(f"version must be of {get_args(Version)}, got {self.version!r}")
        if (self.version == "custom") != bool(attacks):
            raise ValueError(
                f"attacks are for version 'custom', and it needs some, got {attacks} for "
                f"{self.version!r}"
            )
        if unknown := set(attacks or ()) - set(CLASSES):
            raise ValueError(f"attacks must be of {list(CLASSES)}, got {sorted(unknown)}")
        counts = {"draws": self.draws, "batch_size": self.batch_size, "passes": self.passes}
        at_least(1, queries=self.queries, **counts)

    @property
    def averages(self) -> bool:
        """Whether gradients are means over noise, as in the version "rand"."""
        return super().averages or self.version == "rand"

    def is_made_for(self, suite_kind: str, rule: Rule) -> bool:
        return super().is_made_for(suite_kind, rule) and rule in (mean_logits, mean_probs)

    def cost(self, count: PassCount) -> int:
        function = self._function(count)
        stages = self._stages_within(function)
        return (1 + sum(s.cost(function) + 1 for s in stages)) * count.drawn(self.draws)

    def least(self, count: PassCount) -> int:
        return self._least(self._function(count)) * count.drawn(self.draws)

    def within(self, passes: int, count: PassCount) -> "AutoAttack":
        return replace(self, passes=self.affordable(passes, count) // count.drawn(self.draws))

    def _function(self, count: PassCount) -> PassCount:
        """Return the count of the function that the stages attack."""
        target = MeanPrediction(count.defense, self.draws, count.x.device)
        return PassCount(target, count.x, count.classes)

    def _least(self, function: PassCount) -> int:
        return 1 + sum(s.least(function) + 1 for s in self.stages(function.classes))

    def _stages_within(self, function: PassCount, early_stop: bool = True) -> list[Attack]:
        """Return the stages, of as many steps as the passes allow."""
        stages = self.stages(function.classes, early_stop)
        if self.passes is None:
            return stages
        if self.passes < (least := self._least(function)):
            raise ValueError(f"AutoAttack needs {least} passes or more here, got {self.passes}")
        # One pass predicts the clean image, and one the result of each stage.
        return shared(stages, self.passes - 1 - len(stages), function)

    def perturb(self, defense: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
        target, x_final = MeanPrediction(defense, self.draws, x.device), x.clone()
        left = ActiveBatch(positions(x), x, y.long(), derived(generator, 0))
        clean = self._in_chunks(_logits, target, left, x, left.generator)
        check_logits(clean[None], y)
        left = left.select(clean.argmax(-1) == y)
        count = PassCount(target, x, clean.shape[-1])
        # Images may leave early where the defense itself predicts by this function.
        pooled = defense.rule in (mean_logits, mean_probs) or len(defense.weights) == 1
        leaves = self.early_stop and pooled and is_certain(defense, expected_ce)
        stages = self._stages_within(count, leaves)
        for number, stage in enumerate(stages, 1):
            if not len(left):
                break
            noise = derived(left.generator, number)
            x_adv = self._in_chunks(stage.perturb, target, left, left.x, noise)
            logits = self._in_chunks(_logits, target, left, x_adv, noise)
            # An image that is fooled once leaves: no later stage can lower its accuracy further.
            fooled = logits.argmax(-1) != left.y
            x_final[left.index[fooled]] = x_adv[fooled]
            left = left.select(~fooled)
        return x_final

    def _in_chunks(
        self, work: Work, target: Defense, left: ActiveBatch, x: Tensor, noise: Generator
    ) -> Tensor:
        """Work on `batch_size` of the images [b, C, H, W] at a time, all of them still right."""
        whole = not may_leave(target)  # where images belong together
        size = self.batch_size or (len(x) if whole else images_at_once(x, target))
        with restricted_to(target, left.index):
            return run_in_chunks(work, size, target, x, left.y, noise)

    def stages(self, classes: int, early_stop: bool = True) -> list[Attack]:
        """Return the attacks of this version, APGD with early stopping or without."""
        names = self._names(classes)
        in_l1 = self.threat.p == 1  # the authors' choices for l1
        ce = APGD(
            self.threat,
            restarts=5 if in_l1 and self.version == "standard" else 1,
            draws=20 if self.version == "rand" else None,
            early_stop=early_stop,
        )
        stages = {
            "apgd-ce": ce,
            "apgd-dlr": replace(ce, objective=expected_dlr),
            "apgd-t": APGD(self.threat, targets=5 if in_l1 else TARGETS, early_stop=early_stop),
            "fab-t": FAB(self.threat, targets=TARGETS),
            "square": Square(self.threat, self.queries),
        }
        return [stages[name] for name in names]

    def _names(self, classes: int) -> Sequence[str]:
        names = self.attacks or STAGES[self.version]
        few = next((name for name in names if classes < CLASSES[name]), None)
        if few is None:
            return names
        fitting = tuple(n for n in CLASSES if n in {*names, "apgd-dlr"} and CLASSES[n] <= classes)
        if self.attacks or not fitting:
            raise ValueError(
                f"{few} needs {CLASSES[few]} classes or more, the defense has {classes}: "
                f"give version='custom' and attacks={fitting}"
            )
        return fitting


@torch.no_grad()
def _logits(target: Defense, x: Tensor, y: Tensor, generator: Generator) -> Tensor:
    """Return the logits [b, K] of images [b, C, H, W]."""
    return target.logits(x, generator)[0]


class MeanPrediction(Defense):
    """A defense as the single function that AutoAttack attacks; see `scores`."""

    def __init__(self, defense: Defense, draws: int | None, device: torch.device) -> None:
        super().__init__(torch.ones(1, device=device), mean_logits)
        self.defense = defense
        self.draws = draws

    @property
    def classifiers(self) -> list[nn.Module]:
        # AutoAttack accepts an image by one prediction, also of a random defense.
        return [ScoreNetwork(self.defense, None, self.draws)]

    @property
    def transductive(self) -> bool:
        return self.defense.transductive

    def logits(self, x: Tensor, generator: Generator = None) -> Tensor:
        return scores(self.defense, x, generator, self.draws)[None]
