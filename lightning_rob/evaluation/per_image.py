"""The results of every image, in memory and in a CSV file."""

import csv
import io
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_rob.evaluation.records import with_schema
from lightning_rob.evaluation.resume_log import BatchOutcome, ResumeLog, checksums
from lightning_rob.metrics import PerImage
from lightning_rob.runtime.files import atomic_write_text, check_regular

FORMULA = tuple("=+-@\t\r\n'")  # what a spreadsheet takes for more than text


def as_text(name: str) -> str:
    """Return a name as a cell that a spreadsheet does not calculate; `name_of` reads it."""
    return f"'{name}" if name.startswith(FORMULA) else name


def name_of(cell: str) -> str:
    """Return the name in a cell that `as_text` wrote."""
    return cell.removeprefix("'")


def predicted_class(probabilities: Tensor, rejects: int | None = None) -> Tensor:
    """Return the most probable class [B] of [B, K]; -1 for a rejected or non-finite prediction."""
    known = probabilities.nan_to_num()
    predicted = torch.where(known.sum(1) > 0, known.argmax(1), -1)
    return predicted if rejects is None else predicted.masked_fill(predicted == rejects, -1)


class PerImageResults:
    """Scores, predictions and perturbation sizes of every image, clean and under each attack.

    Args:
        names: A names, "clean" and those of the attacks.
        inferences: R, how many predictions of the defense each image has.
        device: where the batches are.
        folder: of the log from which an interrupted evaluation resumes; None keeps no log.
        joint: predictions depend on the whole batch.
    """

    def __init__(
        self,
        names: Sequence[str],
        inferences: int,
        device: torch.device | str = "cpu",
        folder: Path | None = None,
        joint: bool = False,
    ) -> None:
        self.names, self.inferences, self.folder = tuple(names), inferences, folder
        # Means; scores and rejections by inference; sizes; blindness; and predictions, label,
        # checksum, which are exact.
        self.floats = PerImage(len(names) * (2 * inferences + 3)).to(device)
        self.integers = PerImage(len(names) + 2, torch.int64).to(device)
        self.checksums: dict[int, int] = {}  # of this process's images, by index
        self.log: ResumeLog | None = None
        if folder is not None:
            self.log = ResumeLog(folder, names, inferences, joint)

    def cached(self, x: Tensor, y: Tensor, index: Tensor) -> dict[str, BatchOutcome]:
        """Return the outcomes of a batch that the log of an earlier run has, by name."""
        return {} if self.log is None else self.log.load(x, y, index)

    def log_outcome(
        self, x: Tensor, y: Tensor, index: Tensor, name: str, outcome: BatchOutcome, seconds: float
    ) -> None:
        """Write the outcome of a batch under one attack to the log, where there is one."""
        if self.log is not None:
            self.log.add(x, y, index, name, outcome, seconds)

    def add_batch(
        self, x: Tensor, y: Tensor, index: Tensor, outcomes: Sequence[BatchOutcome]
    ) -> None:
        """Add a batch.

        Args:
            x: [B, …] the clean images.
            y: [B] labels.
            index: [B].
            outcomes: one for each of the names.

        Raises:
            ValueError: two different images have the same index.
        """
        known = checksums(x)
        for number, checksum in zip(index.tolist(), known, strict=True):
            if self.checksums.setdefault(number, checksum) != checksum:
                raise ValueError(
                    f"two different images have the index {number}: give each image of a data set "
                    "an index of its own, and augment none"
                )
        here = [BatchOutcome(*(part.to(index.device) for part in one)) for one in outcomes]
        scores, predictions, sizes, rejected, blind = zip(*here, strict=True)
        means = torch.stack([score.mean(1) for score in scores], 1)
        single = [torch.stack(sizes, 1), torch.stack(blind, 1)]
        floats = torch.cat([means, *scores, *rejected, *single], 1).float()
        about = [*predictions, y, torch.tensor(known)]
        self.floats.update(index, floats.to(index.device))
        self.integers.update(index, torch.stack([part.long().to(index) for part in about], 1))

    def counts(self) -> dict[str, int]:
        """Return the number of images whose results the log has from an earlier run, by attack."""
        known = {} if self.log is None else self.log.counts()
        return {name: known[name] for name in self.names[1:] if name in known}

    def seconds(self) -> dict[str, float]:
        """Return how long each attack took on the images of an earlier run, by name."""
        return {} if self.log is None else {n: self.log.seconds[n] for n in self.names[1:]}

    def rows(self) -> "PerImageRows":
        """Return the results of all images; a collective of all processes."""
        index, floats = self.floats.rows()
        _, integers = self.integers.rows()
        count = len(self.names)
        both = floats[:, count : -2 * count].reshape(len(floats), 2, count, self.inferences)
        scores, rejected = both.unbind(1)
        predictions, label, checksum = torch.split(integers, [count, 1, 1], 1)
        sizes, blind = floats[:, -2 * count :].chunk(2, 1)
        blind = blind.masked_fill(blind < 0, torch.nan)
        return PerImageRows(
            index, label[:, 0], scores, predictions, sizes, checksum[:, 0], rejected, blind
        )

    def copy_images(self, folder: Path) -> None:
        """Copy the images that were saved beside the log to another folder."""
        for own in sorted(self.folder.iterdir()) if self.folder and self.folder.exists() else ():
            if own.is_dir():
                shutil.copytree(own, folder / own.name, dirs_exist_ok=True)

    def delete(self) -> None:
        """Remove this process's log, once the CSV file is written."""
        if self.log is not None:
            self.log.delete()


