"""What an evaluation that may be killed has found so far, batch by batch."""

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor


class Journal:
    """Rows of the images that were evaluated, in a folder named after the evaluation.

    Each process appends its batches to a file of its own and sees to it that they reach the disk;
    a batch counts once the line that concludes it is there. A row is taken for an image only if
    the image is the same, pixel by pixel.

    Args:
        folder: of this evaluation and no other; made at the first batch.
        width: how many numbers a row has.
    """

    def __init__(self, folder: Path, width: int) -> None:
        self.folder, self.width = folder, width
        self.path = folder / f"{os.getpid()}.csv"
        self.known: dict[tuple[int, int], list[float]] = {}
        self.seconds: list[float] = []
        for path in sorted(folder.glob("*.csv")):
            self._read(path)

    def __len__(self) -> int:
        return len(self.known)

    def taken(self, names: Iterable[str]) -> dict[str, float]:
        """How long each attack took on the images that are known, in seconds."""
        return dict(zip(names, self.seconds, strict=True)) if self.seconds else {}

    def recall(self, x: Tensor, index: Tensor) -> Tensor | None:
        """The rows [B, width] of images [B, C, H, W] with indices [B], if all are known."""
        rows = [self.known.get(key) for key in _keys(x, index)]
        found = [row for row in rows if row is not None]
        return torch.tensor(found) if len(found) == len(rows) and found else None

    def add(self, x: Tensor, index: Tensor, rows: Tensor, seconds: list[float]) -> None:
        """Keep the rows [B, width] of a batch, and how long each attack took.

        Raises:
            OSError: they cannot be written.
        """
        lines = [
            ",".join([str(number), str(pixels), *(f"{value:.9g}" for value in row)])
            for (number, pixels), row in zip(_keys(x, index), rows.tolist(), strict=True)
        ]
        lines.append(",".join(["whole", str(len(rows)), *(f"{taken:.3f}" for taken in seconds)]))
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write("\n".join(lines) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """Forget it: the evaluation is through."""
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
            rows = {(int(c[0]), int(c[1])): [float(value) for value in c[2:]] for c in batch}
            taken = [float(value) for value in seconds]
        except (ValueError, IndexError):  # a line that was torn and grown over
            return
        if all(len(row) == self.width for row in rows.values()):
            self.known |= rows
            past = self.seconds or [0.0] * len(taken)
            self.seconds = [a + b for a, b in zip(past, taken, strict=True)]


def _keys(x: Tensor, index: Tensor) -> list[tuple[int, int]]:
    """Index and checksum of each image."""
    images = x.detach().cpu().contiguous()
    sums = [crc32(image.numpy().tobytes()) for image in images]
    return list(zip(index.tolist(), sums, strict=True))
