"""An audit's report for readers: in the terminal, for TensorBoard, as JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape

from lightning_rob.audit.finding import Finding
from lightning_rob.evaluation.records import Result, with_schema
from lightning_rob.tables import print_table

STYLES = {"severe": "bold red", "warning": "yellow", "note": "cyan"}


@dataclass(frozen=True)
class Report:
    """What an audit found.

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
        """One line: is there anything suspicious?"""
        if not self.flags:
            return "Nothing suspicious was found."
        severe = sum(finding.severity == "severe" for finding in self.flags)
        if severe:
            return f"The accuracies are not to be believed: {severe} severe of {len(self.flags)}."
        return f"Look at these before you believe the accuracies: {len(self.flags)}."

    def show(self, console: Console | None = None) -> None:
        """Print the accuracies as a table, what was found and what to do about it."""
        console = console or Console()
        print_table(f"Audit · {self.title}", self.results, console)
        console.print(self.summary(), style="bold")
        for finding in self.findings:
            if finding.severity == "fine":
                continue
            severity = f"[{STYLES[finding.severity]}]{finding.severity:7}[/]"
            console.print(f"{severity} {finding.name}: {escape(finding.text)}", highlight=False)
            if finding.advice:
                console.print(f"        → {escape(finding.advice)}", highlight=False)
        if fine := [finding.name for finding in self.findings if finding.severity == "fine"]:
            console.print(f"fine    {', '.join(fine)}", highlight=False)

    def markdown(self) -> str:
        """The report for TensorBoard."""
        rows = [f"| {r.name} | {r.details['ball']} | {r.accuracy:.1%} |" for r in self.results]
        lines = [f"**{self.summary()}** {self.title}", "", "| attack | within | accuracy |"]
        lines += ["|---|---|---|", *rows, ""]
        for finding in self.findings:
            advice = f" *{finding.advice}*" if finding.advice else ""
            lines.append(f"- **{finding.severity}** {finding.name}: {finding.text}{advice}")
        return "\n".join(lines)

    def json(self, shared: Mapping[str, Any]) -> str:
        """All of it, beside what else belongs in the file."""
        found = [result.record() for result in self.results]
        findings = [asdict(finding) for finding in self.findings]
        content = {
            "kind": "audit",
            **shared,
            "title": self.title,
            "attacks": found,
            "findings": findings,
        }
        return json.dumps(with_schema(content), indent=2, ensure_ascii=False) + "\n"
