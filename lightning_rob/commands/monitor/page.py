"""The state of a monitored run, and how its page shows it."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader

from lightning_rob.commands.monitor.history import JUDGED, AlarmState, Fields, History, seconds_of
from lightning_rob.commands.monitor.notify import kind_of
from lightning_rob.evaluation.results import WORST
from lightning_rob.tables import CLEAN

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


def view(name: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return what a template shows of a run of this name."""
    at, group = snapshot.evaluated_at, snapshot.group
    rows = list(checkpoints(snapshot.history))
    attacks = list(dict.fromkeys(name for row in rows for name in row["results"]))
    attacks.sort(key=lambda name: (name != CLEAN, name == WORST))
    found = {one["text"]: one for line in group[:-1] for one in line.get("findings", ())}
    return {
        "name": name,
        "short": Path(name).name,
        "alarm": snapshot.history.alarms().event,
        "queue": snapshot.queue,
        "waiting": snapshot.waiting,
        "since": None if at is None else time.time() - at,
        "newest": group[-1] if group else None,
        "results": group[:-1],
        "worst": next((line for line in group[:-1] if line["name"] == WORST), None),
        "findings": list(found.values()),
        "log": list(alarms_of(snapshot.history))[::-1],
        "attacks": attacks,
        "checkpoints": rows[::-1],
        "curves": {attack: curve(rows, attack) for attack in attacks},
    }


def checkpoints(history: History) -> Iterator[dict[str, Any]]:
    """Yield results and event of each evaluation by the last suite, in the order of training."""
    groups = [g for g in history.groups() if g[-1]["event"] == "evaluated"]
    for *results, event in sorted(groups, key=lambda group: group[-1]["position"]):
        if event["suite"] == groups[-1][-1]["suite"]:
            results_by_name = {line["name"]: line for line in results}
            yield {"change": None} | event | {"results": results_by_name}


def curve(rows: Sequence[Mapping[str, Any]], attack: str) -> list[tuple[float, float]]:
    """Return the points of a curve in a box of 600 by 200, over the order of checkpoints."""
    first, last = rows[0]["position"], rows[-1]["position"]
    known = [
        (row["position"] - first, row["results"][attack]["accuracy"])
        for row in rows
        if attack in row["results"]
    ]
    # A NaN has no place.
    return [(600 * x / max(last - first, 1), 200 * (1 - y)) for x, y in known if y == y]


def alarms_of(history: History) -> Iterator[Fields]:
    """Yield each alarm and recovery, with the time of its delivery by destination."""
    lines = list(history.lines)
    delivered = {(e["id"], e["to"]): e["date"] for e in lines if e.get("event") == "notified"}
    alarms = AlarmState()
    for event in (line for line in lines if line.get("event") in JUDGED):
        kind, alarms = kind_of(event, alarms), alarms.after(event)
        if kind:
            note = event.get("notify")
            to = note and {name: delivered.get((note["id"], name)) for name in note["to"]}
            yield {"kind": kind, "event": event, "to": to}


def ago(seconds: float) -> str:
    """Return a time span in the largest unit that gives a number of at least 2."""
    unit, _, size = next(each for each in UNITS if seconds >= each[1] or each[2] == 1)
    return f"{max(0, seconds) // size:.0f} {unit}"


TEMPLATES = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
TEMPLATES.filters |= {"ago": ago, "percent": "{:.1%}".format}
