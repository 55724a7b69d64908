"""Robust accuracy at every validation and test, beside the clean one."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, count
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.callbacks.base import EvaluationCallback, with_threat
from lightning_rob.callbacks.images import Images, checkpoint_position
from lightning_rob.callbacks.loggers import image_grid, log_picture, run_folder, writing_folder
from lightning_rob.callbacks.progress import console_of, logs_to_file
from lightning_rob.data.base import labelled_images
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation.evaluator import CHECKED, AttackedBatch, Evaluator
from lightning_rob.evaluation.findings import warn_of
from lightning_rob.evaluation.groups import Batch
from lightning_rob.evaluation.protocol import RoundProtocol
from lightning_rob.evaluation.records import (
    SESSION,
    Result,
    append_records,
    threat_model_card,
    versions,
)
from lightning_rob.evaluation.results import WORST, EvaluationResult, worst_measurement
from lightning_rob.evaluation.store import KNOWN, PerImageResults
from lightning_rob.evaluation.suites import plug_in_for
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.identity import attack_spec, cache_key, fingerprint
from lightning_rob.tables import CLEAN, print_table
from lightning_rob.threat import Length, Norm

LONGEST_NAME = 80  # of a file, in letters, before it says how many more attacks there are


def full_defense(defense: Defense) -> Defense:
    """Return the defense itself; `worst` is over the attacks on this target alone."""
    return defense


class RobustEval(EvaluationCallback):
    """Attack the module's `defense` at validation and test, and log its accuracy under each attack.

    Logs `{stage}/robust/{attack}`; `{stage}/robust/worst`, the accuracy under the strongest of all
    attacks on the full defense in the run (`lightning_rob.evaluation.worst_case`);
    `{stage}/robust/findings`, the number of warnings and severe findings of the checks; and
    `{stage}/robust/blind`, the largest share of images on which an attack had no gradient to follow
    (`EvaluationResult.blind`). `robust.jsonl` in the run's folder has a line for each result.

    Images are attacked in groups by index and noise is keyed by image, so that batch size and
    number of processes change nothing. A defense that adapts to the test batch is attacked in
    rounds; "clean" is its accuracy on unperturbed images.

    The first of several such callbacks evaluates the attacks of all, each in the
    epochs that its own callback asks for, and those of equal target and settings together. It logs,
    records and prints for all of them; its `results` are the rows of the whole table. An attack
    that an earlier callback runs is left out, and a name that it uses for another is numbered.

    Args:
        attacks: name -> attack.
        target: function of the module's defense that returns the attacked one, e.g.
            `first_member`. Only attacks on the full defense count in `worst`.
        repeats: attacks of each image with fresh noise; the scores are averaged.
        inferences: predictions of each image, clean or perturbed once; of more than one the table
            has the 95 % t interval, the spread by the defense's own randomness.
        panel: number of images that are drawn: clean, perturbation, adversarial.
        eps: radius of all attacks instead of their own, in pixel units; step sizes keep their
            share of it.
        norm: norm of all attacks instead of their own, with `eps`: "l2" and 128/255.
        protocol: rounds in which a defense that adapts is attacked; None is `RoundProtocol()` for
            such a defense, and canonical groups for any other.
        private_draws: fresh defenders, each with private randomness of its own, that adapt to the
            same perturbed batch; of more than one the intervals hold that randomness too.
        power: number of images, of each process, on which the attacks are tested: do they find
            adversarial images that exist by construction? See `lightning_rob.audit.power`.
        known_noise: attack a defense that predicts at random once more, by an attacker who knows
            its draws, and log `{stage}/robust/known_noise`; see `EvaluationResult.known_noise`.
        **options: those of `EvaluationCallback`.
    """

    def __init__(
        self,
        attacks: dict[str, Attack],
        target: Callable[[Defense], Defense] = full_defense,
        repeats: int = 1,
        panel: int = 6,
        eps: Length | None = None,
        norm: Norm | None = None,
        inferences: int = 1,
        protocol: RoundProtocol | None = None,
        private_draws: int = 1,
        power: int = 0,
        known_noise: bool = False,
        **options: Any,
    ) -> None:
        at_least(0, power=power)
        super().__init__(with_threat(attacks, eps, norm), **options)
        self.settings = replace(
            self.settings,
            repeats=repeats,
            inferences=inferences,
            private_draws=private_draws,
            protocol=protocol,
            known_noise=known_noise,
        )
        self.target = target
        self.panel = panel
        self.power = power
        self.evaluations: list[TargetEvaluation] = []
        self.result: EvaluationResult | None = None
        self.results: list[Result] = []

    @property
    def conditions(self) -> tuple[Any, ...]:
        return self.target, self.settings, self.every_n_epochs

    def measures(self, name: str) -> bool:
        """Whether a robust accuracy of this name depends on this callback.

        `worst` counts where all attacks on the whole defense run: that of a part of them is higher.
        """
        if name == WORST:
            return self.target is full_defense and bool(self.attacks)
        return name in self.attacks

    def evaluated_for(self, trainer: Trainer) -> Sequence["RobustEval"]:
        """Return all callbacks of this kind if this is the first of them."""
        peers = self.peers(trainer)
        if self not in peers:  # called by another callback
            return [self]
        return peers if peers[0] is self else []

    def begin(self, trainer: Trainer, pl_module: Any, loaders: Any) -> Sequence[Images]:
        """Plan one evaluation for each target and settings; continue those that were stopped."""
        # Attacks on one target with equal settings share the clean predictions.
        together: dict[Hashable, list[RobustEval]] = {}
        for one in self.evaluated_for(trainer):
            one.result, one.results, one.evaluations = None, [], []
            if one.due(trainer):
                how = (one.target, one.settings, one.panel, one.power)
                together.setdefault(how, []).append(one)
        # Other targets see the same images if these come in the same groups or rounds.
        passes: dict[Hashable, Images] = {}
        for callbacks in together.values():
            defense = callbacks[0].target(self.defense_of(pl_module))
            protocol = callbacks[0].settings.protocol_for(defense)
            shared = (callbacks[0].settings, protocol)
            if shared not in passes:
                passes[shared] = Images(trainer, loaders, self.inputs, *shared, attacks=0)
            images = passes[shared]
            if protocol is not None and not trainer.sanity_checking:
                give_source(defense, lambda: labelled_images(trainer))
            self.evaluations.append(TargetEvaluation(callbacks, images, defense, self.advance))
        return list(passes.values())

    def before_images(self, trainer: Trainer, pl_module: Any, images: Images) -> None:
        """Let the same images decide on every process where gradients are taken."""
        if trainer.world_size == 1 or images.positions is None:
            return
        first = images.first(CHECKED)
        for evaluation in self.evaluations:
            for batch in first if evaluation.images is images else ():
                if not evaluation.evaluator.joint:
                    evaluation.evaluator.check(*batch)

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch, images: Images) -> None:
        """Score the batch under every attack; a sanity check tries no rounds."""
        for evaluation in self.evaluations:
            evaluator = evaluation.evaluator
            if evaluation.images is images and not (trainer.sanity_checking and evaluator.joint):
                evaluator.score(*batch, keep=not trainer.sanity_checking)

    def finish_images(self, images: Images) -> None:
        """Gather the scores of all processes, and give them to the callbacks."""
        for evaluation in self.evaluations:
            if evaluation.images is images:
                evaluation.result = images.result(evaluation.evaluator)
                for callback in evaluation.callbacks:
                    callback.result = evaluation.result

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        finished: dict[Hashable, list[EvaluationResult]] = {}
        for evaluation in self.evaluations:
            found = evaluation.result
            same_target = finished.setdefault(evaluation.target, [])
            evaluation.rows = found.measurements(reference=[*same_target, found][0])
            clean = [(one.index.tolist(), one.scores[:, 0].tolist()) for one in same_target]
            if (found.index.tolist(), found.scores[:, 0].tolist()) in clean:
                del evaluation.rows[0]  # the same clean images have one row
            same_target.append(found)
        values: dict[str, float] = {}
        if full := finished.get(full_defense):
            worst = worst_measurement(full)
            next(e for e in self.evaluations if e.result is full[-1]).rows.append(worst)
            # Modules of this package log the clean accuracy of a defense that does not adapt.
            if full[0].joint or not hasattr(pl_module, "defense"):
                values[CLEAN] = full[0].accuracy(CLEAN)
        self.results = [row for evaluation in self.evaluations for row in evaluation.rows]
        # First: whatever a logger or the module's hook raises, the records are there.
        if (folder := writing_folder(trainer)) is not None:
            for evaluation in self.evaluations:
                evaluation.write(folder)
        trainer.strategy.barrier("the records are written")
        values |= {row.name: row.accuracy for row in self.results if row.name != CLEAN}
        for row in self.results:
            values |= {KNOWN: row.details[KNOWN]["accuracy"]} if KNOWN in row.details else {}
        logged = {f"{stage}/robust/{name}": value for name, value in values.items()}
        for key, value in logged.items():
            self.log_value(pl_module, key, value, prog_bar=key.endswith("/worst"))
        results = [evaluation.result for evaluation in self.evaluations]
        flagged = {one.text: one for found in results for one in found.findings if one.flagged}
        blind = [found.blind(name) for found in results for name in found.attacks]
        self.log_value(pl_module, f"{stage}/robust/findings", float(len(flagged)))
        known = [share for share in blind if not math.isnan(share)]
        self.log_value(pl_module, f"{stage}/robust/blind", max(known, default=0.0))
        if not trainer.testing:  # a test prints them below its table
            warn_of(flagged.values())
        if trainer.state.fn == "fit" and logs_to_file(trainer):
            figures = ", ".join(f"{row.name} {100 * row.accuracy:.1f}" for row in self.results)
            print(f"Epoch {trainer.current_epoch}, accuracy in %: {figures}", flush=True)
        for callback in chain(*(evaluation.callbacks for evaluation in self.evaluations)):
            callback.log_more(pl_module, stage)
        if hook := getattr(pl_module, "on_robust_evaluation", None):
            hook(logged)

    def log_more(self, pl_module: Any, stage: str) -> None:
        """Log figures that are computed from `result`; called on every process."""

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for evaluation in self.evaluations:
            evaluation.evaluator.store.log.delete()

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.on_validation_end(trainer, pl_module)
        if self.results and trainer.is_global_zero:
            defense = self.defense_of(pl_module)
            title = [getattr(pl_module, "method", type(pl_module).__name__)]
            title += [type(defense).__name__] if defense.transductive else []
            title += [f"{self.settings.max_images} images, test/acc is of all"] * bool(
                self.settings.max_images
            )
            print_table(" · ".join(title), self.results, console_of(trainer))


class TargetEvaluation:
    """The scores of one target under the attacks of callbacks with equal settings."""

    result: EvaluationResult  # of all processes, once all images are attacked
    rows: list[Result]  # of the table

    def __init__(
        self,
        callbacks: Sequence[RobustEval],
        images: Images,
        defense: Defense,
        advance: Callable[[str, int], None],
    ) -> None:
        self.callbacks, self.images = callbacks, images
        self.defense, self.advance = defense, advance
        self.trainer, self.first, self.settings = images.trainer, callbacks[0], images.settings
        self.attacks = {name: a for one in callbacks for name, a in one.attacks.items()}
        images.attacks += len(self.attacks)
        self.target = self.first.target
        self.target_name = getattr(self.target, "__name__", repr(self.target))
        whole = self.first.defense_of(self.trainer.lightning_module)
        self.details = images.metadata_on(defense)
        self.details |= {"target": self.target_name, "plug_in": plug_in_for(whole)}
        self.panels: dict[str, Tensor] = {}
        store = self._store()
        self.evaluator = Evaluator(
            defense,
            self.attacks,
            self.settings,
            store,
            self.attacked,
            self.details,
            power=self.first.power,
        )

    def _store(self) -> PerImageResults:
        trainer, defense = self.trainer, self.defense
        folder, unfinished = run_folder(trainer), None
        # A fit resumes from its checkpoint; a stateful defense depends on all earlier images.
        testing = trainer.state.fn in ("test", "validate") and not trainer.sanity_checking
        if folder and testing and not (defense.transductive and defense.stateful):
            inputs = [self.first.inputs.unpack, self.first.inputs.preprocess]
            card = self.card | {"stage": trainer.state.fn}
            key = cache_key(attack_code=self.attacks, inputs=inputs, **card)
            logs: Any = trainer.logger and trainer.logger.save_dir
            unfinished = Path(logs or trainer.default_root_dir) / "unfinished" / key
        names, device = (CLEAN, *self.attacks), trainer.lightning_module.device
        store = PerImageResults(names, self.settings.columns, device, unfinished)
        if (counts := store.counts()) and trainer.is_global_zero:
            known = ", ".join(f"{name} {number}" for name, number in counts.items())
            console_of(trainer).print(f"Continuing. Images scored already: {known}.")
        return store

    @cached_property
    def card(self) -> dict[str, Any]:
        """Everything that the scores depend on."""
        module, loader = self.trainer.lightning_module, self.images.loader
        data: Any = self.trainer.datamodule  # type: ignore[attr-defined]
        dataset: Any = getattr(loader, "dataset", None)
        number = len(dataset) if hasattr(dataset, "__len__") else "unnumbered"
        return {
            "weights": fingerprint(self.defense),
            "defense": type(self.defense).__name__,
            "module": type(module).__name__,
            "rule": attack_spec(self.defense.rule),
            "target": self.target_name,
            "data": f"{type(data).__name__}, {number} images",
            "group_size": self.settings.group_size,
            "protocol": self.details.get("protocol"),
            "names": list(self.attacks),  # the order of the columns
            "attacks": {name: threat_model_card(attack) for name, attack in self.attacks.items()},
            "versions": versions(),
            "max_images": self.settings.max_images,
            "seed": self.settings.seed,
            **self.settings.repetitions,
        }

    def attacked(self, batch: AttackedBatch) -> None:
        """Advance the progress bar and draw the panel."""
        self.advance(batch.name, len(batch.index))
        if batch.x_adv is None:
            return  # of an earlier run
        size = self.first.panel
        if size and batch.name not in self.panels:
            self.panels[batch.name] = image_grid(batch.x[:size], batch.x_adv[:size])

    def write(self, folder: Path) -> None:
        """Write the scores image by image, the records and the panels."""
        trainer, stage = self.trainer, self.details["stage"]
        # Another test of the run must not replace the file of the first.
        path = folder / "images" / f"{self.stem}.csv"
        numbered = (path.with_stem(f"{path.stem}-{i}") for i in count(2))
        path = next(p for p in chain([path], numbered) if not p.exists())
        position = checkpoint_position(trainer)
        self.result.save(path, self.card | {"stage": stage, "session": SESSION, **position})
        append_records(folder / "robust.jsonl", (row.record() for row in self.rows))
        for name, picture in self.panels.items():
            log_picture(trainer, f"{stage}/adversarial/{name}", picture)

    @property
    def stem(self) -> str:
        """The name of the file of scores, without its suffix."""
        trainer, (first, *more) = self.trainer, self.attacks
        epoch = [f"epoch{trainer.current_epoch:04d}"] if trainer.state.fn == "fit" else []
        often = trainer.val_check_interval
        if epoch and not (isinstance(often, float) and often == 1):  # several in an epoch
            epoch.append(f"step{trainer.global_step:06d}")
        target = [self.target_name] if self.target is not full_defense else []
        joined = "+".join([first, *more])
        joined = joined if len(joined) <= LONGEST_NAME else f"{first}+{len(more)}_more"
        return "-".join(["test" if trainer.testing else "val", *epoch, *target, joined])
