"""Robust accuracy at every validation and test, beside the clean one."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.callbacks.base import checkpoint_position
from lightning_rob.callbacks.image_grid import image_grid
from lightning_rob.callbacks.loggers import log_picture, run_folder, writing_folder
from lightning_rob.callbacks.measurement import Measurement
from lightning_rob.callbacks.progress import console_of
from lightning_rob.defenses import Defense
from lightning_rob.evaluation.evaluator import (
    AttackedBatch,
    EvaluationSettings,
    check_names,
    require_packages,
)
from lightning_rob.evaluation.findings import warn_of
from lightning_rob.evaluation.groups import GROUP_SIZE, Unpack
from lightning_rob.evaluation.images import save_images
from lightning_rob.evaluation.protocol import RoundProtocol
from lightning_rob.evaluation.records import (
    SESSION,
    Result,
    append_records,
    threat_model_card,
    versions,
)
from lightning_rob.evaluation.results import EvaluationResult, worst_measurement
from lightning_rob.evaluation.store import PerImageResults
from lightning_rob.evaluation.suites import RECIPES, suite_kind
from lightning_rob.runtime.identity import attack_spec, cache_key, fingerprint
from lightning_rob.tables import CLEAN, print_table
from lightning_rob.threat import Length, Norm, pixels

LONGEST_NAME = 80  # of a file, in letters, before it says how many more attacks there are


def full_defense(defense: Defense) -> Defense:
    """Return the defense itself."""
    return defense


class RobustEval(Measurement):
    """Attack the module's `defense` and log its accuracy under each attack.

    Logs `{stage}/robust/{attack}` and, over all attacks on the full defense in all callbacks of
    the run, `{stage}/robust/worst`: the accuracy under the strongest attack, chosen for each image;
    where the defense predicts at random it is chosen on other predictions than those that are
    scored (`lightning_rob.evaluation.worst_case`). Images are attacked in groups by index and noise
    is keyed by image, so batch size and number of processes change nothing. The random streams of
    training are not touched.

    A defense that adapts to the test batch is attacked in rounds; "clean" is its accuracy on
    unperturbed images, and "worst" that under the strongest attack as a whole.

    Also logs `{stage}/robust/findings`, the number of warnings and severe findings of the checks
    (`lightning_rob.evaluation.checks`), and `{stage}/robust/blind`, the largest share of images, of
    any attack, on which it had no gradient to follow (`EvaluationResult.blind`). Of each finding it
    warns, and the table and the records have it.

    Args:
        attacks: name -> attack.
        target: function of the module's defense that returns the attacked one, e.g.
            `first_member`. Only attacks on the full defense count in `worst`.
        every_n_epochs: validate robustness in every n-th epoch of `fit`.
        max_images: attack this many images, a random choice by the seed; None attacks all.
        repeats: evaluations with fresh noise, averaged per image.
        inferences: predictions of each image, clean or perturbed once; with more than one the
            table also has the 95 % t interval over these accuracies, the spread that is due to the
            defense's own randomness.
        seed: of the evaluation's noise.
        panel: images to draw for TensorBoard: clean, perturbation, adversarial.
        record: file in the run's folder to which each result is appended as a line of JSON.
        eps: radius of all attacks instead of their own, in pixel units; step sizes keep their
            share of it.
        norm: norm of all attacks instead of their own, with `eps`: "l2" and 128/255.
        protocol: the rounds in which a defense that adapts is attacked; None is `RoundProtocol()`
            for such a defense, and canonical groups for any other.
        save_images: keep the perturbed images in the run's folder, without loss: PNG of those that
            a `Quantized8Bit` attack makes, else float32 arrays.
        private_draws: fresh defenders, each with private randomness of its own, that adapt to the
            same perturbed batch; with more than one the intervals hold that randomness too.
        group_size: images that are attacked together; other sizes may round otherwise.
        unpack: function of a batch that returns (images, labels) or (images, labels, indices),
            images in [0, 1]; None takes batches that are so already.
        preprocess: what is applied to images before a plain network, such as a normalization;
            attacks go through its gradient.
        dataloader_idx: which of several data loaders is evaluated; None refuses several.

    Raises:
        ValueError: no attacks, or a count below 1; when run, several private draws of a defense
            that does not adapt.
    """

    def __init__(
        self,
        attacks: dict[str, Attack],
        target: Callable[[Defense], Defense] = full_defense,
        every_n_epochs: int = 1,
        max_images: int | None = None,
        repeats: int = 1,
        seed: int = 0,
        panel: int = 6,
        record: str = "robust.jsonl",
        eps: Length | None = None,
        norm: Norm | None = None,
        inferences: int = 1,
        protocol: RoundProtocol | None = None,
        save_images: bool = False,
        private_draws: int = 1,
        group_size: int = GROUP_SIZE,
        unpack: Unpack | None = None,
        preprocess: Callable[..., Any] | None = None,
        dataloader_idx: int | None = None,
    ) -> None:
        settings = EvaluationSettings(
            seed, repeats, inferences, private_draws, max_images, group_size, protocol
        )
        self.given = with_threat(attacks, eps, norm)
        check_names(self.given)  # the radius too
        # Of these `attacks` keeps those that no earlier callback of the run runs.
        super().__init__(
            self.given,
            target,
            settings,
            every_n_epochs,
            unpack=unpack,
            preprocess=preprocess,
            dataloader_idx=dataloader_idx,
        )
        self.panel = panel
        self.record = record
        self.save_images = save_images
        self.image_folder: Path | None = None
        self.panels: dict[str, Tensor] = {}
        self.results: list[Result] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop attacks that an earlier callback runs; number names that it uses for another.

        Raises:
            ModuleNotFoundError: an attack needs a package that is not installed.
            ValueError: another callback unpacks or preprocesses the same images otherwise.
        """
        super().setup(trainer, pl_module, stage)
        require_packages(self.attacks.values())
        self.collector(trainer).agree((self.unpack, self.preprocess))
        how = (self.target, self.settings, self.every_n_epochs)
        before = self.attacks
        self.attacks = self.collector(trainer).register(self, self.given, *how)
        for name in self.attacks if trainer.is_global_zero else ():
            if name not in before:
                self._announce_new_name(trainer, name, before)

    def _announce_new_name(self, trainer: Trainer, name: str, before: dict[str, Attack]) -> None:
        """Print the name under which an attack is logged whose own name was taken."""
        threat = self.attacks[name].threat
        taken = next(old for old, attack in before.items() if attack is self.attacks[name])
        other = self.collector(trainer).holder(taken).threat
        radius = "" if threat == other else f", at {threat} instead of {other}"
        console_of(trainer).print(
            f"The name {taken} is taken by an earlier callback: this attack is {name}{radius}.",
            highlight=False,
            soft_wrap=True,
        )

    def due(self, trainer: Trainer) -> bool:
        """Whether this callback evaluates in the current epoch."""
        return bool(self.attacks) and super().due(trainer)

    def begin(self, trainer: Trainer, pl_module: Any) -> RoundProtocol | None:
        """Forget the last evaluation; continue one that was stopped."""
        when = (str(trainer.state.stage), trainer.current_epoch, trainer.global_step)
        self.collector(trainer).announce(self, self.target, when)
        self.panels, self.image_folder = {}, None
        return super().begin(trainer, pl_module)

    def details(
        self, trainer: Trainer, defense: Defense, protocol: RoundProtocol | None
    ) -> dict[str, Any]:
        """Return the fields that every record of this evaluation has."""
        whole = self.defense_of(trainer.lightning_module)
        own = {"target": self._target_name, "plug_in": RECIPES[suite_kind(whole)]}
        return super().details(trainer, defense, protocol) | own

    def store(
        self, trainer: Trainer, pl_module: Any, defense: Defense, details: dict[str, Any]
    ) -> PerImageResults:
        """Return the scores, with those of an evaluation that was stopped."""
        folder = run_folder(trainer)
        place = self._unfinished(trainer, pl_module, defense, details) if folder else None
        names = (CLEAN, *self.attacks)
        joint = self.settings.protocol_for(defense) is not None
        store = PerImageResults(names, self.settings.columns, pl_module.device, place, joint)
        if (counts := store.counts()) and trainer.is_global_zero:
            known = ", ".join(f"{name} {count}" for name, count in counts.items())
            console_of(trainer).print(f"Continuing. Images scored already: {known}.")
        if self.save_images and folder and not trainer.sanity_checking:
            self.image_folder = place or folder / "images"
        return store

    def _unfinished(
        self, trainer: Trainer, pl_module: Any, defense: Defense, details: dict[str, Any]
    ) -> Path | None:
        """The folder in which an evaluation that is killed leaves its scores, to continue."""
        testing = trainer.state.fn in ("test", "validate") and not trainer.sanity_checking
        if not testing or (defense.transductive and defense.stateful):
            return None
        card = self._card(trainer, pl_module, defense, details) | {"stage": trainer.state.fn}
        key = cache_key(attack_code=self.attacks, inputs=[self.unpack, self.preprocess], **card)
        logs: Any = trainer.logger and trainer.logger.save_dir
        return Path(logs or trainer.default_root_dir) / "unfinished" / key

    def _card(
        self, trainer: Trainer, pl_module: Any, defense: Defense, details: dict[str, Any]
    ) -> dict[str, Any]:
        """All that the scores depend on."""
        module: Any = trainer.datamodule  # type: ignore[attr-defined]
        batches = f"{getattr(self.loader, 'batch_size', None)} loaded"
        return {
            "weights": self.collector(trainer).once(self.target, partial(fingerprint, defense)),
            "defense": type(defense).__name__,
            "module": type(pl_module).__name__,
            "rule": attack_spec(defense.rule),
            "target": self._target_name,
            "data": f"{type(module).__name__}, {_count(self.loader)} images",
            "group_size": self.settings.group_size if self.grouped else batches,
            "protocol": details.get("protocol"),
            "save_images": self.save_images,
            "names": list(self.attacks),  # the order of the columns
            "attacks": {name: threat_model_card(attack) for name, attack in self.attacks.items()},
            "versions": versions(),
            "max_images": self.settings.max_images,
            "seed": self.settings.seed,
            **self.settings.repetitions,
        }

    @property
    def _target_name(self) -> str:
        return getattr(self.target, "__name__", repr(self.target))

    def attacked(self, trainer: Trainer, batch: AttackedBatch) -> None:
        """Draw the panel, save the images and advance the progress bar."""
        super().attacked(trainer, batch)
        if batch.x_adv is None or batch.before is None or batch.after is None:
            return  # of an earlier run
        if self.panel and batch.name not in self.panels:
            pictures = (batch.x, batch.x_adv, batch.y, batch.before, batch.after)
            self.panels[batch.name] = image_grid(*(part[: self.panel] for part in pictures))
        if self.image_folder:
            folder = self.image_folder / self._stem(trainer, [batch.name])
            save_images(folder, batch.index, batch.x_adv)

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Log the results, and record them."""
        super().report(trainer, pl_module, stage)
        found = self.result
        assert found is not None
        done, complete = self.collector(trainer).deliver(self.target, found)
        self.results = found.measurements(done[0])
        if any(_same_clean(one, found) for one in done[:-1]):
            del self.results[0]  # the row of an earlier callback
        if complete and self.target is full_defense:
            same = [
                one for one in done if one.details.get("protocol") == found.details.get("protocol")
            ]
            self.results.append(worst_measurement(same))
        # Modules of this package log the clean accuracy of a defense that does not adapt.
        logged = self.target is full_defense and (found.joint or not hasattr(pl_module, "defense"))
        hidden = set() if logged and len(done) == 1 else {CLEAN}  # once, by the first callback
        values = {
            f"{stage}/robust/{r.name}": r.accuracy for r in self.results if r.name not in hidden
        }
        for key, value in values.items():
            self.log_value(pl_module, key, value, prog_bar=key.endswith("/worst"))
        self._log_findings(pl_module, stage, done)
        if hook := getattr(pl_module, "on_robust_evaluation", None):
            hook(values)
        self._save(trainer, pl_module, stage, found)
        self._publish(trainer, stage)

    def _log_findings(self, pl_module: Any, stage: str, done: Sequence[EvaluationResult]) -> None:
        """Log what makes the accuracies of all callbacks so far suspicious, and warn of it."""
        flagged = {one.text: one for found in done for one in found.findings if one.flagged}
        blind = [found.blind(name) for found in done for name in found.attacks]
        self.log_value(pl_module, f"{stage}/robust/findings", float(len(flagged)))
        known = [share for share in blind if not math.isnan(share)]
        self.log_value(pl_module, f"{stage}/robust/blind", max(known, default=0.0))
        assert self.result is not None
        warn_of(self.result.findings)

    def _save(self, trainer: Trainer, pl_module: Any, stage: str, found: EvaluationResult) -> None:
        """Write the scores image by image."""
        assert self.evaluator is not None
        folder = writing_folder(trainer)
        if folder is not None:
            path = _unused(folder / "images" / f"{self._stem(trainer)}.csv")
            defense = self.evaluator.defense
            card = self._card(trainer, pl_module, defense, dict(found.details))
            card |= {"stage": stage, "session": SESSION, **checkpoint_position(trainer)}
            found.save(path, card)
            self.evaluator.store.copy_images(path.parent)
        trainer.strategy.barrier("the record is written")

    def _publish(self, trainer: Trainer, stage: str) -> None:
        if stage == "test":
            self.collector(trainer).rows += self.results
        folder = writing_folder(trainer)
        if folder is None:
            return
        append_records(folder / self.record, (result.record() for result in self.results))
        for name, picture in self.panels.items():
            log_picture(trainer, f"{stage}/adversarial/{name}{self.suffix}", picture)

    def _stem(self, trainer: Trainer, names: Sequence[str] = ()) -> str:
        """The name of a file of this evaluation, without suffix."""
        names = list(names or self.attacks)
        epoch = [f"epoch{trainer.current_epoch:04d}"] if trainer.state.fn == "fit" else []
        often = trainer.val_check_interval
        if epoch and not (isinstance(often, float) and often == 1):  # several in an epoch
            epoch.append(f"step{trainer.global_step:06d}")
        loader = [self.suffix.strip("/")] if self.suffix else []
        target = [self._target_name] if self.target is not full_defense else []
        joined = "+".join(names)
        joined = joined if len(joined) <= LONGEST_NAME else f"{names[0]}+{len(names) - 1}_more"
        return "-".join(["test" if trainer.testing else "val", *epoch, *loader, *target, joined])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Delete the log: all callbacks of the run have finished."""
        if self.evaluator is not None:
            self.evaluator.store.delete()

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Delete the log, and print the table of all callbacks of the run, once."""
        self.on_validation_end(trainer, pl_module)
        rows = self.collector(trainer).take_rows()
        if rows and trainer.is_global_zero:
            defense = self.defense_of(pl_module)
            title = [getattr(pl_module, "method", type(pl_module).__name__)]
            title += [type(defense).__name__] if defense.transductive else []
            title += [f"data loader {self.dataloader_idx}"] if self.suffix else []
            print_table(" · ".join(title), rows, console_of(trainer))


def _same_clean(one: EvaluationResult, other: EvaluationResult) -> bool:
    """Whether both have the same clean images with the same scores."""
    same = torch.equal(one.index, other.index)
    return same and torch.equal(one.scores[:, 0], other.scores[:, 0])


def _unused(path: Path) -> Path:
    """Return the path, numbered if an earlier evaluation of the run has written it."""
    numbered = (path.with_stem(f"{path.stem}-{i}") for i in count(2))
    return next(p for p in chain([path], numbered) if not p.exists())


def with_threat(
    attacks: dict[str, Attack], eps: float | None, norm: Norm | None
) -> dict[str, Attack]:
    """Return the attacks in balls of this radius and norm; None keeps that of each attack.

    Raises:
        ValueError: a norm without a radius.
    """
    if eps is None:
        if norm is not None:
            raise ValueError(f"norm {norm} needs a radius in its units: give eps too")
        return dict(attacks)
    return {name: attack.rescaled(pixels(eps), norm) for name, attack in attacks.items()}


def _count(loader: Any) -> int | str:
    dataset: Any = getattr(loader, "dataset", None)
    return len(dataset) if hasattr(dataset, "__len__") else "unnumbered"
