"""The state of a monitored run, and its page, made of the blocks of a report."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Template
from markupsafe import Markup

from lightning_rob.commands.monitor.history import JUDGED, Fields, History, alarm_after, seconds_of
from lightning_rob.commands.monitor.notify import kind_of
from lightning_rob.commands.report.blocks import (
    NONE,
    Block,
    Cell,
    Heading,
    Headline,
    Paragraph,
    Warned,
    html,
    table,
)
from lightning_rob.commands.report.runs import attack_result
from lightning_rob.commands.report.sections import checkpoints, evaluation

UNITS = (("days", 2 * 86400, 86400), ("h", 7200, 3600), ("min", 120, 60), ("s", 0, 1))


@dataclass(frozen=True)
class Snapshot:
    """The state of a source."""

    group: Sequence[Fields]  # lines of the newest checkpoint, their event last; may be empty
    history: History
    queue: int  # checkpoints that wait, with the one that is being evaluated
    waiting: Mapping[str, int]  # undelivered notifications by destination
    looked_at: float = field(default_factory=time.time)  # Unix time

    @property
    def evaluated_at(self) -> float | None:
        """The end of the last evaluation, Unix time."""
        dates = [event["date"] for event in self.history.events("evaluated")]
        return seconds_of(dates[-1]) if dates else None


def newest_group(history: History, suite: str) -> list[Fields]:
    """Return the lines of the last evaluation of the newest checkpoint by a suite."""
    groups = [g for g in history.groups() if g[-1]["event"] == "evaluated"]
    groups = [g for g in groups if g[-1]["suite"] == suite]
    # Reversed, because max returns the first of equal positions, and the later one counts.
    return max(reversed(groups), key=lambda group: group[-1]["position"], default=[])


def page(template: Template, snapshots: Mapping[str, Snapshot], now: Sequence[Block]) -> str:
    """Return the page of some runs by name, which begins with the blocks `now`."""
    sections: list[Markup] = [html(now)]
    if len(snapshots) > 1:
        sections.append(html([overview(snapshots)]))
    for i, (name, snapshot) in enumerate(snapshots.items()):
        sections.append(html(section(name, snapshot, f"run-{i}")))
    title = f"Monitor of {', '.join(Path(name).name for name in snapshots)}"
    return template.render(title=title, sections=sections)


def overview(snapshots: Mapping[str, Snapshot]) -> Block:
    """Return a row for each run, linked to its section."""
    rows = []
    for i, (name, snapshot) in enumerate(snapshots.items()):
        state = "ALARM" if snapshot.history.alarm() else "no alarm"
        rows.append([Cell(name, link=f"run-{i}"), state, str(snapshot.queue)])
    return table("All models", ["model", "state", "checkpoints that wait>"], rows)


def section(name: str, snapshot: Snapshot, place: str) -> Iterator[Block]:
    """Yield what there is to know of a run, under a heading with the `id` place."""
    alarm, at = snapshot.history.alarm(), snapshot.evaluated_at
    yield Heading(1, f"Monitor of {Path(name).name}", place)
    yield Paragraph(name, "note")
    state = ("ALARM", f"since {alarm['date']}") if alarm else ("no alarm", "is open")
    yield Headline(
        [
            state,
            (str(snapshot.queue), "checkpoints wait for evaluation"),
            (NONE if at is None else ago(time.time() - at), "since the last evaluation"),
            (ago(time.time() - snapshot.looked_at), "since the last look into the folder"),
        ]
    )
    if alarm:
        of = alarm.get("checkpoint", "the end of the monitor")
        yield from (Warned(f"{of}: {reason}", "Alarm") for reason in alarm["alarm"])
    for to, count in snapshot.waiting.items():
        if count:
            yield Warned(f"{to} has not accepted {count} of the notifications; they are repeated")
    if snapshot.group:
        *lines, newest = snapshot.group
        yield Heading(2, f"The newest checkpoint: {newest['checkpoint']}")
        facts = f"Step {newest['step']}, epoch {newest['epoch']}, evaluated {newest['date']}"
        yield Paragraph(f"{facts}; SHA-256 of the weights {newest['weights']}.", "note")
        results = [attack_result(line | {"stage": "test"}) for line in lines]
        yield from evaluation([result for result in results if result])
    rows = list(alarms_of(snapshot.history))[::-1]
    yield Heading(2, "Alarms and recoveries")
    if rows:
        yield table("The latest first", ["event", "of", "reason", "notified"], rows)
    else:
        yield Paragraph("There was no alarm.")
    yield from checkpoints(list(snapshot.history.lines), 2)


def alarms_of(history: History) -> Iterator[list[object]]:
    """Yield a row for each alarm and recovery, with the time of its delivery by destination."""
    lines = list(history.lines)
    delivered = {(e["id"], e["to"]): e["date"] for e in lines if e.get("event") == "notified"}
    alarm: Fields | None = None
    for event in (line for line in lines if line.get("event") in JUDGED):
        kind, alarm = kind_of(event, alarm), alarm_after(alarm, event)
        if kind:
            note = event.get("notify", {"id": "", "to": ()})
            dates = [f"{to} {delivered.get((note['id'], to), 'not yet')}" for to in note["to"]]
            of = Cell(event.get("checkpoint", "the end of the monitor"), event["date"])
            reason = "; ".join(event.get("alarm", ())) or "no alarm any more"
            yield [kind, of, reason, ", ".join(dates) or "not sent: there was no --notify"]


def ago(seconds: float) -> str:
    """Return a time span in the largest unit that gives a number of at least 2."""
    unit, _, size = next(each for each in UNITS if seconds >= each[1] or each[2] == 1)
    return f"{max(0, seconds) // size:.0f} {unit}"
