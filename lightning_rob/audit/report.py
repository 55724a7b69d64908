"""The report of an audit."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from lightning_rob.audit.target import AuditTarget
from lightning_rob.evaluation.findings import Columns, Finding, record
from lightning_rob.evaluation.records import Result, with_schema
from lightning_rob.tables import finding_lines, print_table

Check = Callable[[AuditTarget, Columns], Finding]


@dataclass(frozen=True)
class Report:
    """The report of an audit: accuracies, and findings with the most severe first."""

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
        lines = list(finding_lines(record(f) for f in self.findings if f.severity != "fine"))
        lines += [f"fine    {', '.join(fine)}"] if fine else []
        for line in lines:
            console.print(line, highlight=False)

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
