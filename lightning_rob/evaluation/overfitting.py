"""Robust overfitting: the change since the best epoch, without the luck of choosing that epoch.

The best of many epochs is also the luckiest: of equally robust networks the last lies below it.
So the best epoch is chosen on every second image and compared with the last one on the others, then
the other way round. Where epochs are nearly equal the two choices make the halves depend on each
other, and an interval of 95 % would miss the truth too often; that of 98 % errs on either side in
at most 2.5 % of simulated fits (`benchmarks/overfitting.py`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Self

from torch import Tensor

from lightning_rob.evaluation.records import with_schema
from lightning_rob.metrics.gaffke import mean_interval

LEVEL = 0.98


class EpochScores(NamedTuple):
    """Robust scores in [0, 1] of one epoch, image by image."""

    epoch: int
    images: int  # a checksum of the validation images' indices and labels
    val: Tensor  # [N]


class Change(NamedTuple):
    """A mean change of accuracy with an interval that covers the true one in 95 % of fits."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        mean, low, high = (f"{100 * value:+.1f}" for value in self)
        return f"{mean} [{low}, {high}] points"


@dataclass(frozen=True)
class Overfitting:
    """How robust accuracy changed from the best epoch to the last one, and what that says."""

    best: tuple[int, int]  # epochs, each the best on one half of the validation images
    last: int
    images: int  # for validation
    val: Change

    @classmethod
    def of(cls, best: Sequence[EpochScores], last: EpochScores) -> Self:
        """Compare the last epoch with the best ones by even and by odd images (`better`)."""
        gaps = last.val.double().clone()
        for half, found in enumerate(best):
            gaps[1 - half :: 2] -= found.val[1 - half :: 2]
        val = Change(float(gaps.mean()), *mean_interval(gaps.clamp(-1, 1).numpy(), LEVEL))
        return cls((best[0].epoch, best[1].epoch), last.epoch, len(last.val), val)

    @property
    def found(self) -> bool:
        """Whether robust accuracy fell, beyond its interval."""
        return self.val.high < 0

    def __str__(self) -> str:
        if {*self.best} == {self.last}:
            return f"no robust overfitting: the last measured epoch, {self.last}, is the best"
        fell = "robust accuracy fell" if self.found else "no robust overfitting is seen"
        since = " and ".join(map(str, dict.fromkeys(self.best)))
        span = f"from epoch {since} to {self.last} {self.val}"
        return f"{fell}: {span} on {self.images} validation images"

    def record(self) -> dict[str, Any]:
        """Return the record as plain data."""
        said = {"kind": "overfitting", "found": self.found, "text": str(self)}
        return with_schema(said | asdict(self))


def better(best: Sequence[EpochScores], new: EpochScores) -> Sequence[EpochScores]:
    """Return the best epoch by even and by odd validation images, the first of equals."""
    found = []
    for half, one in enumerate(best or (new, new)):
        rises = new.val[half::2].mean() > one.val[half::2].mean()
        found.append(new if rises else one)
    return found
