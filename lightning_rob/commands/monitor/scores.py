"""Per-image scores of recorded results, as `.npz` files beside the records that name them."""

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_rob.evaluation import EvaluationResult
from lightning_rob.runtime.files import atomic_write, check_regular

Scores = tuple[Tensor, Tensor]  # indices [N], rising, and scores [N, R] by inference
UNREADABLE = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error)


def scores_by_name(result: EvaluationResult) -> dict[str, Scores]:
    """Return the scores of each column of a result, on the CPU."""
    index = result.index.cpu()
    return {name: (index, result.scores[:, i].cpu()) for i, name in enumerate(result.names)}


@dataclass(frozen=True)
class ScoreFiles:
    """A folder of files KEY.npz with arrays `index` [N], `scores` [N, R] and `key`."""

    folder: Path
    name: str

    def reference(self, key: str) -> dict[str, str]:
        """Return the field `reuse` of a record: the result's key, and its file."""
        return {"key": key, "scores": f"{self.name}/{key}.npz"}

    def write(self, key: str, scores: Scores) -> None:
        """Write the scores of a result; a kill leaves the whole file or none."""
        index, table = (part.cpu().numpy() for part in scores)

        def save(draft: Path) -> None:
            with draft.open("wb") as file:  # given a name, numpy would add a suffix
                np.savez_compressed(file, index=index, scores=table, key=np.array(key))

        atomic_write(self.folder / self.name / f"{key}.npz", save)

    def read(self, record: Mapping[str, Any]) -> Scores | None:
        """Return the scores that a record names; None if its file is missing or refused."""
        try:
            reuse, images = record["reuse"], int(record["n"])
            place = PurePosixPath(reuse["scores"])
            if place.is_absolute() or ".." in place.parts:
                return None  # a record of a stranger must not make us read other files
            check_regular(self.folder / place)
            with np.load(self.folder / place, allow_pickle=False) as content:
                index, scores, key = (content[name] for name in ("index", "scores", "key"))
        except UNREADABLE:
            return None
        fits = key == reuse["key"] and index.shape == (images,) and scores.shape[:1] == (images,)
        numeric = index.dtype == np.int64 and scores.dtype.kind == "f" and scores.ndim == 2
        return (torch.from_numpy(index), torch.from_numpy(scores)) if fits and numeric else None
