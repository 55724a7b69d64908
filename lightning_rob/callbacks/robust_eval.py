"""Robust accuracy at every validation and test, beside the clean one."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.attacks.base import walk
from lightning_rob.callbacks.base import (
    Batch,
    EvaluationCallback,
    checkpoint_position,
    run_folder,
    writing_folder,
)
from lightning_rob.callbacks.image_grid import image_grid
from lightning_rob.callbacks.progress import console_of
from lightning_rob.data.base import labelled_images
from lightning_rob.defenses import Defense
from lightning_rob.defenses.transductive import give_source
from lightning_rob.evaluation.evaluate import (
    AttackedBatch,
    EvaluationSettings,
    Evaluator,
    check_indices,
    check_names,
)
from lightning_rob.evaluation.groups import GROUP_SIZE
from lightning_rob.evaluation.images import save_images
from lightning_rob.evaluation.per_image import PerImageResults
from lightning_rob.evaluation.protocol import RoundProtocol
from lightning_rob.evaluation.records import (
    Result,
    append_records,
    threat_model_card,
    versions,
)
from lightning_rob.evaluation.results import CLEAN, EvaluationResult, worst_measurement
from lightning_rob.identity import attack_spec, cache_key, fingerprint
from lightning_rob.tables import print_table
from lightning_rob.threat import Norm, pixels

LONGEST_NAME = 80  # of a file, in letters, before it says how many more attacks there are


def full_defense(defense: Defense) -> Defense:
    """Return the defense itself."""
    return defense


class RobustEval(EvaluationCallback):
    """Attack the module's `defense` and log its accuracy under each attack.

    Logs `{stage}/robust/{attack}` and, over all attacks on the full defense in all callbacks of
    the run, `{stage}/robust/worst`: the accuracy under the strongest attack, chosen for each image;
    where the defense predicts at random it is chosen on other predictions than those that are
    scored (`lightning_rob.evaluation.worst_case`). Images are attacked in groups by index and noise
    is keyed by image, so batch size and number of processes change nothing. The random streams of
    training are not touched.

    A defense that adapts to the test batch is attacked in rounds; "clean" is its accuracy on
    unperturbed images, and "worst" that under the strongest attack as a whole.

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
        eps: float | None = None,
        norm: Norm | None = None,
        inferences: int = 1,
        protocol: RoundProtocol | None = None,
        save_images: bool = False,
        private_draws: int = 1,
        group_size: int = GROUP_SIZE,
    ) -> None:
        check_names(attacks)
        settings = EvaluationSettings(
            seed, repeats, inferences, private_draws, max_images, group_size, protocol
        )
        super().__init__(settings, every_n_epochs)
        self.given = with_threat(attacks, eps, norm)
        self.attacks = dict(self.given)  # those that no earlier callback of the run runs
        self.target = target
        self.panel = panel
        self.record = record
        self.save_images = save_images
        self.evaluator: Evaluator | None = None
        self.image_folder: Path | None = None
        self.panels: dict[str, Tensor] = {}
        self.result: EvaluationResult | None = None
        self.results: list[Result] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Drop attacks that an earlier callback runs; number names that it uses for another.

        Raises:
            ModuleNotFoundError: an attack needs a package that is not installed.
        """
        for part in (part for attack in self.attacks.values() for part in walk(attack)):
            part.require_package()
        how = (self.target, self.settings, self.every_n_epochs)
        asked = {name: (attack, *how) for name, attack in self.given.items()}
        kept = self.collector(trainer).register(self, asked)
        before, self.attacks = self.attacks, {name: attack for name, (attack, *_) in kept.items()}
        for name in self.attacks if trainer.is_global_zero else ():
            if name not in before:
                self._announce_new_name(trainer, name, before)

    def _announce_new_name(self, trainer: Trainer, name: str, before: dict[str, Attack]) -> None:
        """Print the name under which an attack is logged whose own name was taken."""
        threat = self.attacks[name].threat
        taken = next(old for old, attack in before.items() if attack is self.attacks[name])
        other = self.collector(trainer).holder(taken)[0].threat
        radius = "" if threat == other else f", at {threat} instead of {other}"
        console_of(trainer).print(
            f"The name {taken} is taken by an earlier callback: this attack is {name}{radius}.",
            highlight=False,
            soft_wrap=True,
        )

    def due(self, trainer: Trainer) -> bool:
        """Whether this callback evaluates in the current epoch."""
        return bool(self.attacks) and super().due(trainer)

    def attack_count(self, pl_module: Any) -> int:
        """Return the number of attacks."""
        return len(self.attacks)

    def begin(self, trainer: Trainer, pl_module: Any) -> RoundProtocol | None:
        """Forget the last evaluation; continue one that was stopped."""
        defense = self.target(pl_module.defense)
        when = (str(trainer.state.stage), trainer.current_epoch, trainer.global_step)
        self.collector(trainer).announce(self, self.target, when)
        protocol = self.settings.protocol_for(defense)
        if protocol is not None and not trainer.sanity_checking:
            give_source(defense, lambda: labelled_images(trainer))
        folder = run_folder(trainer)
        details = self._details(trainer, defense, protocol)
        place = self._unfinished(trainer, pl_module, defense, details) if folder else None
        columns = self.settings.inferences * self.settings.private_draws
        store = PerImageResults((CLEAN, *self.attacks), columns, pl_module.device, place)
        if len(store) and trainer.is_global_zero:
            text = f"Continuing {', '.join(self.attacks)}: {len(store)} images are scored already."
            console_of(trainer).print(text)
        self.image_folder = None
        if self.save_images and folder and not trainer.sanity_checking:
            self.image_folder = place or folder / "images"
        self.panels = {}
        observe = self._observer(trainer)
        self.evaluator = Evaluator(defense, self.attacks, self.settings, store, observe, details)
        return protocol

    def _unfinished(
        self, trainer: Trainer, pl_module: Any, defense: Defense, details: dict[str, Any]
    ) -> Path | None:
        """The folder in which an evaluation that is killed leaves its scores, to continue."""
        testing = trainer.state.fn in ("test", "validate") and not trainer.sanity_checking
        if not testing or (defense.transductive and defense.stateful):
            return None
        card = self._card(trainer, pl_module, defense, details) | {"stage": trainer.state.fn}
        key = cache_key(attack_code=self.attacks, **card)
        logs: Any = trainer.logger and trainer.logger.save_dir
        return Path(logs or trainer.default_root_dir) / "unfinished" / key

    def _details(
        self, trainer: Trainer, defense: Defense, protocol: RoundProtocol | None
    ) -> dict[str, Any]:
        """Return the fields that every record of this evaluation has."""
        stage = "test" if trainer.testing else "val"
        details = self.run_metadata(trainer, stage) | {"target": self._target_name}
        counts = ("repeats", "inferences", "private_draws")
        details |= {name: getattr(self.settings, name) for name in counts}
        if protocol is not None:
            size = protocol.size(self.loader)
            details["protocol"] = protocol.describe(defense, size, trainer.world_size)
            details["group_size"] = size
        return details

    def _card(
        self, trainer: Trainer, pl_module: Any, defense: Defense, details: dict[str, Any]
    ) -> dict[str, Any]:
        """All that the scores depend on."""
        module: Any = trainer.datamodule  # type: ignore[attr-defined]
        batches = f"{self.loader.batch_size} loaded"
        return {
            "weights": self.collector(trainer).once(self.target, partial(fingerprint, defense)),
            "defense": type(defense).__name__,
            "module": type(pl_module).__name__,
            "rule": attack_spec(defense.rule),
            "target": self._target_name,
            "data": f"{type(module).__name__}, {_count(self.loader.dataset)} images",
            "group_size": self.settings.group_size if self.grouped else batches,
            "protocol": details.get("protocol"),
            "save_images": self.save_images,
            "names": list(self.attacks),  # the order of the columns
            "attacks": {name: threat_model_card(attack) for name, attack in self.attacks.items()},
            "versions": versions(),
        } | {
            name: getattr(self.settings, name)
            for name in ("max_images", "seed", "repeats", "inferences", "private_draws")
        }

    @property
    def _target_name(self) -> str:
        return getattr(self.target, "__name__", repr(self.target))

    def _observer(self, trainer: Trainer) -> Callable[[AttackedBatch], None]:
        """Return a function of an attacked batch: progress, a panel, saved images."""
        stage = "test" if trainer.testing else "val"

        def observe(batch: AttackedBatch) -> None:
            if batch.x_adv is not None and batch.before is not None and batch.after is not None:
                if self.panel and batch.name not in self.panels:
                    first = slice(self.panel)
                    pictures = (batch.x, batch.x_adv, batch.y, batch.before, batch.after)
                    self.panels[batch.name] = image_grid(*(part[first] for part in pictures))
                if self.image_folder:
                    folder = self.image_folder / self._stem(stage, trainer, [batch.name])
                    save_images(folder, batch.index, batch.x_adv)
            if self.progress:
                self.progress.advance(batch.name, len(batch.index))

        return observe

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch) -> None:
        """Score the batch under every attack; a sanity check tries no rounds."""
        assert self.evaluator is not None
        if not (trainer.sanity_checking and self.evaluator.joint):
            self.evaluator.score(*batch, keep=not trainer.sanity_checking)

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Log the results, and record them."""
        assert self.evaluator is not None
        self.result = found = self.evaluator.result()
        if self.expected is not None:
            check_indices(found, self.expected)
        done, complete = self.collector(trainer).deliver(self.target, found)
        self.results = found.measurements(done[0])
        if complete and self.target is full_defense:
            same = [
                one for one in done if one.details.get("protocol") == found.details.get("protocol")
            ]
            self.results.append(worst_measurement(same))
        # The clean accuracy of a defense that adapts is nowhere else in the log.
        logged = found.joint and self.target is full_defense
        hidden = set() if logged else {CLEAN}
        values = {
            f"{stage}/robust/{r.name}": r.accuracy for r in self.results if r.name not in hidden
        }
        for key, value in values.items():
            pl_module.log(key, value, sync_dist=True, prog_bar=key.endswith("/worst"))
        if hook := getattr(pl_module, "on_robust_evaluation", None):
            hook(values)
        self._save(trainer, pl_module, stage, found)
        self._publish(trainer, stage)

    def _save(self, trainer: Trainer, pl_module: Any, stage: str, found: EvaluationResult) -> None:
        """Write the scores image by image."""
        assert self.evaluator is not None
        folder = writing_folder(trainer)
        if folder is not None:
            path = folder / "images" / f"{self._stem(stage, trainer)}.csv"
            defense = self.evaluator.defense
            card = self._card(trainer, pl_module, defense, dict(found.details))
            card |= {"stage": stage, **checkpoint_position(trainer)}
            found.save(path, card)
            self.evaluator.store.copy_images(path.parent)
        trainer.strategy.barrier("the record is written")
        self.evaluator.store.delete()

    def _publish(self, trainer: Trainer, stage: str) -> None:
        if stage == "test":
            self.collector(trainer).rows += self.results
        folder = writing_folder(trainer)
        if folder is None:
            return
        append_records(folder / self.record, (result.record() for result in self.results))
        if isinstance(trainer.logger, TensorBoardLogger):
            for name, picture in self.panels.items():
                tag = f"{stage}/adversarial/{name}"
                trainer.logger.experiment.add_image(tag, picture, trainer.global_step)

    def _stem(self, stage: str, trainer: Trainer, names: Sequence[str] = ()) -> str:
        """The name of a file of this evaluation, without suffix."""
        names = list(names or self.attacks)
        epoch = [f"epoch{trainer.current_epoch:04d}"] if trainer.state.fn == "fit" else []
        if epoch and trainer.val_check_interval != 1:  # several validations in an epoch
            epoch.append(f"step{trainer.global_step:06d}")
        target = [self._target_name] if self.target is not full_defense else []
        joined = "+".join(names)
        joined = joined if len(joined) <= LONGEST_NAME else f"{names[0]}+{len(names) - 1}_more"
        return "-".join([stage, *epoch, *target, joined])

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print the table of all callbacks of the run, once."""
        rows = self.collector(trainer).take_rows()
        if rows and trainer.is_global_zero:
            title = [type(pl_module).__name__]
            title += [type(pl_module.defense).__name__] if pl_module.defense.transductive else []
            print_table(" · ".join(title), rows, console_of(trainer))


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


def _count(dataset: Any) -> int | str:
    return len(dataset) if hasattr(dataset, "__len__") else "unnumbered"
