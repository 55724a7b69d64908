"""The record of a sweep: figures by all that they depend on, so that none is measured twice."""

import base64
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rob.evaluation.records import Result, append_records

Scores = tuple[Tensor, Tensor]  # indices [N], rising, and scores [N, R] by inference


def packed(tensor: Tensor) -> str:
    """A tensor as text."""
    return base64.b64encode(zlib.compress(tensor.numpy().tobytes())).decode()


def unpacked(text: str, dtype: type) -> Tensor:
    """The tensor [N] that `packed` made the text of."""
    content = zlib.decompress(base64.b64decode(text))
    return torch.from_numpy(np.frombuffer(content, dtype).copy())


def kept(key: str, images: Tensor, scores: Tensor) -> dict[str, Any]:
    """The part of a record by which it is used again: its key, and each image's scores [N, R]."""
    gaps = images.diff(prepend=torch.zeros(1, dtype=torch.int64))
    text = packed(scores.float().contiguous())
    return {"reuse": {"key": key, "images": packed(gaps), "scores": text}}


def scores_of(reuse: dict[str, Any]) -> Scores:
    """Each image's scores, as they were recorded."""
    images = unpacked(reuse["images"], np.int64).cumsum(0)
    scores = unpacked(reuse["scores"], np.float32).double()
    return images, scores.reshape(len(images), -1) if len(images) else scores.reshape(0, 1)


class Points:
    """The figures in a file, one line for each value and attack.

    Args:
        path: the file; what is no whole line in it, after a crash, is passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: dict[str, Result] = {}
        self.values: set[tuple[str, str, str]] = set()
        for result in _read(path):
            self._take(result)

    def __contains__(self, key: str) -> bool:
        return key in self.found

    def __getitem__(self, key: str) -> Result:
        return self.found[key]

    def add(self, results: list[Result], write: bool) -> None:
        """Take up figures, and write those of them that the file has not for their value."""
        places = {self._place(result): result for result in results}
        new = [result for place, result in places.items() if place not in self.values]
        for result in new:
            self._take(result)
        if write and new:
            if self.path.exists() and not self.path.read_bytes().endswith(b"\n"):
                with self.path.open("a") as file:  # end the line that a crash broke off
                    file.write("\n")
            append_records(self.path, (result.record() for result in new))

    def _take(self, result: Result) -> None:
        self.found.setdefault(result.details["reuse"]["key"], result)
        self.values.add(self._place(result))

    def _place(self, result: Result) -> tuple[str, str, str]:
        details = result.details
        return details["variable"], repr(float(details["value"])), details["reuse"]["key"]


def _read(path: Path) -> Iterator[Result]:
    for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            fields = json.loads(line)
            result = Result.from_record(fields)
            scores_of(fields["reuse"]), fields["variable"], float(fields["value"])
        except (ValueError, KeyError, TypeError, AttributeError, zlib.error):
            continue
        yield result
