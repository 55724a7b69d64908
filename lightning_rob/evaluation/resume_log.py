"""A log of finished batches, attack by attack, from which an interrupted evaluation resumes."""

import json
import os
import platform
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

Key = tuple[int, int, int, int]  # index, checksum and label of an image, checksum of its round
Row = tuple[list[float], int, float, list[float], float]  # the fields of an outcome, of one image


class BatchOutcome(NamedTuple):
    """Results of a batch under one attack, or without an attack."""

    scores: Tensor  # [B, R] probability of a right prediction or, attacked, also of a rejection
    predictions: Tensor  # [B] the most probable class; -1 where there is none
    sizes: Tensor  # [B] of the perturbations, in the threat's norm
    rejected: Tensor  # [B, R] probability of a rejection
    # [B] 1 where the attack asked for gradients and each was exactly zero or not finite, 0 where
    # one was of use, -1 where it asked for none
    blind: Tensor


def checksums(x: Tensor) -> list[int]:
    """Return the CRC-32 of each image [B, …], as float32."""
    images = x.detach().cpu().float().contiguous()
    return [crc32(image.numpy().tobytes()) for image in images]


class ResumeLog:
    """Outcomes of the batches that an evaluation has finished, in a folder of its own, if any.

    Each process appends a line of JSON per batch and attack to a file of its own.
    """

    def __init__(self, folder: Path | None, names: Sequence[str], joint: bool = False) -> None:
        self.names, self.joint = tuple(names), joint
        self.path = folder and folder / f"{platform.node()}-{os.getpid()}.jsonl"
        self.known: dict[tuple[str, Key], Row] = {}
        self.seconds = dict.fromkeys(self.names, 0.0)  # by name, on the known images
        found = sorted(folder.glob("*.jsonl")) if folder else []
        self.read = [path for path in found if path.is_file()]
        for path in self.read:
            for line in path.read_text(errors="replace").splitlines():
                with suppress(ValueError, KeyError):  # a kill may have broken off the last one
                    self._keep(json.loads(line))

    def load(self, x: Tensor, y: Tensor, index: Tensor) -> dict[str, BatchOutcome]:
        """Return, by name, what is known of all images [B, …], by index, pixels and label."""
        found, keys = {}, self._keys(x, y, index) if self.known else []
        for name in self.names:
            rows = [self.known[name, key] for key in keys if (name, key) in self.known]
            if rows and len(rows) == len(keys):
                found[name] = BatchOutcome(*map(torch.tensor, zip(*rows, strict=True)))
        return found

    def add(
        self, x: Tensor, y: Tensor, index: Tensor, name: str, outcome: BatchOutcome, seconds: float
    ) -> None:
        """Append a batch's results under one attack, and how long it took."""
        if self.path is None:
            return
        fields = {"name": name, "keys": self._keys(x, y, index), "seconds": round(seconds, 3)}
        for field, values in outcome._asdict().items():
            exact = values if field == "predictions" else values.float()
            fields[field] = exact.tolist()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            # The line break comes first, so that a line broken off before spoils no other.
            file.write("\n" * (file.tell() > 0) + json.dumps(fields))
            file.flush()  # and wait: what is on the disk outlives a kill of the machine
            os.fsync(file.fileno())

    def delete(self) -> None:
        """Remove the files of this evaluation, but not what another process is writing now."""
        if self.path is None:
            return
        for path in {*self.read, self.path}:
            path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # where another process of the run was faster
            if not list(self.path.parent.glob("*.jsonl")):
                shutil.rmtree(self.path.parent, ignore_errors=True)

    def _keep(self, line: dict[str, Any]) -> None:
        if (name := line["name"]) in self.names:
            outcomes = zip(*(line[field] for field in BatchOutcome._fields), strict=True)
            for (a, b, c, d), row in zip(line["keys"], outcomes, strict=True):
                self.known[name, (a, b, c, d)] = row
            self.seconds[name] += float(line["seconds"])

    def _keys(self, x: Tensor, y: Tensor, index: Tensor) -> list[Key]:
        # A result is reused for the same image only, pixel by pixel, with the same label.
        rows = list(zip(index.tolist(), checksums(x), y.tolist(), strict=True))
        # Where predictions depend on the whole batch, only the same batch has the same result.
        batch = crc32(str(rows).encode()) if self.joint else 0
        return [(*row, batch) for row in rows]
