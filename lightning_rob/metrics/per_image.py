"""Scores of every image, whatever rank or batch it was in."""

from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class PerImage(Metric):
    """A table of scores by image index; an image seen twice counts once.

    Args:
        columns: A, how many scores an image has.
        column_dtype: of the scores; int64 keeps integers that float32 could not hold.
    """

    is_differentiable = False
    full_state_update = False
    index: list[Tensor]
    scores: list[Tensor]

    def __init__(
        self, columns: int, column_dtype: torch.dtype = torch.float32, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.columns = columns
        self.column_dtype = column_dtype
        self.add_state("index", default=[], dist_reduce_fx="cat")
        self.add_state("scores", default=[], dist_reduce_fx="cat")

    def update(self, index: Tensor, scores: Tensor) -> None:
        """Add a batch: indices [B], scores [B, A]."""
        self.index.append(index)
        self.scores.append(scores.to(self.column_dtype))

    def rows(self) -> tuple[Tensor, Tensor]:
        """As `compute`, but with its shapes where there is one image, or none on this process."""
        if not len(self.index):
            nothing = torch.zeros(0, self.columns, device=self.device)
            self.update(nothing[:, :0].flatten().long(), nothing)
        index, scores = self.compute()
        return index.reshape(-1), scores.reshape(-1, self.columns)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the indices [N], rising, and scores [N, A], float64 unless integer, on the CPU."""
        exact = torch.float64 if self.column_dtype.is_floating_point else self.column_dtype
        if not len(self.index):
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.columns, dtype=exact)
        index = dim_zero_cat(self.index).cpu().numpy()
        scores = dim_zero_cat(self.scores).cpu().to(exact)
        import numpy as np

        unique, first = np.unique(index, return_index=True)
        return torch.from_numpy(unique), scores[torch.from_numpy(first)]
