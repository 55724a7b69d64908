"""Scores of the module's defense under attacks, without log, table or record."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, Trainer

from lightning_rob.attacks import Attack
from lightning_rob.callbacks.base import EvaluationCallback
from lightning_rob.data.base import labelled_images
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation.evaluator import (
    AttackedBatch,
    EvaluationSettings,
    Evaluator,
    check_indices,
)
from lightning_rob.evaluation.groups import Batch
from lightning_rob.evaluation.protocol import RoundProtocol
from lightning_rob.evaluation.results import EvaluationResult
from lightning_rob.evaluation.store import PerImageResults


class Measurement(EvaluationCallback):
    """Score the module's `defense` under attacks and keep the result.

    Args:
        attacks: name -> attack.
        target: function of the module's defense that returns the attacked one.
        settings: seed, number of images and the like.
        every_n_epochs: evaluate in every n-th epoch of `fit`.
        after_batch: called after every group of images.
        inputs: `unpack`, `preprocess` and `dataloader_idx` of `EvaluationCallback`.
    """

    def __init__(
        self,
        attacks: Mapping[str, Attack],
        target: Callable[[Defense], Defense],
        settings: EvaluationSettings,
        every_n_epochs: int = 1,
        after_batch: Callable[[], None] | None = None,
        **inputs: Any,
    ) -> None:
        super().__init__(settings, every_n_epochs, **inputs)
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
        defense = self.target(self.defense_of(pl_module))
        self.result = None
        protocol = self.settings.protocol_for(defense)
        if protocol is not None and not trainer.sanity_checking:
            give_source(defense, lambda: labelled_images(trainer))
        details = self.details(trainer, defense, protocol)
        store = self.store(trainer, pl_module, defense, details)
        attacked = partial(self.attacked, trainer)
        self.evaluator = Evaluator(defense, self.attacks, self.settings, store, attacked, details)
        return protocol

    def details(
        self, trainer: Trainer, defense: Defense, protocol: RoundProtocol | None
    ) -> dict[str, Any]:
        """Return the fields that every record of this evaluation has."""
        stage = "test" if trainer.testing else "val"
        details = self.run_metadata(trainer, stage) | self.settings.repetitions
        if protocol is not None:
            size = protocol.size(self.loader)
            details["protocol"] = protocol.describe(defense, size, trainer.world_size)
            details["group_size"] = size
        return details

    def store(
        self, trainer: Trainer, pl_module: Any, defense: Defense, details: dict[str, Any]
    ) -> PerImageResults | None:
        """Return where the scores are kept; None keeps them in memory."""
        return None

    def attacked(self, trainer: Trainer, batch: AttackedBatch) -> None:
        """Advance the progress bar after an attack on a batch."""
        if self.progress:
            self.progress.advance(batch.name, len(batch.index))

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch) -> None:
        """Score the batch under every attack; a sanity check tries no rounds."""
        assert self.evaluator is not None
        if not (trainer.sanity_checking and self.evaluator.joint):
            self.evaluator.score(*batch, keep=not trainer.sanity_checking)
        if self.after_batch:
            self.after_batch()

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Keep the result."""
        assert self.evaluator is not None
        self.result = self.evaluator.result()
        if self.expected is not None:
            check_indices(self.result, self.expected)


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
