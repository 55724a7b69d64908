"""The scores of every image, collected from all batches and ranks."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class PerImage(Metric):
    """A table of scores by image index; an image seen twice counts once.

    Args:
        columns: A, the number of scores per image.
        column_dtype: of the scores; int64 keeps integers that float32 could not hold.
    """

    is_differentiable = False
    higher_is_better = True
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
        self.scores.append(scores.detach().to(self.column_dtype))

    def rows(self) -> tuple[Tensor, Tensor]:
        """Return `compute` in full shape, also for one image or none on this process."""
        if not len(self.index):
            # A rank without images has to take part in the reduction with empty tensors.
            empty = torch.zeros(0, self.columns, device=self.device)
            self.update(empty[:, :0].flatten().long(), empty)
        index, scores = self.compute()
        return index.reshape(-1), scores.reshape(-1, self.columns)

    def compute(self) -> tuple[Tensor, Tensor]:
        """Return the indices [N], rising, and scores [N, A], float64 unless integer, on the CPU."""
        exact = torch.float64 if self.column_dtype.is_floating_point else self.column_dtype
        if not len(self.index):
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0, self.columns, dtype=exact)
        index = dim_zero_cat(self.index).cpu().numpy()
        scores = dim_zero_cat(self.scores).cpu().to(exact)
        # A distributed sampler may serve an image twice: the first row counts.
        unique, first = np.unique(index, return_index=True)
        return torch.from_numpy(unique), scores[torch.from_numpy(first)]
