"""The record of an evaluation, image by image: a CSV file, and a card that says what it is."""

import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rob.files import atomic_write_text
from lightning_rob.ledger.columns import Columns

FIRST, LAST = ("index", "label"), ("worst", "broken_by", "draws", "pixels")


@dataclass(frozen=True)
class Ledger:
    """A record that was read.

    Args:
        path: the CSV file.
        card: what it is a record of, see `card_of`.
        index: [N] the images' indices, rising.
        label: [N].
        scores: name -> [N] in [0, 1]; "clean", each attack, and "worst", the strongest of them by
            `lightning_rob.evaluation.worst_case`.
        pixels: N checksums of the images.
    """

    path: Path
    card: dict[str, Any]
    index: Tensor
    label: Tensor
    scores: dict[str, Tensor]
    pixels: list[str]

    @property
    def attacks(self) -> list[str]:
        """Their names."""
        return [name for name in self.scores if name not in ("clean", "worst")]


def write_ledger(
    path: Path,
    columns: Columns,
    index: Tensor,
    means: Tensor,
    rows: Tensor,
    draws: int,
    card: dict[str, Any],
    worst: Tensor,
) -> None:
    """Write a record and, beside it, its card; neither is ever there in part.

    Args:
        path: the CSV file.
        columns: what the rows are.
        index: [N] the images' indices, rising.
        means: [N, names] scores, the mean over repeats and inferences.
        rows: [N, width] the rest.
        draws: S, how many classifiers an answer is made of.
        card: see `card_of`.
        worst: [N] scores under the strongest attack.
    """
    answers, sizes = columns.answers(rows).tolist(), columns.sizes(rows).tolist()
    labels, single = columns.labels(rows).tolist(), columns.single(rows).tolist()
    pixels = columns.pixels(rows)
    lines = [",".join(_head(columns))]
    for i, (place, scores) in enumerate(zip(index.tolist(), means.tolist(), strict=True)):
        cells = [str(place), str(labels[i])]
        for j, score in enumerate(scores):
            cells += [_number(score), str(answers[i][j])]
            cells += [f"{sizes[i][j]:.6g}"] if j else []
            cells += [_number(one) for one in single[i][j]] if columns.inferences > 1 else []
        low = min(scores)
        broken = columns.names[scores.index(low)] if low < scores[0] else ""
        cells += [
            _number(float(worst[i])),
            broken if scores[0] > 0 else "clean",
            str(draws),
            pixels[i],
        ]
        lines.append(",".join(cells))
    atomic_write_text(path.with_suffix(".json"), json.dumps(card, indent=1) + "\n")
    atomic_write_text(path, "\n".join(lines) + "\n")


def _head(columns: Columns) -> list[str]:
    cells = [*FIRST]
    for j, name in enumerate(columns.names):
        cells += [name, f"{name}_answer", *([f"{name}_size"] if j else [])]
        again = range(1, columns.inferences + 1) if columns.inferences > 1 else ()
        cells += [f"{name}_{number}" for number in again]
    return [*cells, *LAST]


def _number(value: float) -> str:
    return f"{value:.7g}"


def read_ledger(path: Path | str) -> Ledger:
    """Read a record.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is of another kind, or has no card.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no record {path}")
    try:
        card = json.loads(path.with_suffix(".json").read_text())
        with path.open(newline="") as file:
            head, *lines = list(csv.reader(file))
        names = ["clean", *card["attacks"], "worst"]
        places = [head.index(name) for name in (*FIRST, *names)]
        table = [[float(line[place]) for place in places] for line in lines]
        pixels = [line[head.index("pixels")] for line in lines]
    except FileNotFoundError as error:
        card_path = path.with_suffix(".json")
        raise ValueError(f"{path} is not a record: it has no card {card_path.name}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not a record of an evaluation: {error}") from error
    values = torch.tensor(table, dtype=torch.float64).reshape(-1, 2 + len(names))
    scores = dict(zip(names, values[:, 2:].unbind(1), strict=True))
    return Ledger(path, card, values[:, 0].long(), values[:, 1].long(), scores, pixels)
