"""Scores of the module's defense under attacks, without log, table or record."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from lightning.pytorch import Callback, Trainer

from lightning_rob.attacks import Attack
from lightning_rob.callbacks.base import EvaluationCallback
from lightning_rob.callbacks.images import Images, Inputs
from lightning_rob.data.base import labelled_images
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation.evaluator import EvaluationSettings, Evaluator
from lightning_rob.evaluation.groups import Batch
from lightning_rob.evaluation.results import EvaluationResult


class Measurement(EvaluationCallback):
    """Score the module's `defense` under attacks at a test and keep the result."""

    evaluator: Evaluator  # of the current test

    def __init__(
        self,
        attacks: Mapping[str, Attack],
        target: Callable[[Defense], Defense],
        settings: EvaluationSettings,
        inputs: Inputs | None = None,
    ) -> None:
        super().__init__(attacks, **vars(inputs or Inputs()))
        self.settings = settings
        self.target = target
        self.after_batch: Callable[[], None] | None = None
        self.result: EvaluationResult | None = None

    def earlier(self, trainer: Trainer) -> list[Self]:
        """Return no callbacks: measurements share neither names nor a table."""
        return []

    def begin(self, trainer: Trainer, pl_module: Any, loaders: Any) -> Sequence[Images]:
        defense, self.result = self.target(self.defense_of(pl_module)), None
        protocol = self.settings.protocol_for(defense)
        images = Images(trainer, loaders, self.inputs, self.settings, protocol, len(self.attacks))
        if protocol is not None:
            give_source(defense, lambda: labelled_images(trainer))
        self.evaluator = Evaluator(
            defense,
            self.attacks,
            self.settings,
            attacked=lambda batch: self.advance(batch.name, len(batch.index)),
            details=images.metadata_on(defense),
        )
        return [images]

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch, images: Images) -> None:
        self.evaluator.score(*batch)
        if self.after_batch:
            self.after_batch()

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.result = self.images[0].result(self.evaluator)


def measure(
    trainer: Trainer,
    module: Any,
    data: Any,
    others: Sequence[Callback],
    measurements: Sequence[Measurement],
) -> list[EvaluationResult]:
    """Return the results of measurements in one test, beside other callbacks."""
    trainer.callbacks = [*others, *measurements]  # type: ignore[attr-defined]
    trainer.test(module, datamodule=data, verbose=False)
    results = [one.result for one in measurements if one.result is not None]
    if len(results) < len(measurements):
        raise ValueError("no figures came back from processes that were spawned: use strategy ddp")
    return results
