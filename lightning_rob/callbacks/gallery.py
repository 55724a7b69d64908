"""Pictures of images that survive a weak attack and not a strong one."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_rob.attacks import Attack, evaluating
from lightning_rob.callbacks.base import EvaluationCallback, with_threat
from lightning_rob.callbacks.images import Images
from lightning_rob.callbacks.loggers import log_picture, writing_folder
from lightning_rob.callbacks.progress import console_of
from lightning_rob.defenses import Defense
from lightning_rob.evaluation.groups import Batch
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.evaluation.records import append_records
from lightning_rob.metrics import robust_accuracy
from lightning_rob.plots import GalleryRow, MemberPredictions, gallery, pixels, save
from lightning_rob.randomness import Streams
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import at_least
from lightning_rob.runtime.identity import attack_spec
from lightning_rob.runtime.processes import gathered
from lightning_rob.threat import Length, Norm

# Minus the expected accuracy under the weak attack, the index, the row.
Found = tuple[float, int, GalleryRow]


class Gallery(EvaluationCallback):
    """Show test images that a weak attack leaves to some member and a strong one to none.

    Draws `{name}.png` in the run's folder and for the loggers, counts such images, prints the count
    and appends it to `{name}.jsonl`. Images on which more members survive the weak attack come
    first, then those of lower index. Members with probability 0 are ignored.

    Args:
        weak: attack that leaves some member right.
        strong: attack that fools every member.
        names: names of the two attacks; None takes those of their classes.
        count: number of images to show.
        name: name of the files.
        eps: radius of both attacks instead of their own, see `RobustEval`.
        norm: norm of the attacks instead of their own, with `eps`.
        **options: those of `EvaluationCallback`.
    """

    def __init__(
        self,
        weak: Attack,
        strong: Attack,
        names: list[str] | None = None,
        count: int = 8,
        name: str = "gallery",
        eps: Length | None = None,
        norm: Norm | None = None,
        **options: Any,
    ) -> None:
        super().__init__(None, **options)
        at_least(1, count=count)
        if names is not None and len(names) != 2:
            raise ValueError(f"names must be two, of the weak and the strong attack, got {names}")
        self.weak, self.strong = with_threat({"weak": weak, "strong": strong}, eps, norm).values()
        self.names = names or [type(attack).__name__ for attack in (weak, strong)]
        self.count = count
        self.name = name
        self.kept: list[Found] = []
        self.counts = {"n": 0, "left": 0, "fooled": 0}

    def due(self, trainer: Trainer) -> bool:
        return trainer.state.fn == "test"

    def begin(self, trainer: Trainer, pl_module: Any, loaders: Any) -> Sequence[Images]:
        self.kept, self.counts = [], dict.fromkeys(self.counts, 0)
        return [Images(trainer, loaders, self.inputs, self.settings, attacks=2)]

    def attack_batch(self, trainer: Trainer, pl_module: Any, batch: Batch, images: Images) -> None:
        """Attack the batch, and what is left of it by the weak attack again by the strong one."""
        defense, (x, y, index) = self.defense_of(pl_module), batch
        for attack in (self.weak, self.strong):
            if len(attack.strategies(defense)) > 1:
                name = type(attack).__name__
                raise ValueError(f"a gallery shows one strategy, {name} draws one: use OnMember")
        weak, after = self._duel(0, self.weak, defense, x, y, index)
        left = (after > 0).nonzero()[:, 0]
        strong, end = self._duel(1, self.strong, defense, x[left], y[left], index[left])
        fooled = (end == 0).nonzero()[:, 0]
        for key, number in (("n", len(x)), ("left", len(left)), ("fooled", len(fooled))):
            self.counts[key] += number
        for j in fooled.tolist():
            i = int(left[j])
            case = GalleryRow(int(y[i]), x[i].cpu().clone(), weak[i], strong[j])
            self.kept.append((-float(after[i]), int(index[i]), case))
        # Shown are those that the weak attack left most right: there the strong one did most.
        self.kept = sorted(self.kept, key=lambda item: item[:2])[: self.count]
        self.advance(self.name, 2 * len(x))

    def _duel(
        self, side: int, attack: Attack, defense: Defense, x: Tensor, y: Tensor, index: Tensor
    ) -> tuple[list[MemberPredictions], Tensor]:
        """Return the perturbed images with their predictions, and the accuracy on them [B]."""
        if not len(x):
            return [], torch.zeros(0)
        session = AttackerDefenderSession(attack, defense, self.settings.seed, side)
        x_adv, _ = session.step(x, y, index)
        with evaluating(defense) as copied, torch.no_grad():
            logits = copied.logits(x_adv, Streams.from_index(index, self.settings.seed, side, 2))
        confidence, predicted = logits.softmax(-1).max(-1)
        parts = (x_adv.cpu(), predicted.T.cpu(), confidence.T.cpu())
        # Cloned, for a view would keep the whole batch alive.
        shown = [MemberPredictions(*(p[i].clone() for p in parts)) for i in range(len(x))]
        return shown, robust_accuracy(random_member(logits, defense.weights), y)

    def report(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        found = gathered((self.counts, self.kept))
        self.counts = {key: sum(counts[key] for counts, _ in found) for key in self.counts}
        kept = [one for _, kept in found for one in kept]
        self.kept = sorted(kept, key=lambda item: item[:2])[: self.count]
        line = (
            f"{self.names[1]} fools every member on {self.counts['fooled']} of the "
            f"{self.counts['left']} images on which {self.names[0]} leaves some member right"
        )
        if trainer.is_global_zero:
            said = f"{line} ({self.counts['n']} attacked)"
            console_of(trainer).print(said, highlight=False, soft_wrap=True)
        folder = writing_folder(trainer)
        if folder is None:
            return
        record = {"kind": "gallery", "name": self.name} | self.images[0].metadata
        record |= {"weak": attack_spec(self.weak), "strong": attack_spec(self.strong)}
        append_records(folder / f"{self.name}.jsonl", [record | self.counts])
        if self.kept:
            names = getattr(getattr(trainer, "datamodule", None), "class_names", None)
            cases = [case for _, _, case in self.kept]
            figure = gallery(cases, (self.names[0], self.names[1]), names, line)
            save(figure, folder / f"{self.name}.png")
            log_picture(trainer, f"{stage}/{self.name}", pixels(figure))
