"""A log of finished batches, from which an interrupted evaluation resumes."""

import json
import os
import platform
import shutil
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

Key = tuple[int, int, int]  # index, checksum and label of an image
Row = tuple[list[float], list[int]]
ROUNDING = 1e-4  # by which a sum of probabilities may exceed 1


def checksums(x: Tensor) -> list[int]:
    """Return the CRC-32 of each image [B, …], as float32."""
    images = x.detach().cpu().float().contiguous()
    return [crc32(image.numpy().tobytes()) for image in images]


class ResumeLog:
    """Batches that an evaluation has finished, in a folder named after the evaluation.

    Each process appends a line of JSON per batch to a file of its own and waits until it is on the
    disk; a line that a kill broke off is ignored. A row is reused for an image only if the image is
    the same, pixel by pixel, with the same label.

    Args:
        folder: of this evaluation and no other; made at the first batch.
        names: A, the number of mean scores of an image.
        inferences: R.
    """

    def __init__(self, folder: Path, names: int, inferences: int) -> None:
        self.folder, self.names = folder, names
        self.width = names * (inferences + 2)
        self.path = folder / f"{platform.node()}-{os.getpid()}.jsonl"
        self.known: dict[Key, Row] = {}
        self.total_seconds: list[float] = []
        self.read = [path for path in sorted(folder.glob("*.jsonl")) if path.is_file()]
        for path in self.read:
            for line in path.read_text(errors="replace").splitlines():
                with suppress(ValueError, KeyError, TypeError):  # a broken line, or a foreign one
                    self._keep(json.loads(line))

    def __len__(self) -> int:
        return len(self.known)

    def seconds(self, names: Iterable[str]) -> dict[str, float]:
        """Return how long each attack took on the known images."""
        return dict(zip(names, self.total_seconds, strict=True)) if self.total_seconds else {}

    def load(self, x: Tensor, y: Tensor, index: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the rows of a batch: floats [B, A (R + 2)] and predictions [B, A].

        None unless all images [B, …] are known by index, pixels and label.
        """
        rows = [self.known.get(key) for key in _keys(x, y, index)]
        found = [row for row in rows if row is not None]
        if not found or len(found) < len(rows):
            return None
        floats, predictions = zip(*found, strict=True)
        return torch.tensor(floats), torch.tensor(predictions)

    def add(
        self,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        floats: Tensor,
        predictions: Tensor,
        seconds: Sequence[float],
    ) -> None:
        """Append the rows of a batch and the time of each attack.

        Raises:
            OSError: they cannot be written.
        """
        fields = {
            "keys": _keys(x, y, index),
            "floats": floats.tolist(),
            "predictions": predictions.tolist(),
            "seconds": [round(value, 3) for value in seconds],
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            # The line break comes first, so that a line broken off before spoils no other.
            file.write("\n" * (file.tell() > 0) + json.dumps(fields))
            file.flush()
            os.fsync(file.fileno())

    def delete(self) -> None:
        """Remove the files of this evaluation, but not what another process is writing now."""
        for path in {*self.read, self.path}:
            path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # where another process of the run was faster
            if not list(self.folder.glob("*.jsonl")):
                shutil.rmtree(self.folder, ignore_errors=True)

    def _keep(self, batch: dict[str, Any]) -> None:
        rows = {
            (int(key[0]), int(key[1]), int(key[2])): (floats, predictions)
            for key, floats, predictions in zip(
                batch["keys"], batch["floats"], batch["predictions"], strict=True
            )
        }
        seconds = [float(value) for value in batch["seconds"]]
        if all(map(self._is_plausible, rows.values())) and len(seconds) == self.names - 1:
            self.known |= rows
            before = self.total_seconds or [0.0] * len(seconds)
            self.total_seconds = [a + b for a, b in zip(before, seconds, strict=True)]

    def _is_plausible(self, row: Row) -> bool:
        """Whether a row has its width, and scores that are probabilities."""
        floats, predictions = row
        probable = all(-ROUNDING <= score <= 1 + ROUNDING for score in floats[: self.names])
        finite = all(value == value for value in floats)
        return len(floats) == self.width and len(predictions) == self.names and probable and finite


def _keys(x: Tensor, y: Tensor, index: Tensor) -> list[Key]:
    return list(zip(index.tolist(), checksums(x), y.tolist(), strict=True))
