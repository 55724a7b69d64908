"""Findings of checks, and how much evidence a finding needs."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from lightning_rob.runtime.errors import FindingWarning
from lightning_rob.tables import SEVERITIES, joined

Severity = Literal["severe", "warning", "note", "fine"]
FLAGGED: tuple[Severity, ...] = ("severe", "warning")
FEWEST, LEAST_SHARE = 2, 0.02  # one image, or one in fifty, is no evidence
Columns = Mapping[str, Tensor]  # per image [N]: a score in [0, 1], or 1 where a condition holds


@dataclass(frozen=True)
class Finding:
    """The outcome of the check `name`: a finding in plain words, its remedy and measurements."""

    severity: Severity  # "severe": an accuracy cannot be trusted; "note": also of no check made
    text: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def flagged(self) -> bool:
        """Whether it is severe or a warning."""
        return self.severity in FLAGGED


def not_checked(reason: str) -> Finding:
    """Return the note that a check could not be made; no check is silent."""
    return Finding("note", f"Not checked: {reason}.", values={"run": False})


def images_finding(
    found: Tensor, fine: str, text: str, advice: str, few: Severity = "fine"
) -> Finding:
    """Return the finding that a condition holds for `many` images [N], for `few` or for none."""
    severity = "severe" if many(found) else few if (found > 0).any() else "fine"
    said = (fine, "") if severity == "fine" else (text, advice)
    return Finding(severity, *said, means(images=found))


def known(column: Tensor) -> Tensor:
    """Return the part of a column [N] that was measured."""
    return column[~column.isnan()]


def mean(column: Tensor) -> float:
    """Return the mean of the measured part of a column [N]; NaN without any."""
    return float(known(column).mean()) if len(known(column)) else float("nan")


def means(**columns: Tensor) -> dict[str, Any]:
    """Return the mean of each column by its name, for the values of a finding."""
    return {name: mean(column) for name, column in columns.items()}


def many(column: Tensor) -> bool:
    """Return whether a column [N] adds up to two images (or all there are) and more than 2 %."""
    column = known(column)
    enough = len(column) > 0 and float(column.sum()) >= min(FEWEST, len(column)) - 1e-6
    return enough and float(column.mean()) > LEAST_SHARE


def significant(difference: Tensor) -> bool:
    """Return whether a difference of scores [N] is `many` and over two standard errors."""
    if not many(difference):
        return False
    difference = known(difference)
    if len(difference) < 2:
        return False
    error = float(difference.std()) / len(difference) ** 0.5
    return bool(float(difference.mean()) > 2 * error)


def is_gain(difference: Tensor, exact: bool) -> bool:
    """Return whether a difference of scores [N] counts; only noisy scores need significance."""
    return many(difference) if exact else significant(difference)


def percent(column: Tensor) -> str:
    """Return the mean of a column as text: "41 %"."""
    return f"{100 * mean(column):.3g} %"


def images_of(column: Tensor) -> str:
    """Return the number of positive entries as text: "43 of 50 images"."""
    return f"{int((known(column) > 0).sum())} of {len(known(column))} images"


def record(finding: Finding) -> dict[str, str]:
    """Return what a record of an evaluation has of a finding: name, severity, text and advice."""
    return {name: getattr(finding, name) for name in ("name", "severity", "text", "advice")}


def warn_of(findings: Iterable[Finding]) -> None:
    """Warn of each finding that is severe or a warning."""
    for one in joined(record(finding) for finding in findings if finding.flagged):
        warnings.warn(f"{one['name']}: {one['text']}", FindingWarning, stacklevel=3)


def by_severity(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, the most severe first."""
    return sorted(findings, key=lambda finding: list(SEVERITIES).index(finding.severity))
