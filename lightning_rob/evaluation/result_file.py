"""The CSV file with the results of every image, and its card beside it."""

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rob.evaluation.records import SCHEMA, with_schema
from lightning_rob.evaluation.store import PerImageRows
from lightning_rob.runtime.files import atomic_write_text, check_regular

SLACK = 1e-5  # of a sum of float32 probabilities
FORMULA = tuple("=+-@\t\r\n'")  # what a spreadsheet takes for more than text


def as_text(name: str) -> str:
    """Return a name as a cell that a spreadsheet does not calculate; `name_of` reads it."""
    return f"'{name}" if name.startswith(FORMULA) else name


def name_of(cell: str) -> str:
    """Return the name in a cell that `as_text` wrote."""
    return cell.removeprefix("'")


def write_result_file(
    path: Path,
    names: Sequence[str],
    rows: PerImageRows,
    draws: int,
    card: Mapping[str, Any],
    worst: Tensor,
    more: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Write the CSV file with more columns and, beside it, its card."""

    def numbers(values: Tensor, digits: int = 7) -> list[str]:
        return ["" if math.isnan(v) else f"{v:.{digits}g}" for v in values.tolist()]

    means, inferences = rows.scores.mean(2), rows.scores.shape[2]
    unknown = torch.full_like(means, torch.nan)
    columns: dict[str, list[Any]] = {"index": rows.index.tolist(), "label": rows.label.tolist()}
    for j, name in enumerate(names):
        columns[name] = numbers(means[:, j])
        columns[f"{name}_prediction"] = rows.predictions[:, j].tolist()
        if j:
            columns[f"{name}_size"] = numbers(rows.sizes[:, j], digits=6)
            columns[f"{name}_blind"] = numbers(
                (unknown if rows.blind is None else rows.blind)[:, j]
            )
        if rows.rejected is not None:
            columns[f"{name}_rejected"] = numbers(rows.rejected[:, j].mean(1))
        for r in range(inferences) if inferences > 1 else ():
            columns[f"{name}_inference_{r + 1}"] = numbers(rows.scores[:, j, r])
    if rows.known_noise is not None:
        columns["known_noise"] = numbers(rows.known_noise)
    columns["worst"] = numbers(worst)
    broken_by = []  # the attack with the lowest score; "clean" for an image wrong without one
    for scores in means.tolist():
        lowest = min(scores)
        broke = names[scores.index(lowest)] if lowest < scores[0] else ""
        broken_by.append(as_text(broke if scores[0] > 0 else "clean"))
    columns["broken_by"] = broken_by
    columns["draws"] = [draws] * len(means)
    columns["checksum"] = rows.checksum.tolist()
    write_table(path, columns | {name: list(values) for name, values in (more or {}).items()}, card)


def write_table(path: Path, columns: Mapping[str, list[Any]], card: Mapping[str, Any]) -> None:
    """Write columns of equal length as CSV and a card beside it; neither ever exists in part."""
    table = io.StringIO()
    lines = csv.writer(table, lineterminator="\n")
    lines.writerow(map(as_text, columns))
    lines.writerows(zip(*columns.values(), strict=True))
    # The card comes first, so that no CSV file is ever without one.
    text = json.dumps(with_schema({"kind": "card", **card}), indent=1)
    atomic_write_text(path.with_suffix(".json"), text + "\n")
    atomic_write_text(path, table.getvalue())


@dataclass(frozen=True)
class ResultFile:
    """A CSV file of per-image results that was read, and its card."""

    path: Path
    card: dict[str, Any]
    index: Tensor
    label: Tensor
    scores: dict[str, Tensor]  # [N] of "clean", each attack, and "worst" (`worst_case`)
    checksum: Tensor
    draws: dict[str, Tensor]  # of several private draws the scores [N, R] by draw, without "worst"

    def by_defender(self, name: str) -> Tensor:
        """Return the scores [N, R] of R private draws, or their mean as one column."""
        return self.draws.get(name, self.scores[name][:, None])

    @property
    def attacks(self) -> list[str]:
        """The attacks' names."""
        return [name for name in self.scores if name not in ("clean", "worst")]


def read_result_file(path: Path | str) -> ResultFile:
    """Read the per-image results of an evaluation."""
    path = Path(path)
    card_path = path.with_suffix(".json")
    if not path.is_file():
        raise FileNotFoundError(f"there is no record {path}: name a CSV file in images/ of a run")
    try:
        check_regular(card_path)
        card = json.loads(card_path.read_text("utf-8"))
        if card["schema"] != SCHEMA:
            raise ValueError(f"its schema is {card['schema']}, this version reads {SCHEMA}")
        with path.open(newline="", encoding="utf-8") as file:
            head, *lines = list(csv.reader(file))
        head = list(map(name_of, head))
        columns = {name: [line[head.index(name)] for line in lines] for name in head}
        index, label, checksum = (
            torch.tensor([int(cell) for cell in columns[name]], dtype=torch.int64)
            for name in ("index", "label", "checksum")
        )

        def numbers(name: str) -> Tensor:
            return torch.tensor([float(cell) for cell in columns[name]], dtype=torch.float64)

        measured = ("clean", *card["attacks"])
        scores = {name: numbers(name) for name in (*measured, "worst")}
        draws, count = {}, card.get("private_draws", 1)
        for name in measured if count > 1 else ():
            own = [numbers(c) for c in head if re.fullmatch(rf"{re.escape(name)}_inference_\d+", c)]
            draws[name] = torch.stack(own, 1).reshape(len(index), count, -1).mean(2)
        if (index.diff() <= 0).any():
            raise ValueError("its images must be in the order of their indices, each once")
        values = torch.cat([*scores.values()])
        if len(odd := values[~((values >= -SLACK) & (values <= 1 + SLACK))]):
            raise ValueError(f"a score must be in [0, 1], got {odd[0]}")
    except FileNotFoundError as error:
        raise ValueError(f"{path} is not a record: it has no card {card_path.name}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path} is not a record of an evaluation: {error}") from error
    return ResultFile(path, card, index, label, scores, checksum, draws)
