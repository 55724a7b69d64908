"""Findings of an audit, how much evidence a finding needs, and the report."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from torch import Tensor

from lightning_rob.audit.target import AuditTarget
from lightning_rob.evaluation.records import Result, with_schema
from lightning_rob.tables import print_table

Severity = Literal["severe", "warning", "note", "fine"]
STYLES: dict[Severity, str] = {  # the most severe first
    "severe": "bold red",
    "warning": "yellow",
    "note": "cyan",
    "fine": "",
}
FEWEST, LEAST_SHARE = 2, 0.02  # one image, or one in fifty, is no evidence
Columns = Mapping[str, Tensor]  # per image [N]: a score in [0, 1], or 1 where a condition holds


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Args:
        severity: "severe", an accuracy measured here cannot be trusted; "warning", look at it;
            "note", of interest, or not checked; "fine".
        text: the finding in plain words.
        advice: the remedy; empty where there is nothing to do.
        values: the measurements behind it.
        name: of the check; set by the audit.
    """

    severity: Severity
    text: str
    advice: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def flagged(self) -> bool:
        """Whether it is severe or a warning."""
        return self.severity in ("severe", "warning")


Check = Callable[[AuditTarget, Columns], Finding]


def not_checked(reason: str) -> Finding:
    """Return the note that a check could not be made; no check is silent."""
    return Finding("note", f"Not checked: {reason}.", values={"run": False})


def images_finding(
    found: Tensor, fine: str, text: str, advice: str, few: Severity = "fine"
) -> Finding:
    """Return the severe finding that a condition holds for `many` images [N], or that it is fine.

    `few` is the severity where it holds for some images, but not for many.
    """
    severity = "severe" if many(found) else few if (found > 0).any() else "fine"
    if severity == "fine":
        return Finding("fine", fine, values=means(images=found))
    return Finding(severity, text, advice, means(images=found))


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
    count = len(difference)
    error = float(difference.std()) / count**0.5 if count > 1 else float("inf")
    return float(difference.mean()) > 2 * error


def is_gain(difference: Tensor, exact: bool) -> bool:
    """Return whether a difference of scores [N] counts; only noisy scores need significance."""
    return many(difference) if exact else significant(difference)


def percent(column: Tensor) -> str:
    """Return the mean of a column as text: "41 %"."""
    return f"{100 * mean(column):.3g} %"


def images_of(column: Tensor) -> str:
    """Return the number of positive entries as text: "43 of 50 images"."""
    return f"{int((known(column) > 0).sum())} of {len(known(column))} images"


@dataclass(frozen=True)
class Report:
    """The report of an audit.

    Args:
        title: the defense and its kind, in words.
        results: the accuracy on clean images, under each attack, and the worst case.
        findings: the most severe first.
    """

    title: str
    results: list[Result]
    findings: list[Finding]

    @property
    def flags(self) -> list[Finding]:
        """The findings that are severe or warnings."""
        return [finding for finding in self.findings if finding.flagged]

    @property
    def severe(self) -> bool:
        """Whether a finding is severe."""
        return any(finding.severity == "severe" for finding in self.findings)

    def summary(self) -> str:
        """Return the verdict in one line."""
        flags, severe = len(self.flags), sum(flag.severity == "severe" for flag in self.flags)
        if severe:
            return f"Do not trust the accuracies: {severe} of {flags} flags are severe."
        if flags:
            return f"Look at the warnings before you trust the accuracies: {flags}."
        return "Nothing suspicious was found."

    def show(self, console: Console | None = None) -> None:
        """Print the accuracies as a table, then the findings with their remedies."""
        console = console or Console()
        print_table(f"Audit · {self.title}", self.results, console)
        console.print(self.summary(), style="bold")
        fine = [finding.name for finding in self.findings if finding.severity == "fine"]
        lines = []
        for finding in (f for f in self.findings if f.severity != "fine"):
            severity = f"[{STYLES[finding.severity]}]{finding.severity:7}[/]"
            lines.append(f"{severity} {finding.name}: {escape(finding.text)}")
            lines += [f"        → {escape(finding.advice)}"] if finding.advice else []
        lines += [f"fine    {', '.join(fine)}"] if fine else []
        for line in lines:
            console.print(line, highlight=False)

    def markdown(self) -> str:
        """Return the report as Markdown, for loggers that show text."""
        rows = [f"| {r.name} | {r.details['ball']} | {r.accuracy:.1%} |" for r in self.results]
        lines = [f"**{self.summary()}** {self.title}", "", "| attack | within | accuracy |"]
        lines += ["|---|---|---|", *rows, ""]
        for finding in self.findings:
            advice = f" *{finding.advice}*" if finding.advice else ""
            lines.append(f"- **{finding.severity}** {finding.name}: {finding.text}{advice}")
        return "\n".join(lines)

    def json(self, metadata: Mapping[str, Any]) -> str:
        """Return the report as JSON, together with the metadata of the run."""
        content = {
            "kind": "audit",
            **metadata,
            "title": self.title,
            "attacks": [result.record() for result in self.results],
            "findings": [{"name": f.name, **asdict(f)} for f in self.findings],
        }
        return json.dumps(with_schema(content), indent=2, ensure_ascii=False) + "\n"
