"""`lightning-rob attack`: attack a checkpoint by what its defense calls for."""

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_rob.commands.audit import RadiusConfig, audited_threat
from lightning_rob.commands.config import at_least

if TYPE_CHECKING:
    from lightning_rob.commands.base import Run


@dataclass(frozen=True)
class AttackConfig(RadiusConfig):
    """Attack a checkpoint by what its defense calls for, and show what was tried.

    Finds what hides gradients, compares surrogates and objectives on images that
    still stand, and attacks all images by the best. The attack that was found is
    written into the run's folder as a plug-in, which runs alone.

      lightning-rob attack last.ckpt --eps 8/255

    Args:
        eps: radius in pixel units, images span [0, 1]; else that of the training
        norm: linf, l2 or l1; else that of the training
        images: N test images, a random choice
        passes: forward and backward passes of an image, at most; else 2000, or 4000 in l1, for
            each network of an ensemble
        seed: of all noise, and of the choice of images
    """

    images: int = 100
    passes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, images=self.images, passes=self.passes)
        at_least(0, seed=self.seed)


def run(config: AttackConfig, built: "Run") -> None:
    """Attack the images; print the table, the trail and the attack that was found."""
    from lightning_rob.attacks import Auto
    from lightning_rob.attacks.auto import usual_passes
    from lightning_rob.callbacks import RobustEval
    from lightning_rob.callbacks.loggers import writing_folder
    from lightning_rob.runtime.files import atomic_write_text

    threat, reason = audited_threat(config, built.model)
    auto = Auto(threat, config.passes or 2 * usual_passes(built.defense, threat)).noting()
    chosen = {"max_images": config.images, "seed": config.seed, **vars(built.inputs)}
    built.test_with(callback := RobustEval({"auto": auto}, **chosen))
    # First what an interrupted run has found, whose batches are not searched again.
    log = callback.evaluations[0].evaluator.store.log
    found = [noted["found"] for noted in log.notes.get("auto", ()) if "found" in noted]
    found += [result.shown for result in auto.results or ()]
    if built.trainer.is_global_zero and found:
        print(f"Radius: {threat}, {reason}")
        if len(found) > 1:
            print(f"Of the first of {len(found)} batches, which were searched one by one:")
        tried, recipe, attack = found[0]
        print(tried)
        if folder := writing_folder(built.trainer):
            atomic_write_text(folder / "found.yaml", recipe)
            print(f"As a plug-in: --trainer.callbacks+={shlex.quote(str(folder / 'found.yaml'))}")
        print(f"In Python: {attack}")
