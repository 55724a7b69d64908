"""The results of every image of an evaluation, in memory; and a log from which it resumes."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_rob.evaluation.resume_log import BatchOutcome, ResumeLog, checksums
from lightning_rob.metrics import PerImage

KNOWN = "known_noise"


def predicted_class(probabilities: Tensor, rejects: int | None = None) -> Tensor:
    """Return the most probable class [B] of [B, K]; -1 for a rejected or non-finite prediction."""
    known = probabilities.nan_to_num()
    predicted = torch.where(known.sum(1) > 0, known.argmax(1), -1)
    return predicted if rejects is None else predicted.masked_fill(predicted == rejects, -1)


@dataclass(frozen=True)
class PerImageRows:
    """Results of N images by rising index, clean and under each attack: A outcomes side by side."""

    index: Tensor  # [N]
    label: Tensor  # [N]
    scores: Tensor  # [N, A, R]
    predictions: Tensor  # [N, A]
    sizes: Tensor  # [N, A]
    checksum: Tensor  # [N]
    rejected: Tensor | None = None  # [N, A, R]; None of a defense that rejects nothing
    blind: Tensor | None = None  # [N, A]; NaN where an attack asked for no gradients
    known_noise: Tensor | None = None  # [N] the score with known noise; NaN where not measured


class PerImageResults:
    """Scores, predictions and perturbation sizes of every image, clean and under each attack."""

    def __init__(
        self,
        names: Sequence[str],
        inferences: int,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
    ) -> None:
        self.names, self.inferences = tuple(names), inferences
        # Scores and rejections by inference, sizes, blindness, the score with known noise; and
        # predictions, label, checksum, which are exact.
        self.floats = PerImage(len(names) * (2 * inferences + 2) + 1).to(device)
        self.integers = PerImage(len(names) + 2, torch.int64).to(device)
        self.checksums: dict[int, int] = {}  # of this process's images, by index
        self.log = ResumeLog(folder, (*names, KNOWN))

    def add_batch(
        self,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        outcomes: Sequence[BatchOutcome],
        known_noise: Tensor | None = None,
    ) -> None:
        """Add the outcomes of a batch, one for each of the names, and scores [B] of known noise."""
        known = checksums(x)
        for number, checksum in zip(index.tolist(), known, strict=True):
            if self.checksums.setdefault(number, checksum) != checksum:
                raise ValueError(
                    f"two different images have the index {number}: give each image of a data set "
                    "an index of its own, and augment none"
                )
        here = [BatchOutcome(*(part.to(index.device) for part in one)) for one in outcomes]
        scores, predictions, sizes, rejected, blind = zip(*here, strict=True)
        unknown = torch.full_like(sizes[0], torch.nan)
        known_noise = unknown if known_noise is None else known_noise.to(unknown)
        single = [torch.stack(sizes, 1), torch.stack(blind, 1), known_noise[:, None]]
        floats = torch.cat([*scores, *rejected, *single], 1).float()
        about = [*predictions, y, torch.tensor(known)]
        self.floats.update(index, floats.to(index.device))
        self.integers.update(index, torch.stack([part.long().to(index) for part in about], 1))

    def counts(self) -> dict[str, int]:
        """Return the number of images whose results the log has from an earlier run, by attack."""
        known: Counter[str] = Counter()
        for (name, _), outcome in self.log.known.items():
            known[name] += len(outcome.sizes)
        return {name: known[name] for name in self.names[1:] if name in known}

    def rows(self) -> PerImageRows:
        """Return the results of all images; a collective of all processes."""
        index, floats = self.floats.rows()
        _, integers = self.integers.rows()
        count = len(self.names)
        floats, known = floats[:, :-1], floats[:, -1]
        both = floats[:, : -2 * count].reshape(len(floats), 2, count, self.inferences)
        scores, rejected = both.unbind(1)
        predictions, label, checksum = torch.split(integers, [count, 1, 1], 1)
        sizes, blind = floats[:, -2 * count :].chunk(2, 1)
        # The log has -1 for NaN, which JSON lacks.
        blind = blind.masked_fill(blind < 0, torch.nan)
        own = index, label[:, 0], scores, predictions, sizes, checksum[:, 0], rejected, blind
        return PerImageRows(*own, None if known.isnan().all() else known)
