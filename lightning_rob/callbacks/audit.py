"""Audit of a defense at validation and test, beside or instead of other attacks."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rob.audit.auditor import build_report, measure, measures
from lightning_rob.audit.report import Report
from lightning_rob.audit.target import AuditTarget
from lightning_rob.callbacks.base import EvaluationCallback
from lightning_rob.callbacks.images import Images
from lightning_rob.callbacks.loggers import writing_folder
from lightning_rob.callbacks.progress import console_of
from lightning_rob.callbacks.robust_eval import RobustEval, full_defense
from lightning_rob.data.base import labelled_images
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation import RoundProtocol
from lightning_rob.evaluation.evaluator import TRIED
from lightning_rob.evaluation.groups import Batch
from lightning_rob.evaluation.worst import draws_noise
from lightning_rob.metrics import PerImage
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.files import atomic_write_text
from lightning_rob.runtime.processes import gathered
from lightning_rob.threat import Threat


class RobustAudit(EvaluationCallback):
    """Attack the module's `defense` by what fits its kind, and report doubtful accuracies.

    It runs the default attack on such a defense, attacks made for its kind (ARC, EoT with AggMo,
    GMSA, PAA), one without gradients, and checks that show where gradients mislead. It looks at
    the attacks of the `RobustEval` callbacks of the run: was the right one among them?

    Logs `{stage}/audit/{attack}`, `{stage}/audit/worst` and `{stage}/audit/flags`, prints the
    accuracies and the findings after a test, and writes them to `audit.json` in the run's folder.

    Args:
        threat: linf, l2 or l1; None is linf 8/255.
        steps: steps of the default PGD; longer attacks have a multiple of it.
        queries: queries of the Square Attack for each image.
        max_images: number of audited images, a random choice by the seed; None audits all.
        protocol: rounds in which a defense that adapts is attacked; None is `RoundProtocol()`.
        power: test whether each attack finds adversarial images that exist by construction.
        **options: those of `EvaluationCallback`.
    """

    alone = True
    target: AuditTarget  # of the current evaluation
    table: PerImage

    def __init__(
        self,
        threat: Threat | None = None,
        steps: int = 20,
        queries: int = 1000,
        max_images: int | None = 100,
        protocol: RoundProtocol | None = None,
        power: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(None, max_images=max_images, **options)
        self.settings = replace(self.settings, protocol=protocol)
        at_least(1, steps=steps, queries=queries)
        self.threat = threat or Threat()
        self.steps = steps
        self.queries = queries
        self.power = power
        self.found: Report | None = None

    def begin(self, trainer: Trainer, pl_module: Any, loaders: Any) -> Sequence[Images]:
        self.found = None
        protocol = self.settings.protocol_for(self.defense_of(pl_module))
        count = len(self._begin(trainer, pl_module).suite.attacks)
        return [Images(trainer, loaders, self.inputs, self.settings, protocol, count)]

    def before_images(self, trainer: Trainer, pl_module: Any, images: Images) -> None:
        defense = self.defense_of(pl_module)
        random = any(draws_noise(defense, x, index) for x, _, index in images.first(TRIED))
        if any(gathered(random)):
            images.attacks = len(self._begin(trainer, pl_module, random=True).suite.attacks)
            if self.progress:
                self.progress.expect(images.total)

    def _begin(self, trainer: Trainer, pl_module: Any, random: bool = False) -> AuditTarget:
        self.target = target = AuditTarget(
            self.defense_of(pl_module),
            self.threat,
            self.steps,
            self.queries,
            self.settings.seed,
            power=self.power,
            random=random,
        )
        target.other_attacks = {}
        for one in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(one, RobustEval):
                target.other_attacks |= one.attacks if one.target is full_defense else {}
        target.progress = self.advance
        if target.transductive and not trainer.sanity_checking:
            give_source(target.defense, lambda: labelled_images(trainer))
        self.table = PerImage(len(measures(target))).to(pl_module.device)
        return target

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch, images: Images) -> None:
        target, (x, y, index) = self.target, batch
        if trainer.sanity_checking and target.transductive:
            return
        columns = measure(target, x, y, index)
        if not trainer.sanity_checking:
            self.table.update(index, columns)

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        target = self.target
        _, table = self.table.rows()
        columns = dict(zip(measures(target), table.unbind(1), strict=True))
        self.found = found = build_report(target, columns)
        values = {r.name: r.accuracy for r in found.results} | {"flags": float(len(found.flags))}
        for name, value in values.items():
            self.log_value(pl_module, f"{stage}/audit/{name}", value)
        folder = writing_folder(trainer)
        if folder is None:
            return
        atomic_write_text(folder / "audit.json", found.json(self.images[0].metadata))

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.found and trainer.is_global_zero:
            self.found.show(console_of(trainer))
