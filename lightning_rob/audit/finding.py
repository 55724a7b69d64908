"""What an audit says, and how much has to be seen before it says it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

Severity = Literal["severe", "warning", "note", "fine"]
SEVERITIES: tuple[Severity, ...] = ("severe", "warning", "note", "fine")
Columns = Mapping[str, Tensor]  # of each image [N]: a score in [0, 1], or whether something holds
FEWEST, LEAST_SHARE = 2, 0.02  # one image, or one in fifty, is chance


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Args:
        name: the check's.
        severity: "severe", a figure measured here is not to be believed; "warning", look at it;
            "note", of interest, or not checked; "fine".
        text: what was found, in plain words.
        advice: what to do; empty where there is nothing to do.
        figures: the numbers behind it.
    """

    name: str
    severity: Severity
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def flagged(self) -> bool:
        """Whether it is severe or a warning."""
        return self.severity in ("severe", "warning")


Check = Callable[[Any, Columns], Finding]


def known(column: Tensor) -> Tensor:
    """The part of a column [N] that was measured."""
    return column[~column.isnan()]


def share(column: Tensor) -> float:
    """The mean of what was measured of a column [N]; NaN where nothing was."""
    return float(known(column).mean()) if len(known(column)) else float("nan")


def many(lost: Tensor) -> bool:
    """Whether a column [N] adds up to two images (or all there are) and more than 2 %."""
    lost = known(lost)
    enough = len(lost) > 0 and float(lost.sum()) >= min(FEWEST, len(lost)) - 1e-6
    return enough and float(lost.mean()) > LEAST_SHARE


def beyond_chance(lost: Tensor) -> bool:
    """Whether it is `many`, and more than twice the standard error of the mean.

    For differences [N] between two attacks on a defense that answers by chance.
    """
    if not many(lost):
        return False
    lost = known(lost)
    error = float(lost.std()) / len(lost) ** 0.5 if len(lost) > 1 else float("inf")
    return float(lost.mean()) > 2 * error


def gains(lost: Tensor, exact: bool) -> bool:
    """Whether a difference of scores [N] is more than chance, which exact answers have not."""
    return many(lost) if exact else beyond_chance(lost)


def percent(column: Tensor) -> str:
    """The mean of a column in words: "41 %"."""
    return f"{100 * share(column):.3g} %"


def of_images(column: Tensor) -> str:
    """How many images it is, in words: "43 of 50 images"."""
    return f"{int((known(column) > 0).sum())} of {len(known(column))} images"


def not_run(name: str, reason: str) -> Finding:
    """A check that was not made is never silent."""
    return Finding(name, "note", f"Not checked: {reason}.", figures={"run": False})
