"""Robust accuracy at every validation and test, beside the clean one."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_rob.attacks import Attack, AutoAttack
from lightning_rob.attacks.base import parts
from lightning_rob.callbacks.evaluation import (
    Evaluation,
    at_least_one,
    checkpoint_position,
    deduplicate_names,
    run_folder,
    with_radius,
    writing_folder,
)
from lightning_rob.callbacks.game import RoundProtocol
from lightning_rob.callbacks.panels import panel as draw
from lightning_rob.callbacks.progress import console_of
from lightning_rob.callbacks.protocol import AttackerDefenderSession, NoAttack, answers
from lightning_rob.data.labelled import give_source
from lightning_rob.defenses import Defense
from lightning_rob.defenses.learning import listener
from lightning_rob.evaluation import GROUP_SIZE, is_random, worst_case
from lightning_rob.evaluation.images import save_images
from lightning_rob.evaluation.per_image import BatchOutcome, PerImageResults, predicted_class
from lightning_rob.evaluation.records import (
    Result,
    append_records,
    measured,
    threat_model_card,
    versions,
)
from lightning_rob.identity import attack_spec, cache_key, fingerprint
from lightning_rob.metrics import paired, robust_accuracy, student
from lightning_rob.randomness import Streams
from lightning_rob.tables import print_table

TRIED = 8  # images of each group that are predicted twice, to see whether there is chance in it
LONGEST_NAME = 80  # of a file, in letters, before it says how many more attacks there are


def whole(defense: Defense) -> Defense:
    """The defense itself."""
    return defense


class RobustEval(Evaluation):
    """Attack the module's `defense` and log how often it is still right.

    Logs `{stage}/robust/{attack}` and, over all attacks on the same target in all callbacks of
    the run, `{stage}/robust/worst`: the accuracy under the strongest attack, chosen for each image;
    where the defense predicts at random it is chosen on other predictions than those that count
    (`lightning_rob.evaluation.worst_case`). Images are attacked in groups by index and noise is
    keyed by image, so batch size and number of processes change nothing; training is not touched.

    A defense that adapts to the test batch is played against in rounds; "clean" is its accuracy on
    untouched images, and "worst" that under the strongest attack as a whole.

    Args:
        attacks: name -> attack.
        target: what is attacked, made of the module's defense, e.g. `first_member`. Only attacks
            on the whole defense count in `worst`.
        every_n_epochs: validate robustness every so many epochs of `fit`.
        max_images: attack so many images only, a random choice by the seed; None attacks all.
        repeats: evaluations with fresh noise, averaged per image.
        inferences: how often the defense answers each image, clean or perturbed once; with more
            than one the table also has the 95 % t interval over these accuracies, which tells how
            much is the defense's own chance.
        seed: of the evaluation's noise.
        panel: how many images to draw for TensorBoard: clean, perturbation, adversarial.
        record: file in the run's folder to which each result is appended as a line of JSON.
        eps: radius of all attacks instead of their own, in pixel units; the steps of PGD and ARC
            keep their share of it.
        protocol: the rounds in which a defense that adapts is attacked; None is `RoundProtocol()`
            for such a defense, and batch by batch for any other.
        save_images: keep the perturbed images in the run's folder, without loss: PNG of those an
            `Quantized8Bit` attack makes, else float32 arrays.
        private_draws: how many fresh defenders, each with private randomness of its own, adapt to
            the same perturbed batch; with more than one the intervals hold that randomness too.
        group_size: images that are attacked together; other sizes may round otherwise.

    Raises:
        ValueError: no attacks, or a count below 1; when run, several private draws of a defense
            that does not adapt.
    """

    def __init__(
        self,
        attacks: dict[str, Attack],
        target: Callable[[Defense], Defense] = whole,
        every_n_epochs: int = 1,
        max_images: int | None = None,
        repeats: int = 1,
        seed: int = 0,
        panel: int = 6,
        record: str = "robust.jsonl",
        eps: float | None = None,
        inferences: int = 1,
        protocol: RoundProtocol | None = None,
        save_images: bool = False,
        private_draws: int = 1,
        group_size: int = GROUP_SIZE,
    ) -> None:
        if not attacks:
            raise ValueError("attacks must name at least one attack, got an empty dict")
        if taken := {"clean", "worst"} & set(attacks):
            raise ValueError(
                f"no attack can be called {taken.pop()!r}: that row has another meaning"
            )
        super().__init__(every_n_epochs, max_images, seed, group_size)
        at_least_one(repeats=repeats, inferences=inferences, private_draws=private_draws)
        self.attacks = with_radius(attacks, eps)
        self.target = target
        self.repeats = repeats
        self.inferences = inferences
        self.panel = panel
        self.record = record
        self.protocol = protocol
        self.save_images = save_images
        self.private_draws = private_draws
        self.random: bool | None = None
        self.playing: RoundProtocol | None = None
        self.matches: dict[tuple[str, int], AttackerDefenderSession] = {}
        self.folder: Path | None = None
        self.book = PerImageResults(("clean", *attacks), inferences * private_draws)
        self.seconds = dict.fromkeys(attacks, 0.0)
        self.panels: dict[str, Tensor] = {}
        self.results: list[Result] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run once what is there twice; number a name that another attack in the run has.

        Raises:
            ModuleNotFoundError: an attack needs a package that is not installed.
        """
        for part in (part for attack in self.attacks.values() for part in parts(attack)):
            if isinstance(part, AutoAttack):
                part.require_package()
        earlier: dict[str, Any] = {}
        for other in _siblings(trainer):
            images = (other.max_images, other.seed, other.group_size)
            counts = (other.repeats, other.inferences, other.private_draws)
            how = (other.target, other.protocol, *images, *counts)
            games = {k: (attack, *how) for k, attack in other.attacks.items()}
            if other is self:
                self.attacks = {k: game[0] for k, game in deduplicate_names(games, earlier).items()}
                return
            earlier |= games

    def due(self, trainer: Trainer) -> bool:
        """Whether this epoch's evaluation is one of ours."""
        return bool(self.attacks) and super().due(trainer)

    def rounds(self, pl_module: Any) -> int:
        """Once by each attack."""
        return len(self.attacks)

    def begin(self, trainer: Trainer, pl_module: Any) -> None:
        """Forget the last evaluation; find what is left of one that was stopped."""
        defense = self.target(pl_module.defense)
        self.playing = self.protocol or (RoundProtocol() if defense.transductive else None)
        if self.playing and not trainer.sanity_checking:
            self.playing.check(trainer, self.loader, self.positions)
        if self.private_draws > 1 and not defense.transductive:
            raise ValueError(
                f"private_draws is for defenses that adapt, {type(defense).__name__} does not: "
                "leave it out; where a defense predicts at random give inferences=10"
            )
        self.random = None
        self.matches = {}
        self.folder = run_folder(trainer)
        place = self._journal_place(trainer, pl_module, defense)
        columns = self.inferences * self.private_draws
        self.book = PerImageResults(("clean", *self.attacks), columns, pl_module.device, place)
        self.seconds = dict.fromkeys(self.attacks, 0.0)
        if self.book.log:  # and something in it
            self.seconds |= self.book.log.seconds(self.attacks)
            if trainer.is_global_zero:
                known = len(self.book.log)
                text = f"Going on with {', '.join(self.attacks)}: {known} images are known already."
                console_of(trainer).print(text)
        self.panels = {}

    def _journal_place(self, trainer: Trainer, pl_module: Any, defense: Defense) -> Path | None:
        """Where an evaluation that is killed leaves what it found, if it could go on from there."""
        going_on = trainer.state.fn in ("test", "validate") and not trainer.sanity_checking
        if not going_on or self.folder is None or (self.playing and defense.stateful):
            return None
        told = self._told(trainer, pl_module, defense) | {"stage": trainer.state.fn}
        logs: Any = trainer.logger and trainer.logger.save_dir
        return (
            Path(logs or trainer.default_root_dir)
            / "unfinished"
            / cache_key(attack_code=self.attacks, **told)
        )

    def _told(self, trainer: Trainer, pl_module: Any, defense: Defense) -> dict[str, Any]:
        """The card: all that the rows depend on."""
        module: Any = trainer.datamodule  # type: ignore[attr-defined]
        return {
            "weights": fingerprint(defense),
            "defense": type(defense).__name__,
            "module": type(pl_module).__name__,
            "rule": attack_spec(defense.rule),
            "target": self._target_name,
            "data": f"{type(module).__name__}, {_count(self.loader.dataset)} images",
            "max_images": self.max_images,
            "group_size": self.group_size if self.grouped else f"{self.loader.batch_size} loaded",
            "seed": self.seed,
            "repeats": self.repeats,
            "inferences": self.inferences,
            "private_draws": self.private_draws,
            "save_images": self.save_images,
            "protocol": self.playing
            and self.playing.record(defense, self.loader, trainer.world_size),
            "attacks": {name: threat_model_card(attack) for name, attack in self.attacks.items()},
            "versions": versions(),
        }

    @property
    def _target_name(self) -> str:
        return getattr(self.target, "__name__", repr(self.target))

    def on_test_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Print the table of all callbacks once they are through."""
        siblings = _siblings(trainer)
        if siblings[-1:] == [self] and trainer.is_global_zero:
            title = [type(pl_module).__name__]
            title += [type(pl_module.defense).__name__] if pl_module.defense.transductive else []
            results = [r for s in siblings for r in s.results]
            print_table(" · ".join(title), results, console_of(trainer))

    def attack_batch(
        self, trainer: Trainer, pl_module: Any, x: Tensor, y: Tensor, index: Tensor
    ) -> None:
        """Score the batch under every attack, unless it is a game that comes later."""
        if self.playing is not None:
            return
        defense = self.target(pl_module.defense)
        self.random = self.random or is_random(defense, x[:TRIED], index[:TRIED])
        if not self._recalled(x, y, index):
            noise = Streams.from_index(
                index, self.seed, 0, 2
            )  # that of the first repeat of each attack
            clean = answers(defense, x, noise, self.inferences)
            self._score_all(trainer, defense, clean, (x, y, index))

    @property
    def in_rounds(self) -> bool:
        """Whether `finish` evaluates all images, in the rounds of a game."""
        return self.playing is not None

    def finish(self, trainer: Trainer, pl_module: Any) -> None:
        """Play the rounds, if it is a game; agree with all processes on what was seen."""
        self.random = _on_any(trainer, self.random)
        if self.playing is None:
            return
        defense = self.target(pl_module.defense)
        give_source(defense, trainer)
        nothing = NoAttack(next(iter(self.attacks.values())).threat)
        untouched = self._new_match(nothing, defense, self.seed, repeat=0)
        token = listener.set(self.progress.tell if self.progress and self.progress.rich else None)
        try:
            for x, y, index in self.playing.rounds(trainer, self.loader, self.positions):
                if self._recalled(x, y, index):
                    continue
                _, clean = untouched.round(x, y, index, self.inferences)
                self._score_all(trainer, defense, clean, (x, y, index))
        finally:
            listener.reset(token)
        self.matches = {}

    def _recalled(self, x: Tensor, y: Tensor, index: Tensor) -> bool:
        """Whether the batch was evaluated before the evaluation was stopped."""
        known = self.book.load_cached(x, y, index)
        if known and self.progress:
            for name in self.attacks:
                self.progress.advance(name, len(x))
        return known

    def _score_all(
        self,
        trainer: Trainer,
        defense: Defense,
        clean: Tensor,
        batch: tuple[Tensor, Tensor, Tensor],
    ) -> None:
        """Score the answers to the clean batch [R, B, K], and the batch under every attack."""
        x, y, index = batch
        before = list(self.seconds.values())
        scores = torch.stack([robust_accuracy(answer, y) for answer in clean], 1)
        outcomes = [BatchOutcome(scores, predicted_class(clean[0]), torch.zeros_like(scores[:, 0]))]
        for name, attack in self.attacks.items():
            outcomes.append(self._score(trainer, name, attack, defense, clean[0], batch))
        if not trainer.sanity_checking:
            taken = [now - then for now, then in zip(self.seconds.values(), before, strict=True)]
            self.book.add_batch(x, y, index, outcomes, taken)

    def _score(
        self,
        trainer: Trainer,
        name: str,
        attack: Attack,
        defense: Defense,
        clean: Tensor,
        batch: tuple[Tensor, Tensor, Tensor],
    ) -> BatchOutcome:
        """What became of the batch, scores averaged over repeats."""
        x, y, index = batch
        columns = self.inferences * self.private_draws
        began, total = time.perf_counter(), torch.zeros(len(x), columns, device=x.device)
        for repeat in range(self.repeats):
            match = self._match(name, attack, defense, repeat)
            x_adv, found = match.round(x, y, index, self.inferences)
            total += torch.stack([robust_accuracy(answer, y) for answer in found], 1)
        if self.panel and name not in self.panels:
            part = slice(self.panel)
            self.panels[name] = draw(x[part], x_adv[part], y[part], clean[part], found[0][part])
        if self.save_images and self.folder and not trainer.sanity_checking:
            stage = "test" if trainer.testing else "val"
            place = self.book.folder or self.folder / "images"
            save_images(place / self._stem(stage, trainer, [name]), index, x_adv)
        if self.progress:
            self.progress.advance(name, len(x))
        self.seconds[name] += time.perf_counter() - began
        sizes = attack.threat.distance(x_adv, x)
        return BatchOutcome(total / self.repeats, predicted_class(found[0]), sizes)

    def _match(
        self, name: str, attack: Attack, defense: Defense, repeat: int
    ) -> AttackerDefenderSession:
        """A new match, or in a game the one that is going on."""
        keys = (self.seed, repeat, *name.encode())
        if self.playing is None:
            return self._new_match(attack, defense, *keys, repeat=repeat)
        if (name, repeat) not in self.matches:
            new = self._new_match(attack, defense, *keys, repeat=repeat)
            self.matches[name, repeat] = new
        return self.matches[name, repeat]

    def _new_match(
        self, attack: Attack, defense: Defense, *keys: int, repeat: int
    ) -> AttackerDefenderSession:
        """A match whose defender has the same private randomness under every attack."""
        attacker_sees_state = self.playing is not None and self.playing.attacker_sees_state
        private = (self.seed, repeat)
        draws = self.private_draws
        return AttackerDefenderSession(
            attack,
            defense,
            *keys,
            private=private,
            draws=draws,
            attacker_sees_state=attacker_sees_state,
        )

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Log what was found, and record it."""
        self._check_indices()
        defense = self.target(pl_module.defense)
        shared = self._circumstances(trainer, stage, defense)
        self.results = results = self._results(trainer, shared) + self._worst(trainer, shared)
        # What a defense that adapts makes of clean images is nowhere else in the log.
        untold = {"clean"} if self.playing is None or self.target is not whole else set()
        values = {f"{stage}/robust/{r.name}": r.accuracy for r in results if r.name not in untold}
        for key, value in values.items():
            pl_module.log(key, value, sync_dist=True, prog_bar=key.endswith("/worst"))
        hook = getattr(pl_module, "on_robust_evaluation", None)
        if hook:
            hook(values)
        self._keep(trainer, pl_module, stage, defense)
        self._publish(trainer, stage, results)

    def _check_indices(self) -> None:
        """Raise ValueError where several images have the same index: one would count for all."""
        found = len(self.book.means()[0])
        if self.expected is not None and found < self.expected:
            raise ValueError(
                f"{self.expected} images have {found} different indices: give each image of a data "
                "set an index of its own, by which its scores and its noise are kept"
            )

    def _keep(self, trainer: Trainer, pl_module: Any, stage: str, defense: Defense) -> None:
        """The record image by image."""
        folder = writing_folder(trainer)
        path = folder and folder / "images" / f"{self._stem(stage, trainer)}.csv"
        card = self._told(trainer, pl_module, defense)
        card |= {"stage": stage, **checkpoint_position(trainer), "random": self.random}
        worst = worst_case([self.scores()], bool(self.random), joint=self.playing is not None)
        card["worst"] = worst.choice
        self.book.write(path, len(defense.weights), card, worst.scores.mean(1))
        trainer.strategy.barrier("the record is written")
        self.book.delete()

    def _stem(self, stage: str, trainer: Trainer, names: Sequence[str] = ()) -> str:
        """What a file of this evaluation is called."""
        names = list(names or self.attacks)
        epoch = [f"epoch{trainer.current_epoch:04d}"] if trainer.state.fn == "fit" else []
        if epoch and trainer.val_check_interval != 1:  # several validations in an epoch
            epoch.append(f"step{trainer.global_step:06d}")
        target = [self._target_name] if self.target is not whole else []
        told = "+".join(names)
        told = told if len(told) <= LONGEST_NAME else f"{names[0]}+{len(names) - 1}_more"
        return "-".join([stage, *epoch, *target, told])

    def _circumstances(self, trainer: Trainer, stage: str, defense: Defense) -> dict[str, Any]:
        shared = self.run_metadata(trainer, stage) | {"target": self._target_name}
        counts = ("repeats", "inferences", "private_draws", "random")
        shared |= {name: getattr(self, name) for name in counts}
        if self.playing is not None:
            shared["protocol"] = self.playing.record(defense, self.loader, trainer.world_size)
            shared["group_size"] = shared["protocol"]["images"]
        return shared | {"interval_covers": self._covered(defense)}

    def _covered(self, defense: Defense) -> str:
        """Which chance the intervals hold."""
        if self.private_draws > 1:
            return "images and private draws"
        if self.playing is None:
            return "images and inferences" if self.random else "images"
        return "images, as if rounds were independent" if defense.stateful else "images"

    def scores(self) -> tuple[Tensor, Tensor]:
        """Return the scores of the last evaluation; every process has to ask.

        Returns:
            The indices [N], rising, and [N, 1 + A, R] scores of clean images and each attack, by
            inference; against a defense that adapts by private draw.
        """
        index, single = self.book.means()[0], self.book.single()
        if self.playing is not None:  # the inferences of one adapted network are not independent
            shape = (*single.shape[:2], self.private_draws, self.inferences)
            single = single.reshape(shape).mean(3)
        return index, single

    def _results(self, trainer: Trainer, shared: dict[str, Any]) -> list[Result]:
        _, scores = self.book.means()
        _, single = self.scores()
        spans = self._spans(single)
        names = ["clean", *self.attacks]
        found = []
        for i, name in enumerate(names):
            details = shared | spans[i]
            if i:
                attack = self.attacks[name]
                details |= {"attack": attack_spec(attack), "threat": attack_spec(attack.threat)}
                details |= {"ball": str(attack.threat)}
                details |= self._against(trainer, name, scores[:, i])
            draws = single[:, i] if self.private_draws > 1 else None
            seconds = self.seconds[name] if i else 0.0
            found.append(measured(name, scores[:, i], seconds, details, draws))
        return found

    def _against(self, trainer: Trainer, name: str, scores: Tensor) -> dict[str, Any]:
        """The paired comparison with the run's first attack on the same target and images."""
        first = next(s for s in _siblings(trainer) if s.due(trainer) and s.target == self.target)
        reference = next(iter(first.attacks))
        index, theirs = first.book.means()
        alike = torch.equal(index, self.book.means()[0]) and first.playing == self.playing
        if (first is self and name == reference) or not alike:
            return {}
        return {"against": {"attack": reference, **asdict(paired(theirs[:, 1], scores))}}

    def _spans(self, single: Tensor) -> list[dict[str, Any]]:
        """The t intervals over inferences or private draws [N, names, R], if there are several."""
        if single.shape[2] == 1 or not len(single):
            return [{} for _ in range(1 + len(self.attacks))]
        over = "over_inferences" if self.private_draws == 1 else "over_private_draws"
        return [{over: student(row.tolist())} for row in single.mean(0)]

    def _worst(self, trainer: Trainer, shared: dict[str, Any]) -> list[Result]:
        """The strongest attack over the callbacks of the run, recorded by the last of them.

        In a game it is over those callbacks that play the same game.
        """
        due = [s for s in _siblings(trainer) if s.due(trainer) and s.target is whole]
        if due[-1:] != [self]:
            return []
        due = [s for s in due if s.playing == self.playing]
        over = [name for sibling in due for name in sibling.attacks]
        random = any(bool(sibling.random) for sibling in due)
        worst = worst_case([s.scores() for s in due], random, joint=self.playing is not None)
        balls = {str(attack.threat) for s in due for attack in s.attacks.values()}
        ball = balls.pop() if len(balls) == 1 else "several!"
        details = shared | {"choice": worst.choice, "over": over, "ball": ball}
        draws = worst.scores if self.private_draws > 1 else None
        return [measured("worst", worst.scores.mean(1), 0.0, details, draws)]

    def _publish(self, trainer: Trainer, stage: str, results: list[Result]) -> None:
        folder = writing_folder(trainer)
        if folder is None:
            return
        append_records(folder / self.record, (result.record() for result in results))
        if isinstance(trainer.logger, TensorBoardLogger):
            for name, picture in self.panels.items():
                tag = f"{stage}/adversarial/{name}"
                trainer.logger.experiment.add_image(tag, picture, trainer.global_step)


def _count(dataset: Any) -> int | str:
    return len(dataset) if hasattr(dataset, "__len__") else "unnumbered"


def _on_any(trainer: Trainer, mine: bool | None) -> bool:
    """Whether it holds on any process; every process has to ask."""
    held = torch.tensor(float(bool(mine)), device=trainer.strategy.root_device)
    return bool(trainer.strategy.reduce(held, reduce_op="max"))


def _siblings(trainer: Trainer) -> list[RobustEval]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [other for other in callbacks if isinstance(other, RobustEval) and other.attacks]
