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

    def __init__(self, folder: Path | None, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.path = folder and folder / f"{platform.node()}-{os.getpid()}.jsonl"
        self.known: dict[tuple[str, int], BatchOutcome] = {}  # by name and batch
        self.seconds = dict.fromkeys(self.names, 0.0)  # by name, on the known images
        self.notes: dict[str, list[dict[str, Any]]] = {}  # by name, what was noticed
        found = sorted(folder.glob("*.jsonl")) if folder else []
        self.read = [path for path in found if path.is_file()]
        for path in self.read:
            for text in path.read_text("utf-8", "replace").splitlines():
                with suppress(ValueError, KeyError):  # a kill may have broken off the last one
                    line = json.loads(text)
                    parts = (torch.tensor(line[field]) for field in BatchOutcome._fields)
                    self.known[line["name"], line["batch"]] = BatchOutcome(*parts)
                    self.seconds[line["name"]] += line["seconds"]
                    self.notes.setdefault(line["name"], []).append(line["noted"])

    def load(self, x: Tensor, y: Tensor, index: Tensor) -> dict[str, BatchOutcome]:
        """Return, by name, what is known of a batch with these images [B, …], labels, indices."""
        batch = _checksum(x, y, index) if self.known else 0
        found = {name: self.known.get((name, batch)) for name in self.names}
        return {name: outcome for name, outcome in found.items() if outcome is not None}

    def add(
        self,
        x: Tensor,
        y: Tensor,
        index: Tensor,
        name: str,
        outcome: BatchOutcome,
        seconds: float,
        noted: dict[str, Any] | None = None,
    ) -> None:
        """Append a batch's results under one attack, how long it took, and what was noticed."""
        if self.path is None:
            return
        fields = {"name": name, "batch": _checksum(x, y, index), "seconds": round(seconds, 3)}
        fields["noted"] = noted or {}
        for field, values in outcome._asdict().items():
            exact = values if field == "predictions" else values.float()
            fields[field] = exact.tolist()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
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


def _checksum(x: Tensor, y: Tensor, index: Tensor) -> int:
    """Return a number for a batch: a result is reused for the same pixels and labels only."""
    rows = zip(index.tolist(), checksums(x), y.tolist(), strict=True)
    return crc32(str(list(rows)).encode())
