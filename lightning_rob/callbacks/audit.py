"""A look for a false sense of security, beside or instead of other attacks."""

from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_rob.callbacks.evaluation import Evaluation, at_least_one, writing_folder
from lightning_rob.callbacks.game import RoundProtocol
from lightning_rob.callbacks.progress import console_of
from lightning_rob.callbacks.robust_eval import RobustEval, whole
from lightning_rob.data.labelled import give_source
from lightning_rob.evaluation import GROUP_SIZE
from lightning_rob.files import atomic_write_text
from lightning_rob.metrics import PerImage
from lightning_rob.threat import Threat

if TYPE_CHECKING:
    from lightning_rob.audit.case import Subject
    from lightning_rob.audit.page import Report


class RobustAudit(Evaluation):
    """Attack the module's `defense` by what fits its kind, and say what makes figures suspicious.

    It runs the usual attack on such a defense, attacks made for its kind (ARC, EoT with AggMo,
    GMSA, PAA), one without gradients, and checks that show where gradients mislead. It looks at
    the attacks of the `RobustEval` callbacks of the run: was the right one among them?

    Logs `{stage}/audit/{attack}`, `{stage}/audit/worst` and `{stage}/audit/flags`, prints the
    accuracies and the findings after a test, and writes them to `audit.json` in the run's folder.

    Args:
        threat: linf or l2; None is linf 8/255.
        steps: of the usual PGD; longer attacks have a multiple of it.
        queries: of the Square Attack, for each image.
        every_n_epochs: audit every so many epochs of `fit`.
        max_images: audit so many images only, a random choice by the seed; None audits all.
        seed: of the audit's noise.
        protocol: how a defense that adapts is played against; None is `RoundProtocol()`.
        record: file in the run's folder.
        group_size: images that are attacked together; other sizes may round otherwise.

    Raises:
        ValueError: a count below 1, or a threat that there are no attacks for.
    """

    def __init__(
        self,
        threat: Threat | None = None,
        steps: int = 20,
        queries: int = 1000,
        every_n_epochs: int = 1,
        max_images: int | None = 100,
        seed: int = 0,
        protocol: RoundProtocol | None = None,
        record: str = "audit.json",
        group_size: int = GROUP_SIZE,
    ) -> None:
        super().__init__(every_n_epochs, max_images, seed, group_size)
        at_least_one(steps=steps, queries=queries)
        self.threat = threat or Threat()
        self.steps = steps
        self.queries = queries
        self.protocol = protocol or RoundProtocol()
        self.record = record
        self.subject: Subject | None = None
        self.table = PerImage(1)
        self.tried = False
        self.found: Report | None = None

    def rounds(self, pl_module: Any) -> int:
        """Once by each attack."""
        return len(self._subject(pl_module).suite.attacks)

    def begin(self, trainer: Trainer, pl_module: Any) -> None:
        """Forget the last audit."""
        self.subject = self._subject(pl_module)
        self.subject.others = {
            name: attack
            for other in _evaluations(trainer)
            for name, attack in other.attacks.items()
        }
        if self.subject.transductive and not trainer.sanity_checking:
            self.protocol.check(trainer, self.loader, self.positions)
        self.table = PerImage(len(_auditor().columns(self.subject))).to(pl_module.device)
        if self.progress:
            self.subject.tell = self.progress.advance
        self.tried, self.found = False, None

    def attack_batch(
        self, trainer: Trainer, pl_module: Any, x: Tensor, y: Tensor, index: Tensor
    ) -> None:
        """Audit a group of images; before training only try that all of it runs."""
        subject = self.subject
        if subject is None or subject.transductive or (trainer.sanity_checking and self.tried):
            return
        rows = _auditor().rows(subject, x, y, index)
        self.tried = True
        if not trainer.sanity_checking:
            self.table.update(index, rows)

    @property
    def in_rounds(self) -> bool:
        """Whether `finish` audits all images, in the rounds of a game."""
        return self.subject is not None and self.subject.transductive

    def finish(self, trainer: Trainer, pl_module: Any) -> None:
        """Play the rounds if the defense adapts."""
        subject = self.subject
        assert subject is not None
        if subject.transductive:
            give_source(subject.defense, trainer)
            for x, y, index in self.protocol.rounds(trainer, self.loader, self.positions):
                self.table.update(index, _auditor().rows(subject, x, y, index))

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Judge what all processes have seen, log and record it."""
        subject = self.subject
        assert subject is not None
        _, table = self.table.rows()
        seen = dict(zip(_auditor().columns(subject), table.unbind(1), strict=True))
        self.found = found = _auditor().report(subject, seen)
        values = {r.name: r.accuracy for r in found.results} | {"flags": float(len(found.flags))}
        for name, value in values.items():
            pl_module.log(f"{stage}/audit/{name}", value, sync_dist=True)
        folder = writing_folder(trainer)
        if folder is None:
            return
        atomic_write_text(folder / self.record, found.json(self.run_metadata(trainer, stage)))
        if isinstance(trainer.logger, TensorBoardLogger):
            text = found.markdown()
            trainer.logger.experiment.add_text(f"{stage}/audit", text, trainer.global_step)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the accuracies and the findings."""
        if self.found and trainer.is_global_zero:
            self.found.show(console_of(trainer))

    def _subject(self, pl_module: Any) -> "Subject":
        defense = pl_module.defense
        subject: Subject = _auditor().Subject(
            defense, self.threat, self.steps, self.queries, self.seed
        )
        return subject


def _evaluations(trainer: Trainer) -> list[RobustEval]:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    found = [other for other in callbacks if isinstance(other, RobustEval)]
    return [other for other in found if other.target is whole]


def _auditor() -> ModuleType:
    """Imported at its use: it is itself made of parts of this package."""
    from lightning_rob.audit import auditor

    return auditor
