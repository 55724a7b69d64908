"""Scores without log, table or record, for commands that evaluate the same attacks many times."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_rob.attacks import Attack
from lightning_rob.callbacks.base import Batch, EvaluationCallback
from lightning_rob.data.base import labelled_images
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation import (
    EvaluationResult,
    EvaluationSettings,
    Evaluator,
    RoundProtocol,
)
from lightning_rob.evaluation.evaluate import AttackedBatch, check_indices


class Measurement(EvaluationCallback):
    """Score the module's `defense` under attacks and keep the result.

    Args:
        attacks: name -> attack.
        target: function of the module's defense that returns the attacked one.
        settings: seed, number of images and the like.
        after_batch: called after every group of images.
    """

    def __init__(
        self,
        attacks: Mapping[str, Attack],
        target: Callable[[Defense], Defense],
        settings: EvaluationSettings,
        after_batch: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(settings)
        self.attacks = dict(attacks)
        self.target = target
        self.after_batch = after_batch
        self.evaluator: Evaluator | None = None
        self.result: EvaluationResult | None = None

    def attack_count(self, pl_module: Any) -> int:
        """Return the number of attacks."""
        return len(self.attacks)

    def begin(self, trainer: Trainer, pl_module: Any) -> RoundProtocol | None:
        """Start a new evaluation."""
        defense = self.target(pl_module.defense)
        self.result = None
        protocol = self.settings.protocol_for(defense)
        if protocol is not None:
            give_source(defense, lambda: labelled_images(trainer))
        details = self.run_metadata(trainer, "test")
        counts = ("repeats", "inferences", "private_draws")
        details |= {name: getattr(self.settings, name) for name in counts}
        if protocol is not None:
            size = protocol.size(self.loader)
            described = protocol.describe(defense, size, trainer.world_size)
            details |= {"protocol": described, "group_size": size}
        self.evaluator = Evaluator(
            defense, self.attacks, self.settings, attacked=self._advance, details=details
        )
        return protocol

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch) -> None:
        """Score the batch under every attack."""
        assert self.evaluator is not None
        self.evaluator.score(*batch)
        if self.after_batch:
            self.after_batch()

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Keep the result."""
        assert self.evaluator is not None
        self.result = self.evaluator.result()
        if self.expected is not None:
            check_indices(self.result, self.expected)

    def _advance(self, batch: AttackedBatch) -> None:
        if self.progress:
            self.progress.advance(batch.name, len(batch.index))


def measure(
    trainer: Trainer,
    module: Any,
    data: Any,
    others: Sequence[Callback],
    measurements: Sequence[Measurement],
) -> list[EvaluationResult]:
    """Return the results of measurements in one test, beside other callbacks.

    Raises:
        ValueError: none came back.
    """
    trainer.callbacks = [*others, *measurements]  # type: ignore[attr-defined]
    trainer.test(module, datamodule=data, verbose=False)
    results = [one.result for one in measurements if one.result is not None]
    if len(results) < len(measurements):
        raise ValueError("no figures came back from processes that were spawned: use strategy ddp")
    return results
