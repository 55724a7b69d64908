"""The rows of one evaluation: in memory, on the way in a journal, in the end in a file."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rob.ledger.columns import Columns, Outcome
from lightning_rob.ledger.journal import Journal
from lightning_rob.ledger.table import write_ledger
from lightning_rob.metrics import PerImage


class Book:
    """What became of every image, untouched and under each attack.

    Args:
        names: "clean" and the attacks.
        inferences: R, how often the defense answers.
        device: where the batches are.
        place: folder of the journal; None keeps none.
    """

    def __init__(
        self,
        names: Sequence[str],
        inferences: int,
        device: torch.device | str = "cpu",
        place: Path | None = None,
    ) -> None:
        self.columns = Columns(tuple(names), inferences)
        self.table = PerImage(len(names)).to(device)
        self.rest = PerImage(self.columns.width).to(device)
        self.place = place
        self.journal = None
        if place is not None:
            self.journal = Journal(place, len(names), self.columns.width)

    def recall(self, x: Tensor, y: Tensor, index: Tensor) -> bool:
        """Take a batch from the journal, if it has all of it."""
        rows = self.journal.recall(x, y, index) if self.journal is not None else None
        if rows is not None:
            self._take(index, rows.to(x.device))
        return rows is not None

    def enter(
        self,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        outcomes: Sequence[Outcome],
        seconds: Sequence[float],
    ) -> None:
        """Add a batch [B, …] and what became of it, and how long each attack took."""
        means = torch.stack([outcome.scores.mean(1) for outcome in outcomes], 1)
        rows = torch.cat([means, self.columns.rows(x, y, outcomes)], 1).float()
        self._take(index, rows)
        if self.journal is not None:
            self.journal.add(x, y, index, rows, list(seconds))

    def _take(self, index: Tensor, rows: Tensor) -> None:
        self.table.update(index, rows[:, : len(self.columns.names)])
        self.rest.update(index, rows[:, len(self.columns.names) :])

    def means(self) -> tuple[Tensor, Tensor]:
        """The indices [N], rising, and scores [N, names]; every process has to ask."""
        return self.table.rows()

    def single(self) -> Tensor:
        """The scores [N, names, R] by inference; every process has to ask."""
        return self.columns.single(self.rest.rows()[1])

    def write(self, path: Path | None, draws: int, card: dict[str, Any], worst: Tensor) -> None:
        """Write the record on the process that has a path, and move the saved images beside it.

        Every process has to call it. See `write_ledger`.
        """
        index, means = self.means()
        _, rows = self.rest.rows()
        if path is None:
            return
        write_ledger(path, self.columns, index, means, rows, draws, card, worst)
        for folder in sorted(self.place.iterdir()) if self.place and self.place.exists() else ():
            if folder.is_dir():
                shutil.copytree(folder, path.parent / folder.name, dirs_exist_ok=True)

    def forget(self) -> None:
        """Remove this process's journal, once the record is written."""
        if self.journal is not None:
            self.journal.remove()
