"""What an evaluation that may be killed has found so far, batch by batch."""

import math
import os
import platform
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from lightning_rob.ledger.columns import checksums

Key = tuple[int, int, int]
ROUNDING = 1e-4  # what a sum of probabilities may miss 1 by


class Journal:
    """Rows of the images that were evaluated, in a folder named after the evaluation.

    Each process appends its batches to a file of its own and sees to it that they reach the disk;
    a batch counts once the line that concludes it is there. A row is taken for an image only if
    the image is the same, pixel by pixel, with the same label.

    Args:
        folder: of this evaluation and no other; made at the first batch.
        scores: how many numbers of a row are scores, its first.
        rest: how many others it has.
    """

    def __init__(self, folder: Path, scores: int, rest: int) -> None:
        self.folder, self.scores, self.width = folder, scores, scores + rest
        self.path = folder / f"{platform.node()}-{os.getpid()}.csv"
        self.known: dict[Key, list[float]] = {}
        self.seconds: list[float] = []
        self.read = [path for path in sorted(folder.glob("*.csv")) if path.is_file()]
        for path in self.read:
            self._read(path)

    def __len__(self) -> int:
        return len(self.known)

    def taken(self, names: Iterable[str]) -> dict[str, float]:
        """How long each attack took on the images that are known, in seconds."""
        return dict(zip(names, self.seconds, strict=True)) if self.seconds else {}

    def recall(self, x: Tensor, y: Tensor, index: Tensor) -> Tensor | None:
        """The rows [B, width] of images [B, C, H, W], labels and indices [B], if all are known."""
        rows = [self.known.get(key) for key in _keys(x, y, index)]
        found = [row for row in rows if row is not None]
        return torch.tensor(found) if len(found) == len(rows) and found else None

    def add(self, x: Tensor, y: Tensor, index: Tensor, rows: Tensor, seconds: list[float]) -> None:
        """Keep the rows [B, width] of a batch, and how long each attack took.

        Raises:
            OSError: they cannot be written.
        """
        lines = [
            ",".join([*map(str, key), *(f"{value:.9g}" for value in row)])
            for key, row in zip(_keys(x, y, index), rows.tolist(), strict=True)
        ]
        lines.append(",".join(["whole", str(len(rows)), *(f"{taken:.3f}" for taken in seconds)]))
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Forget it: the evaluation is through. What another process is writing stays."""
        for path in {*self.read, self.path}:
            path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # where another process of the run was faster
            if not list(self.folder.glob("*.csv")):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, path: Path) -> None:
        """The batches of a file that are whole."""
        waiting: list[list[str]] = []
        for line in path.read_text(errors="replace").splitlines(keepends=True):
            cells = line.rstrip("\n").split(",")
            if cells[0] != "whole":
                waiting.append(cells)
                continue
            if line.endswith("\n") and cells[1] == str(len(waiting)):
                self._keep(waiting, cells[2:])
            waiting = []

    def _keep(self, batch: list[list[str]], seconds: list[str]) -> None:
        try:
            rows = {
                (int(c[0]), int(c[1]), int(c[2])): [float(value) for value in c[3:]] for c in batch
            }
            taken = [float(value) for value in seconds]
        except (ValueError, IndexError):  # a line that was torn and grown over
            return
        if all(map(self._sound, rows.values())) and len(taken) == self.scores - 1:
            self.known |= rows
            past = self.seconds or [0.0] * len(taken)
            self.seconds = [a + b for a, b in zip(past, taken, strict=True)]

    def _sound(self, row: list[float]) -> bool:
        """Whether a row has as many numbers as it should, and scores that can be some."""
        scores = row[: self.scores]
        probable = all(-ROUNDING <= score <= 1 + ROUNDING for score in scores)
        return len(row) == self.width and probable and not any(map(math.isnan, row))


def _keys(x: Tensor, y: Tensor, index: Tensor) -> list[Key]:
    """Index, checksum and label of each image."""
    return list(zip(index.tolist(), checksums(x), y.tolist(), strict=True))