@dataclass(frozen=True)
class PerImageRows:
    """Results of N images, clean and under each attack.

    Args:
        index: [N] the images' indices, rising.
        label: [N].
        scores: [N, A, R] the probability, by inference, that the prediction is right; under an
            attack, that it is right or a rejection.
        predictions: [N, A] the most probable class; -1 where there is none.
        sizes: [N, A] of the perturbations, in the threat's norm.
        checksum: [N] CRC-32 of the images.
        rejected: [N, A, R] the probability that the prediction is a rejection, by inference; None
            of a defense that rejects nothing.
        blind: [N, A] 1 where an attack asked for gradients of the image, none of which was of use:
            each was exactly zero or not finite; 0 where one was, NaN where it asked for none.
    """

    index: Tensor
    label: Tensor
    scores: Tensor
    predictions: Tensor
    sizes: Tensor
    checksum: Tensor
    rejected: Tensor | None = None
    blind: Tensor | None = None


def write_result_file(
    path: Path,
    names: Sequence[str],
    rows: PerImageRows,
    draws: int,
    card: Mapping[str, Any],
    worst: Tensor,
) -> None:
    """Write the CSV file and, beside it, its card; neither ever exists in part.

    Args:
        path: of the CSV file.
        names: A names, "clean" and those of the attacks.
        rows: of all images.
        draws: S, the number of classifiers of a prediction.
        card: see `threat_model_card`, and all else that the results depend on.
        worst: [N] scores under the strongest attack.
    """
    table = io.StringIO()
    lines = csv.writer(table, lineterminator="\n")
    inferences = rows.scores.shape[2]
    rejecting = rows.rejected is not None
    lines.writerow(map(as_text, _head(names, inferences, rejecting)))
    for i, number in enumerate(rows.index.tolist()):
        single, sizes = rows.scores[i].tolist(), rows.sizes[i].tolist()
        means = rows.scores[i].mean(1).tolist()
        rejected = [] if rows.rejected is None else rows.rejected[i].mean(1).tolist()
        cells: list[str] = []
        for j, prediction in enumerate(rows.predictions[i].tolist()):
            cells += [f"{means[j]:.7g}", str(prediction)]
            cells += [f"{sizes[j]:.6g}", _flag(rows.blind, i, j)] if j else []
            cells += [f"{rejected[j]:.7g}"] if rejecting else []
            cells += [f"{score:.7g}" for score in single[j]] if inferences > 1 else []
        last = [
            f"{float(worst[i]):.7g}",
            as_text(_broken_by(names, means)),
            draws,
            int(rows.checksum[i]),
        ]
        lines.writerow([number, int(rows.label[i]), *cells, *last])
    text = json.dumps(with_schema({"kind": "card", **card}), indent=1)
    atomic_write_text(path.with_suffix(".json"), text + "\n")
    atomic_write_text(path, table.getvalue())


def _flag(blind: Tensor | None, image: int, attack: int) -> str:
    """Return "1" or "0", or "" where nothing is known."""
    known = torch.nan if blind is None else float(blind[image, attack])
    return "" if math.isnan(known) else f"{known:.0f}"


def _head(names: Sequence[str], inferences: int, rejecting: bool) -> list[str]:
    cells = ["index", "label"]
    for j, name in enumerate(names):
        cells += [name, f"{name}_prediction", *([f"{name}_size", f"{name}_blind"] if j else [])]
        cells += [f"{name}_rejected"] if rejecting else []
        several = range(1, inferences + 1) if inferences > 1 else ()
        cells += [f"{name}_inference_{number}" for number in several]
    return [*cells, "worst", "broken_by", "draws", "checksum"]


def _broken_by(names: Sequence[str], scores: Sequence[float]) -> str:
    """Return the attack with the lowest score; "clean" where the image is wrong without one."""
    if scores[0] <= 0:
        return "clean"
    lowest = min(scores)
    return names[scores.index(lowest)] if lowest < scores[0] else ""


@dataclass(frozen=True)
class ResultFile:
    """A CSV file of per-image results that was read.

    Args:
        path: the CSV file.
        card: what the results depend on, see `threat_model_card`.
        index: [N] the images' indices, rising.
        label: [N].
        scores: name -> [N] in [0, 1]; "clean", each attack, and "worst", the strongest of them by
            `worst_case`.
        checksum: [N] CRC-32 of the images.
    """

    path: Path
    card: dict[str, Any]
    index: Tensor
    label: Tensor
    scores: dict[str, Tensor]
    checksum: Tensor

    @property
    def attacks(self) -> list[str]:
        """The attacks' names."""
        return [name for name in self.scores if name not in ("clean", "worst")]


def read_result_file(path: Path | str) -> ResultFile:
    """Read the per-image results of an evaluation.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file is of another kind, or has no card.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no record {path}: name a CSV file in images/ of a run")
    try:
        check_regular(path.with_suffix(".json"))
        card = json.loads(path.with_suffix(".json").read_text())
        with path.open(newline="") as file:
            head, *lines = list(csv.reader(file))
        head = list(map(name_of, head))
        columns = {name: [line[head.index(name)] for line in lines] for name in head}
        index, label, checksum = (
            torch.tensor([int(cell) for cell in columns[name]], dtype=torch.int64)
            for name in ("index", "label", "checksum")
        )
        scores = {
            name: torch.tensor([float(cell) for cell in columns[name]], dtype=torch.float64)
            for name in ("clean", *card["attacks"], "worst")
        }
    except FileNotFoundError as error:
        card_path = path.with_suffix(".json")
        raise ValueError(f"{path} is not a record: it has no card {card_path.name}") from error
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise ValueError(f"{path} is not a record of an evaluation: {error}") from error
    return ResultFile(path, card, index, label, scores, checksum)
