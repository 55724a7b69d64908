"""What `RobustAudit` found of a run: its attacks, and what is not to be believed."""

from collections.abc import Iterator

from lightning_rob.report.blocks import Block, Details, Heading, Text
from lightning_rob.report.records import Fields
from lightning_rob.report.table import Cell, Table
from lightning_rob.report.words import images, percent

LOUD = ("severe", "warning")


def audited(audit: Fields, level: int) -> Iterator[Block]:
    """Warnings first, then the attacks, and what was looked at without a finding.

    Args:
        audit: the content of audit.json; empty where there is none.
        level: of the heading.
    """
    if not audit:
        return
    yield Heading(level, f"Audit: {audit.get('title', '')}")
    found = audit.get("findings", [])
    for finding in found:
        if finding["severity"] in LOUD:
            yield Text(f"{finding['text']} {finding['advice']}".strip(), "warning")
    if not any(finding["severity"] in LOUD for finding in found):
        yield Text("Nothing suspicious was found.")
    yield _attacks(audit)
    rest = [[f["name"], f["severity"], f["text"]] for f in found if f["severity"] not in LOUD]
    yield Details("What else was looked at", [Table("", ["check", "severity", "finding"], rest)])


def _attacks(audit: Fields) -> Table:
    rows = []
    for attack in audit.get("attacks", []):
        share, (low, high) = float(attack["accuracy"]), attack["interval"]
        cell = Cell(percent(share), f"{low:.1%} … {high:.1%}", shade=share)
        rows.append([attack["name"], str(attack["details"].get("ball", "")), cell])
    count = audit["attacks"][0]["n"] if audit.get("attacks") else 0
    caption = f"Accuracy on {images(count)} test images"
    return Table(caption, ["attack", "within", "accuracy>"], rows, kind="matrix")
