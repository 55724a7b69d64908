"""Robust accuracy at every validation and test, beside the clean one."""

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.callbacks.panels import panel as draw
from lightning_rob.callbacks.progress import AttackProgress
from lightning_rob.callbacks.record import (
    Result,
    append_records,
    describe,
    measured,
    print_table,
    versions,
)
from lightning_rob.callbacks.referee import answers, play
from lightning_rob.defenses import Defense
from lightning_rob.metrics import PerImage, minimum, robust_accuracy
from lightning_rob.randomness import Streams


def whole(defense: Defense) -> Defense:
    """The defense itself."""
    return defense


class RobustEval(Callback):
    """Attack the module's `defense` and log how often it is still right.

    Logs `{stage}/robust/{attack}` and, over all attacks on the same target in all callbacks of
    the run, `{stage}/robust/worst`: the mean of each image's minimum. Noise is keyed by image, so
    batch size and number of processes change nothing; training is not touched.

    Args:
        attacks: name -> attack.
        target: what is attacked, made of the module's defense, e.g. `first_member`. Only attacks
            on the whole defense count in `worst`.
        every_n_epochs: validate robustness every so many epochs of `fit`.
        max_images: attack so many images only, a random choice by the seed; None attacks all.
        repeats: evaluations with fresh noise, averaged per image.
        seed: of the evaluation's noise.
        panel: how many images to draw for TensorBoard: clean, perturbation, adversarial.
        record: file in the run's folder to which each result is appended as a line of JSON.

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
    ) -> None:
        if not attacks:
            raise ValueError("attacks must name at least one attack, got an empty dict")
        if taken := {"clean", "worst"} & set(attacks):
            raise ValueError(
                f"no attack can be called {taken.pop()!r}: that row has another meaning"
            )
        counts = {"every_n_epochs": every_n_epochs, "max_images": max_images, "repeats": repeats}
        for name, number in counts.items():
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        self.attacks = dict(attacks)
        self.target = target
        self.every_n_epochs = every_n_epochs
        self.max_images = max_images
        self.repeats = repeats
        self.seed = seed
        self.panel = panel
        self.record = record
        self.table = PerImage(1 + len(attacks))
        self.seconds = dict.fromkeys(attacks, 0.0)
        self.panels: dict[str, Tensor] = {}
        self.positions: Tensor | None = None
        self.seen = 0
        self.progress: AttackProgress | None = None
        self.results: list[Result] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Run once what is there twice; number a name that another attack in the run has."""
        for other in _siblings(trainer):
            if other is self:
                return
            for name in [name for name in self.attacks if name in other.attacks]:
                attack = self.attacks.pop(name)
                if (attack, self.target) != (other.attacks[name], other.target):
                    taken = {key for sibling in _siblings(trainer) for key in sibling.attacks}
                    numbered = (f"{name}_{i}" for i in count(2))
                    self.attacks[next(key for key in numbered if key not in taken)] = attack

    def due(self, trainer: Trainer) -> bool:
        """Whether this epoch's evaluation is one of ours."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return bool(self.attacks)
        return bool(self.attacks) and (trainer.current_epoch + 1) % self.every_n_epochs == 0

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last evaluation."""
        self._start(trainer, pl_module, trainer.val_dataloaders)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Forget the last evaluation."""
        self._start(trainer, pl_module, trainer.test_dataloaders)

    def on_validation_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Attack the batch."""
        self._attack_batch(trainer, pl_module, batch)

    def on_test_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        """Attack the batch."""
        self._attack_batch(trainer, pl_module, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was found."""
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what was found, and print the table."""
        self._finish(trainer, pl_module, "test")

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the table of all callbacks once they are through."""
        siblings = _siblings(trainer)
        if siblings[-1:] == [self] and trainer.is_global_zero:
            print_table(type(pl_module).__name__, [r for s in siblings for r in s.results])

    def _start(self, trainer: Trainer, pl_module: LightningModule, loaders: Any) -> None:
        self.table = PerImage(1 + len(self.attacks)).to(pl_module.device)
        self.seconds = dict.fromkeys(self.attacks, 0.0)
        self.panels, self.seen = {}, 0
        loader = loaders[0] if isinstance(loaders, list) and len(loaders) == 1 else loaders
        if not hasattr(loader, "dataset"):
            raise ValueError("RobustEval evaluates one data loader at a time, got several")
        self.positions, images = None, len(loader.dataset)
        if self.max_images is not None and self.max_images < images:
            chance = torch.Generator().manual_seed(self.seed)
            images = self.max_images
            self.positions = torch.randperm(len(loader.dataset), generator=chance)[:images]
        if self.due(trainer) and not trainer.sanity_checking:
            total = -(-images // trainer.world_size) * len(self.attacks)
            self.progress = AttackProgress(trainer, "Attacking", total)

    def _attack_batch(self, trainer: Trainer, pl_module: Any, batch: Any) -> None:
        if not self.due(trainer):
            return
        x, y, index = batch
        chosen = self._chosen(trainer, len(x)).to(x.device)
        if not len(chosen):
            return
        defense = self.target(pl_module.defense)
        with torch.autocast(x.device.type, enabled=False), torch.inference_mode(False):
            x, y, index = x[chosen].float().clone(), y[chosen].clone(), index[chosen].clone()
            clean = answers(defense, x, Streams.keyed(index, self.seed))
            scores = [robust_accuracy(clean, y)]
            for name, attack in self.attacks.items():
                scores.append(self._score(name, attack, defense, clean, (x, y, index)))
        if not trainer.sanity_checking:
            self.table.update(index, torch.stack(scores, 1))

    def _chosen(self, trainer: Trainer, count: int) -> Tensor:
        """Positions in the batch; two images are enough to find out that an attack runs."""
        local = torch.arange(count)
        if trainer.sanity_checking:
            return local[:2]
        place = (self.seen + local) * trainer.world_size + trainer.global_rank
        self.seen += count
        return local if self.positions is None else local[torch.isin(place, self.positions)]

    def _score(
        self,
        name: str,
        attack: Attack,
        defense: Defense,
        clean: Tensor,
        batch: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Each image's accuracy, averaged over repeats: [B]."""
        x, y, index = batch
        began, total = time.perf_counter(), torch.zeros(len(x), device=x.device)
        for repeat in range(self.repeats):
            x_adv, found = play(attack, defense, x, y, index, self.seed, repeat, *name.encode())
            total += robust_accuracy(found, y)
        if self.panel and name not in self.panels:
            part = slice(self.panel)
            self.panels[name] = draw(x[part], x_adv[part], y[part], clean[part], found[part])
        if self.progress:
            self.progress.advance(name, len(x))
        self.seconds[name] += time.perf_counter() - began
        return total / self.repeats

    def _finish(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if self.progress:
            self.progress.close()
            self.progress = None
        if trainer.sanity_checking or not self.due(trainer):
            return
        shared = self._circumstances(trainer, stage)
        self.results = results = self._results(shared) + self._worst(trainer, shared)
        values = {f"{stage}/robust/{r.name}": r.accuracy for r in results if r.name != "clean"}
        for key, value in values.items():
            pl_module.log(key, value, sync_dist=True, prog_bar=key.endswith("/worst"))
        hook = getattr(pl_module, "on_robust_evaluation", None)
        if hook:
            hook(values)
        self._publish(trainer, stage, results)

    def _circumstances(self, trainer: Trainer, stage: str) -> dict[str, Any]:
        return {
            "stage": stage,
            "epoch": trainer.current_epoch,
            "step": trainer.global_step,
            "target": getattr(self.target, "__name__", repr(self.target)),
            "repeats": self.repeats,
            "seed": self.seed,
            "versions": versions(),
        }

    def _results(self, shared: dict[str, Any]) -> list[Result]:
        _, scores = self.table.rows()
        found = [measured("clean", scores[:, 0], 0.0, shared)]
        for i, (name, attack) in enumerate(self.attacks.items(), start=1):
            details = shared | {"attack": describe(attack), "threat": repr(attack.threat)}
            found.append(measured(name, scores[:, i], self.seconds[name], details))
        return found

    def _worst(self, trainer: Trainer, shared: dict[str, Any]) -> list[Result]:
        """The per-image minimum over the callbacks of the run, told by the last of them."""
        due = [s for s in _siblings(trainer) if s.due(trainer) and s.target is whole]
        if due[-1:] != [self]:
            return []
        over = [name for sibling in due for name in sibling.attacks]
        scores = minimum([sibling.table.rows() for sibling in due])
        details = shared | {"attack": "per-image minimum", "over": over}
        return [measured("worst", scores, 0.0, details)]

    def _publish(self, trainer: Trainer, stage: str, results: list[Result]) -> None:
        folder = trainer.log_dir  # a collective: every process has to ask
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        if folder and trainer.logger:
            append_records(Path(folder) / self.record, results)
        if isinstance(trainer.logger, TensorBoardLogger):
            for name, picture in self.panels.items():
                tag = f"{stage}/adversarial/{name}"
                trainer.logger.experiment.add_image(tag, picture, trainer.global_step)


def _siblings(trainer: Trainer) -> list[RobustEval]:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [other for other in callbacks if isinstance(other, RobustEval) and other.attacks]
