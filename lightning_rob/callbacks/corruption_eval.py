"""Accuracy under common corruptions at validation and test."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning.pytorch import Trainer

from lightning_rob.attacks import Attack
from lightning_rob.callbacks.progress import console_of
from lightning_rob.callbacks.robust_eval import RobustEval
from lightning_rob.defenses import Defense
from lightning_rob.evaluation.corruptions import (
    CORRUPTIONS,
    SEVERITIES,
    common_corruptions,
    corruption_errors,
    corruption_table,
)
from lightning_rob.metrics.corruption_error import ALEXNET_ERRORS, check_reference, corruption_error


def corrupted(defense: Defense) -> Defense:
    """Return the defense itself, as a target apart: `worst` is over attacks on `full_defense`."""
    return defense


class CorruptionEval(RobustEval):
    """Log the accuracy under the corruptions of ImageNet-C (Hendrycks and Dietterich 2019).

    Logs `{stage}/robust/fog_3` and so on, `{stage}/corruption/error`, the mean error over all
    corruptions and severities, and with a reference `{stage}/corruption/mce`. Corruptions are no
    adversary's choice: `{stage}/robust/worst` leaves them out. Images are corrupted as they are
    evaluated, from 32x32 pixels; the published ImageNet-C was also stored as JPEG.

    Args:
        corruptions: their names in `lightning_rob.transforms.corruptions.Corruption`.
        severities: 1 to 5.
        attacks: name -> attack on the corrupted images too, logged as `fog_3_pgd`, and in the table
            of corruptions and severities that a test prints.
        reference: corruption -> mean error of a reference network over the five severities, for
            mCE: on other data than ImageNet, of a network of your own. "alexnet" has the paper's.
        **options: options of `RobustEval`, such as `max_images`.
    """

    alone = True

    def __init__(
        self,
        corruptions: Sequence[str] = CORRUPTIONS,
        severities: Sequence[int] = SEVERITIES,
        reference: Literal["alexnet"] | dict[str, float] | None = None,
        attacks: dict[str, Attack] | None = None,
        **options: Any,
    ) -> None:
        found = common_corruptions(corruptions, severities, attacks)
        super().__init__(found, corrupted, **options)
        self.attack_names = tuple(attacks or {})
        self.corruptions, self.severities = tuple(corruptions), tuple(severities)
        self.reference: Mapping[str, float] | None = (
            ALEXNET_ERRORS if isinstance(reference, str) else reference
        )
        if self.reference is not None:
            check_reference(self.corruptions, {len(self.severities)}, self.reference)
        self.figures: dict[str, float] = {}

    def log_more(self, pl_module: Any, stage: str) -> None:
        assert self.result is not None
        errors = corruption_errors(self.result, self.corruptions, self.severities)
        self.figures = {"error": corruption_error(errors)}
        if self.reference is not None:
            self.figures["mce"] = corruption_error(errors, self.reference)
        for name, value in self.figures.items():
            self.log_value(pl_module, f"{stage}/corruption/{name}", value)

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        super().on_test_end(trainer, pl_module)
        if trainer.is_global_zero:
            assert self.result is not None
            parts = self.corruptions, self.severities, self.attack_names
            console_of(trainer).print(corruption_table(self.result, *parts))
            mce = f", mCE {self.figures['mce']:.1%}" if "mce" in self.figures else ""
            console_of(trainer).print(f"Mean corruption error {self.figures['error']:.1%}{mce}")
