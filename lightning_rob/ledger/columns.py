"""An image's row while an evaluation runs: numbers side by side, so that processes can share it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor


class Outcome(NamedTuple):
    """What became of a batch under one attack, or untouched.

    Args:
        scores: [B, R] the probability that the answer is right, by inference.
        answers: [B] the likeliest answer; -1 where there is none.
        sizes: [B] of the perturbations, in the threat's norm.
    """

    scores: Tensor
    answers: Tensor
    sizes: Tensor


def predicted_class(answers: Tensor) -> Tensor:
    """The answer [B] of probabilities [B, K]; -1 for a refusal or what is not a number."""
    given = answers.nan_to_num().sum(1) > 0
    return torch.where(given, answers.nan_to_num().argmax(1), -1)


def checksums(x: Tensor) -> list[int]:
    """The CRC-32 of each image [B, …], as float32."""
    images = x.detach().cpu().float().contiguous()
    return [crc32(image.numpy().tobytes()) for image in images]


@dataclass(frozen=True)
class Columns:
    """What is kept of each image beside its mean scores.

    Args:
        names: "clean" and the attacks.
        inferences: R, how often the defense answers.
    """

    names: tuple[str, ...]
    inferences: int

    @property
    def width(self) -> int:
        """How many numbers there are in a row."""
        return len(self.names) * (self.inferences + 2) + 3

    def rows(self, x: Tensor, y: Tensor, outcomes: Sequence[Outcome]) -> Tensor:
        """The rows [B, width] of a batch [B, …] with labels [B]."""
        single = torch.cat([outcome.scores for outcome in outcomes], 1)
        answers = torch.stack([outcome.answers for outcome in outcomes], 1)
        sizes = torch.stack([outcome.sizes for outcome in outcomes], 1)
        halves = [divmod(number, 2**16) for number in checksums(x)]  # which float32 can hold
        about = torch.cat([y[:, None].to(single), torch.tensor(halves).to(single)], 1)
        return torch.cat([single, answers.to(single), sizes.to(single), about], 1)

    def single(self, rows: Tensor) -> Tensor:
        """The scores [N, names, R] by inference."""
        count = len(self.names) * self.inferences
        return rows[:, :count].reshape(len(rows), len(self.names), self.inferences)

    def answers(self, rows: Tensor) -> Tensor:
        """The answers [N, names]."""
        return rows[:, -3 - 2 * len(self.names) : -3 - len(self.names)].long()

    def sizes(self, rows: Tensor) -> Tensor:
        """The sizes [N, names] of the perturbations."""
        return rows[:, -3 - len(self.names) : -3]

    def labels(self, rows: Tensor) -> Tensor:
        """The labels [N]."""
        return rows[:, -3].long()

    def pixels(self, rows: Tensor) -> list[str]:
        """The images' checksums, N of 8 hexadecimal digits."""
        return [f"{high << 16 | low:08x}" for high, low in rows[:, -2:].long().tolist()]
