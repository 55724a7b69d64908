"""The rows of one evaluation: in memory, on the way in a journal, in the end in a file."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_rob.ledger.columns import Columns, Outcome
from lightning_rob.ledger.journal import Journal
from lightning_rob.ledger.table import PerImageRows
from lightning_rob.metrics import PerImage


class PerImageResults:
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

    def load_cached(self, x: Tensor, y: Tensor, index: Tensor) -> bool:
        """Take a batch from the journal, if it has all of it."""
        rows = self.journal.recall(x, y, index) if self.journal is not None else None
        if rows is not None:
            self._take(index, rows.to(x.device))
        return rows is not None

    def add_batch(
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

    def seconds(self) -> dict[str, float]:
        """Return the run time of each attack on the images of an earlier run, by name."""
        names = self.columns.names[1:]
        return self.journal.taken(names) if self.journal is not None else {}

    def __len__(self) -> int:
        """Return the number of images that an earlier run has scored."""
        return len(self.journal) if self.journal is not None else 0

    def rows(self) -> PerImageRows:
        """Return the rows of all processes; every process has to call it."""
        index, _ = self.table.rows()
        _, rest = self.rest.rows()
        columns = self.columns
        return PerImageRows(
            index,
            columns.labels(rest),
            columns.single(rest).double(),
            columns.answers(rest),
            columns.sizes(rest),
            columns.pixels(rest),
        )

    def move_images(self, folder: Path) -> None:
        """Copy the images that were saved beside the journal to another folder."""
        for own in sorted(self.place.iterdir()) if self.place and self.place.exists() else ():
            if own.is_dir():
                shutil.copytree(own, folder / own.name, dirs_exist_ok=True)

    def delete(self) -> None:
        """Remove this process's journal, once the record is written."""
        if self.journal is not None:
            self.journal.remove()
