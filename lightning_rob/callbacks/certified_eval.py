"""Certified accuracy at validation and test, beside attacked accuracies."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rob.callbacks.base import EvaluationCallback
from lightning_rob.callbacks.images import Images
from lightning_rob.callbacks.loggers import writing_folder
from lightning_rob.callbacks.progress import console_of
from lightning_rob.certify import Certificates
from lightning_rob.certify.smoothing import Certifier, new_rows, smoothed_by
from lightning_rob.defenses import Smoothing
from lightning_rob.evaluation.groups import Batch
from lightning_rob.evaluation.records import append_records
from lightning_rob.metrics import PerImage


class CertifiedEval(EvaluationCallback):
    """Certify the module's `defense`, smoothed by Gaussian noise, at validation and test.

    Logs `{stage}/certified/{radius}`, the share of images that are predicted right everywhere
    within each l2 radius, prints the table after a test, and writes it to `certified.jsonl` and the
    certificate of each image to a CSV file in images/ of the run's folder. `result` has the last
    `Certificates`. See `lightning_rob.certify` for the bound and what it holds for.

    Args:
        sigma: standard deviation of the noise in pixel units; None takes that of a `Smoothing`.
        radii: l2 radii in pixel units.
        draws: most draws that bound the probability of an image's class.
        failure: probability that the radius of an image is too large.
        max_images: number of images, a random choice by the seed; None certifies all.
        **options: those of `EvaluationCallback`.
    """

    alone = True
    smoothed: Smoothing  # of the current evaluation
    rows: PerImage

    def __init__(
        self,
        sigma: float | None = None,
        radii: Sequence[float] = (0.0, 0.25, 0.5, 1.0),
        draws: int = 1000,
        failure: float = 0.001,
        max_images: int | None = 100,
        **options: Any,
    ) -> None:
        super().__init__(None, max_images=max_images, **options)
        self.sigma, self.radii = sigma, tuple(radii)
        self.certifier = Certifier(draws, failure, self.radii, self.settings.seed)
        self.result: Certificates | None = None

    def begin(self, trainer: Trainer, pl_module: Any, loaders: Any) -> Sequence[Images]:
        self.smoothed, self.result = smoothed_by(self.defense_of(pl_module), self.sigma), None
        device = pl_module.device
        self.rows = new_rows().to("cpu" if device.type == "mps" else device)  # it has no float64
        return [Images(trainer, loaders, self.inputs, self.settings)]

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch, images: Images) -> None:
        """Certify the images of the batch; a sanity check tries a few draws."""
        certifier = self.certifier
        if trainer.sanity_checking:
            certifier = replace(certifier, draws=1)
        x, y, index = batch
        columns = certifier(self.smoothed, x, y, index)
        if not trainer.sanity_checking:
            self.rows.update(index, columns.to(self.rows.device))
            self.advance("certify", len(x))

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.result = found = self.certifier.certificates(self.smoothed.sigma, self.rows)
        for radius in self.radii:
            self.log_value(pl_module, f"{stage}/certified/{radius:g}", found.certified(radius))
        folder = writing_folder(trainer)
        if folder is None:
            return
        details = self.images[0].metadata
        append_records(folder / "certified.jsonl", [found.record(self.radii) | details])
        epoch = f"-epoch{trainer.current_epoch:04d}" if trainer.state.fn == "fit" else ""
        found.save(folder / "images" / f"{stage}{epoch}-certified.csv")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.result is not None and trainer.is_global_zero:
            console_of(trainer).print(self.result.table(self.radii), highlight=False)
