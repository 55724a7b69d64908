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
from lightning_rob.attacks.rebuild import parts
from lightning_rob.callbacks.evaluation import (
    Evaluation,
    at_least_one,
    at_radius,
    moment,
    run_folder,
    told_apart,
    writing_folder,
)
from lightning_rob.callbacks.game import Game
from lightning_rob.callbacks.panels import panel as draw
from lightning_rob.callbacks.progress import console_of
from lightning_rob.callbacks.record import (
    Result,
    append_records,
    measured,
    print_table,
    versions,
)
from lightning_rob.callbacks.referee import Match, Untouched, answers
from lightning_rob.data.labelled import give_source
from lightning_rob.defenses import Defense
from lightning_rob.defenses.learning import listener
from lightning_rob.ledger import (
    Book,
    Outcome,
    card_of,
    describe,
    fingerprint,
    key_of,
    likeliest,
    save_images,
)
from lightning_rob.metrics import lowest, minimum, paired, robust_accuracy, student
from lightning_rob.randomness import Streams

LONGEST_NAME = 80  # of a file, in letters, before it says how many more attacks there are


def whole(defense: Defense) -> Defense:
    """The defense itself."""
    return defense


class RobustEval(Evaluation):
    """Attack the module's `defense` and log how often it is still right.

    Logs `{stage}/robust/{attack}` and, over all attacks on the same target in all callbacks of
    the run, `{stage}/robust/worst`: the mean of each image's minimum. Noise is keyed by image, so
    batch size and number of processes change nothing; training is not touched.

    A defense that adapts to the test batch is played against in rounds, when the epoch's batches
    are through; "clean" is what it makes of untouched images, and "worst" the strongest attack.

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
        game: how a defense that adapts is played against; None is `Game()` for such a defense, and
            batch by batch for any other.
        save_images: keep the perturbed images in the run's folder, without loss: PNG of those an
            `EightBit` attack makes, else float32 arrays.

    Raises:
        ValueError: no attacks, or a count below 1.
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
        game: Game | None = None,
        save_images: bool = False,
    ) -> None:
        if not attacks:
            raise ValueError("attacks must name at least one attack, got an empty dict")
        if taken := {"clean", "worst"} & set(attacks):
            raise ValueError(
                f"no attack can be called {taken.pop()!r}: that row has another meaning"
            )
        super().__init__(every_n_epochs, max_images, seed)
        at_least_one(repeats=repeats, inferences=inferences)
        self.attacks = at_radius(attacks, eps)
        self.target = target
        self.repeats = repeats
        self.inferences = inferences
        self.panel = panel
        self.record = record
        self.game = game
        self.save_images = save_images
        self.playing: Game | None = None
        self.matches: dict[tuple[str, int], Match] = {}
        self.folder: Path | None = None
        self.book = Book(("clean", *attacks), inferences)
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
            images = (other.max_images, other.seed, other.repeats, other.inferences)
            how = (other.target, other.game, *images)
            games = {k: (attack, *how) for k, attack in other.attacks.items()}
            if other is self:
                self.attacks = {k: game[0] for k, game in told_apart(games, earlier).items()}
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
        self.playing = self.game or (Game() if defense.transductive else None)
        self.matches = {}
        self.folder = run_folder(trainer)
        place = self._journal_place(trainer, pl_module, defense)
        self.book = Book(("clean", *self.attacks), self.inferences, pl_module.device, place)
        self.seconds = dict.fromkeys(self.attacks, 0.0)
        if self.book.journal:  # and something in it
            self.seconds |= self.book.journal.taken(self.attacks)
            if trainer.is_global_zero:
                known = len(self.book.journal)
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
        return Path(logs or trainer.default_root_dir) / "unfinished" / key_of(**told)

    def _told(self, trainer: Trainer, pl_module: Any, defense: Defense) -> dict[str, Any]:
        """The card: all that the rows depend on."""
        module: Any = trainer.datamodule  # type: ignore[attr-defined]
        return {
            "weights": fingerprint(defense),
            "defense": type(defense).__name__,
            "module": type(pl_module).__name__,
            "rule": describe(defense.rule),
            "target": self._target_name,
            "data": f"{type(module).__name__}, {len(self.loader.dataset)} images",
            "max_images": self.max_images,
            "seed": self.seed,
            "repeats": self.repeats,
            "inferences": self.inferences,
            "save_images": self.save_images,
            "game": self.playing and self.playing.record(defense, self.loader, trainer.world_size),
            "attacks": {name: card_of(attack) for name, attack in self.attacks.items()},
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
        if self.playing is None and not self._recalled(x, y, index):
            defense = self.target(pl_module.defense)
            clean = answers(defense, x, Streams.keyed(index, self.seed), self.inferences)
            self._score_all(trainer, defense, clean, (x, y, index))

    def finish(self, trainer: Trainer, pl_module: Any) -> None:
        """Play the rounds, if it is a game."""
        if self.playing is None:
            return
        defense = self.target(pl_module.defense)
        give_source(defense, trainer)
        nothing = Untouched(next(iter(self.attacks.values())).threat)
        untouched = Match(nothing, defense, self.seed, leaking=self.playing.leaking)
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
        known = self.book.recall(x, y, index)
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
        outcomes = [Outcome(scores, likeliest(clean[0]), torch.zeros_like(scores[:, 0]))]
        for name, attack in self.attacks.items():
            outcomes.append(self._score(trainer, name, attack, defense, clean[0], batch))
        if not trainer.sanity_checking:
            taken = [now - then for now, then in zip(self.seconds.values(), before, strict=True)]
            self.book.enter(x, y, index, outcomes, taken)

    def _score(
        self,
        trainer: Trainer,
        name: str,
        attack: Attack,
        defense: Defense,
        clean: Tensor,
        batch: tuple[Tensor, Tensor, Tensor],
    ) -> Outcome:
        """What became of the batch, scores averaged over repeats."""
        x, y, index = batch
        began, total = time.perf_counter(), torch.zeros(len(x), self.inferences, device=x.device)
        for repeat in range(self.repeats):
            match = self._match(name, attack, defense, repeat)
            x_adv, found = match.round(x, y, index, self.inferences)
            total += torch.stack([robust_accuracy(answer, y) for answer in found], 1)
        if self.panel and name not in self.panels:
            part = slice(self.panel)
            self.panels[name] = draw(x[part], x_adv[part], y[part], clean[part], found[0][part])
        if self.save_images and self.folder and not trainer.sanity_checking:
            stage = "test" if trainer.testing else "val"
            place = self.book.place or self.folder / "images"
            save_images(place / self._stem(stage, trainer, [name]), index, x_adv)
        if self.progress:
            self.progress.advance(name, len(x))
        self.seconds[name] += time.perf_counter() - began
        sizes = attack.threat.distance(x_adv, x)
        return Outcome(total / self.repeats, likeliest(found[0]), sizes)

    def _match(self, name: str, attack: Attack, defense: Defense, repeat: int) -> Match:
        """A new match, or in a game the one that is going on."""
        keys = (self.seed, repeat, *name.encode())
        if self.playing is None:
            return Match(attack, defense, *keys)
        if (name, repeat) not in self.matches:
            new = Match(attack, defense, *keys, leaking=self.playing.leaking)
            self.matches[name, repeat] = new
        return self.matches[name, repeat]

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """Log what was found, and record it."""
        shared = self._circumstances(trainer, stage)
        defense = self.target(pl_module.defense)
        if self.playing is not None:
            shared["game"] = self.playing.record(defense, self.loader, trainer.world_size)
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

    def _keep(self, trainer: Trainer, pl_module: Any, stage: str, defense: Defense) -> None:
        """The record image by image."""
        folder = writing_folder(trainer)
        path = folder and folder / "images" / f"{self._stem(stage, trainer)}.csv"
        card = self._told(trainer, pl_module, defense)
        card |= {"stage": stage, **moment(trainer)}
        self.book.write(path, len(defense.weights), card)
        trainer.strategy.barrier("the record is written")
        self.book.forget()

    def _stem(self, stage: str, trainer: Trainer, names: Sequence[str] = ()) -> str:
        """What a file of this evaluation is called."""
        names = list(names or self.attacks)
        epoch = [f"epoch{trainer.current_epoch:04d}"] if trainer.state.fn == "fit" else []
        target = [self._target_name] if self.target is not whole else []
        told = "+".join(names)
        told = told if len(told) <= LONGEST_NAME else f"{names[0]}+{len(names) - 1}_more"
        return "-".join([stage, *epoch, *target, told])

    def _circumstances(self, trainer: Trainer, stage: str) -> dict[str, Any]:
        told = {"repeats": self.repeats, "inferences": self.inferences}
        return self.circumstances(trainer, stage) | {"target": self._target_name} | told

    def _results(self, trainer: Trainer, shared: dict[str, Any]) -> list[Result]:
        _, scores = self.book.means()
        spans = self._spans()
        found = [measured("clean", scores[:, 0], 0.0, shared | spans[0])]
        for i, (name, attack) in enumerate(self.attacks.items(), start=1):
            details = shared | {"attack": describe(attack), "threat": repr(attack.threat)}
            details |= {"ball": str(attack.threat)} | spans[i]
            details |= self._against(trainer, name, scores[:, i])
            found.append(measured(name, scores[:, i], self.seconds[name], details))
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

    def _spans(self) -> list[dict[str, Any]]:
        """The interval over inferences, for clean images and each attack, if there are several."""
        scores = self.book.single()
        if self.inferences == 1 or not len(scores):
            return [{} for _ in range(1 + len(self.attacks))]
        return [{"over_inferences": student(row.tolist())} for row in scores.mean(0)]

    def _worst(self, trainer: Trainer, shared: dict[str, Any]) -> list[Result]:
        """The strongest attacker over the callbacks of the run, told by the last of them.

        It picks the attack image by image; in a game, where answers depend on all images of a
        round, once and for all, from those that play the same game on the same images.
        """
        due = [s for s in _siblings(trainer) if s.due(trainer) and s.target is whole]
        if due[-1:] != [self]:
            return []
        due = [s for s in due if s.playing == self.playing]
        if self.playing:
            due = [s for s in due if (s.max_images, s.seed) == (self.max_images, self.seed)]
        over = [name for sibling in due for name in sibling.attacks]
        how, pick = ("strongest attack", lowest) if self.playing else ("per-image minimum", minimum)
        scores = pick([sibling.book.means() for sibling in due])
        balls = {str(attack.threat) for s in due for attack in s.attacks.values()}
        ball = balls.pop() if len(balls) == 1 else "several!"
        details = shared | {"attack": how, "over": over, "ball": ball}
        return [measured("worst", scores, 0.0, details)]

    def _publish(self, trainer: Trainer, stage: str, results: list[Result]) -> None:
        folder = writing_folder(trainer)
        if folder is None:
            return
        append_records(folder / self.record, results)
        if isinstance(trainer.logger, TensorBoardLogger):
            for name, picture in self.panels.items():
                tag = f"{stage}/adversarial/{name}"
                trainer.logger.experiment.add_image(tag, picture, trainer.global_step)


def _siblings(trainer: Trainer) -> list[RobustEval]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [other for other in callbacks if isinstance(other, RobustEval) and other.attacks]
