"""An image's row while an evaluation runs: numbers side by side, so that processes can share it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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


def likeliest(answers: Tensor) -> Tensor:
    """The answer [B] of probabilities [B, K]; -1 for a refusal or what is not a number."""
    given = answers.nan_to_num().sum(1) > 0
    return torch.where(given, answers.nan_to_num().argmax(1), -1)


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
        return len(self.names) * (self.inferences + 2) + 1

    def rows(self, y: Tensor, outcomes: Sequence[Outcome]) -> Tensor:
        """The rows [B, width] of a batch with labels [B]."""
        single = torch.cat([outcome.scores for outcome in outcomes], 1)
        answers = torch.stack([outcome.answers for outcome in outcomes], 1)
        sizes = torch.stack([outcome.sizes for outcome in outcomes], 1)
        return torch.cat([single, answers.to(single), sizes.to(single), y[:, None].to(single)], 1)

    def single(self, rows: Tensor) -> Tensor:
        """The scores [N, names, R] by inference."""
        count = len(self.names) * self.inferences
        return rows[:, :count].reshape(len(rows), len(self.names), self.inferences)

    def answers(self, rows: Tensor) -> Tensor:
        """The answers [N, names]."""
        return rows[:, -1 - 2 * len(self.names) : -1 - len(self.names)].long()

    def sizes(self, rows: Tensor) -> Tensor:
        """The sizes [N, names] of the perturbations."""
        return rows[:, -1 - len(self.names) : -1]

    def labels(self, rows: Tensor) -> Tensor:
        """The labels [N]."""
        return rows[:, -1].long()
