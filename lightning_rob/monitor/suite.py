"""The attacks that every checkpoint is put to."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer

from lightning_rob.attacks import PGD, Attack, arc_suite
from lightning_rob.callbacks import RobustEval
from lightning_rob.callbacks.measurement import Measurement
from lightning_rob.callbacks.robust_eval import full_defense
from lightning_rob.evaluation.records import Result
from lightning_rob.evaluation.results import worst_measurement, worst_over
from lightning_rob.identity import attack_spec, cache_key
from lightning_rob.objectives import ce_of_mean_logits
from lightning_rob.sweep.points import kept
from lightning_rob.threat import Threat

STEPS, DRAWS, RESTARTS = 20, 10, 5
ADVICE = "name the attacks: --suite callbacks/rec_suite.yaml"


def usual(module: Any) -> RobustEval:
    """Attacks for who names none, in the ball of the training, or else linf 8/255.

    Adaptive PGD on the expected loss, on expected logits and with restarts; ARC as in the paper
    and with two local radii where members answer by chance.

    Raises:
        ValueError: the defense adapts, and no attack is usual for all of those.
    """
    if module.defense.transductive:
        raise ValueError(
            f"a {type(module.defense).__name__} adapts to its attacker: {ADVICE.split(':')[0]} "
            "that rehearse it, such as --suite callbacks/gmsa_avg.yaml"
        )
    trained = getattr(module, "attack", None)
    threat = trained.threat if isinstance(trained, Attack) else Threat("linf", 8 / 255)
    draws = DRAWS if module.defense.kind == "random_transforms" else None
    pgd = PGD(threat, STEPS, threat.eps / 4, draws=draws, random_start=False)
    attacks: dict[str, Attack] = {
        "apgd": pgd,
        "apgd_logits": replace(pgd, objective=ce_of_mean_logits),
        "apgd_restarts": replace(pgd, restarts=RESTARTS, random_start=True),
    }
    if module.defense.kind == "ensemble" and not threat.relative:
        attacks |= arc_suite(threat, STEPS)
    return RobustEval(attacks, panel=0)


class Meanwhile:
    """Does something between two groups of an evaluation, every so many seconds.

    Args:
        act: what is done.
        every: seconds.
    """

    def __init__(self, act: Callable[[], None], every: float) -> None:
        self.act = act
        self.every = every
        self.last = time.monotonic()

    def __call__(self) -> None:
        """Do it if it is time."""
        if time.monotonic() - self.last >= self.every:
            self.act()
            self.last = time.monotonic()


class Suite:
    """Evaluates the weights that the module has, without a word.

    Args:
        trainer: one process on one device.
        module: a `RobustModule`.
        datamodule: the images.
        evaluations: the attacks and their targets; none takes the usual ones.
        others: other callbacks of the trainer.
        settings: what figures depend on beside weights and attacks.

    Raises:
        ValueError: no attack on the whole defense, or several devices.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: Any,
        datamodule: LightningDataModule,
        evaluations: Sequence[RobustEval],
        others: Sequence[Callback],
        settings: dict[str, Any],
    ) -> None:
        if trainer.world_size > 1:
            raise ValueError(f"monitor runs on one device, got {trainer.world_size}")
        self.trainer, self.module, self.datamodule = trainer, module, datamodule
        self.others = list(others)
        evaluations = list(evaluations) or [usual(module)]
        trainer.callbacks = [*others, *evaluations]  # type: ignore[attr-defined]
        for evaluation in evaluations:
            evaluation.setup(trainer, module, "test")  # numbers names that are there twice
        self.evaluations = [Measurement(e.attacks, e.target, e.settings) for e in evaluations]
        if not any(evaluation.target is full_defense for evaluation in evaluations):
            raise ValueError(f"none of the attacks is on the whole defense; {ADVICE}")
        told = [_told(evaluation) for evaluation in evaluations]
        self.key = cache_key(evaluations=told, **settings)

    def take(self, module: Any) -> None:
        """Evaluate another module from now on, by the same attacks on the same images.

        Raises:
            ValueError: these attacks are none for it.
        """
        before, after = (m.defense.transductive for m in (self.module, module))
        if before != after:
            raise ValueError(
                "by its recipe its defense "
                f"{'adapts to its attacker' if after else 'does not adapt'}, unlike that of the "
                "first checkpoint: the same attacks cannot judge both; watch it in its own folder"
            )
        self.module = module

    @property
    def names(self) -> list[str]:
        """The figures that there will be."""
        attacks = [name for evaluation in self.evaluations for name in evaluation.attacks]
        return ["clean", *attacks, "worst"]

    def __call__(self, meanwhile: Callable[[], None]) -> list[Result]:
        """Evaluate the current module; return its numbers, each with per-image scores."""
        for evaluation in self.evaluations:
            evaluation.after_batch = meanwhile
        self.trainer.callbacks = [*self.others, *self.evaluations]  # type: ignore[attr-defined]
        self.trainer.test(self.module, datamodule=self.datamodule, verbose=False)
        found: dict[str, Result] = {}
        full = [e.result for e in self.evaluations if e.target is full_defense and e.result]
        for evaluation in sorted(self.evaluations, key=lambda e: e.target is full_defense):
            assert evaluation.result is not None
            for i, name in enumerate(evaluation.result.names):
                scores = evaluation.result.index, evaluation.result.scores[:, i]
                found[name] = self._kept(evaluation.result.measurement(name), *scores)
        worst = worst_over(full)
        found["worst"] = self._kept(worst_measurement(full), worst.index, worst.scores)
        return [found[name] for name in self.names]

    def _kept(self, result: Result, images: torch.Tensor, scores: torch.Tensor) -> Result:
        """A number with the scores that it is the mean of."""
        return replace(result, details=result.details | kept(self.key, images, scores))


def _told(evaluation: RobustEval) -> dict[str, Any]:
    """All that the numbers of an evaluation depend on."""
    attacks = {name: attack_spec(attack) for name, attack in evaluation.attacks.items()}
    described = {"attacks": attacks, "target": attack_spec(evaluation.target)}
    return described | evaluation.settings.asdict()
