"""The state of a source, as its metrics and its page show it."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lightning_rob.commands.monitor.history import (
    Fields,
    History,
    Identity,
    identity,
    seconds_of,
)


@dataclass(frozen=True)
class Snapshot:
    """The state of a source.

    Args:
        group: lines of the newest checkpoint, the last of which is their event; may be empty.
        history: record of the run.
        queue: number of checkpoints that wait, with the one that is being evaluated.
        waiting: undelivered notifications by destination.
        looked_at: time of the look into the folder, Unix time.
    """

    group: Sequence[Fields]
    history: History
    queue: int
    waiting: Mapping[str, int]
    looked_at: float = field(default_factory=time.time)

    @property
    def counts(self) -> dict[str, int]:
        """Numbers of events since the history began."""
        events = Counter(line["event"] for line in self.history.lines if "event" in line)
        alarms = sum(len(line.get("alarm", ())) for line in self.history.lines)
        names = {"evaluations": "evaluated", "missed": "missed", "broken": "broken"}
        return {"alarms": alarms} | {name: events[kind] for name, kind in names.items()}

    @property
    def evaluated_at(self) -> float | None:
        """The end of the last evaluation, Unix time."""
        dates = [event["date"] for event in self.history.events("evaluated")]
        return seconds_of(dates[-1]) if dates else None


def newest_first(steps: Mapping[Identity, int], history: History) -> list[Identity]:
    """Return the checkpoints, the newest first: of a step the one that was first evaluated later.

    Args:
        steps: training step of each checkpoint.
        history: record of the run.
    """
    first = list(dict.fromkeys(map(identity, history.events("evaluated"))))
    place = {one: number for number, one in enumerate(first)}
    return sorted(steps, key=lambda one: (steps[one], place.get(one, len(first))), reverse=True)


def newest_group(history: History, suite: str, present: Sequence[Identity]) -> list[Fields]:
    """Return the last evaluation of the newest checkpoint, of those whose files are there if any.

    Args:
        history: record of the run.
        suite: key of the suite.
        present: checkpoints whose files are there, the newest first.
    """
    groups = [g for g in history.groups() if g[-1]["event"] == "evaluated"]
    groups = [g for g in groups if g[-1]["suite"] == suite]
    last = {identity(group[-1]): group for group in groups}
    found = next((last[one] for one in present if one in last), None)
    # Of equal positions max returns the first, and the later one counts.
    return found or max(reversed(groups), key=lambda g: g[-1]["position"], default=[])
