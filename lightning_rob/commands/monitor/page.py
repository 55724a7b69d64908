"""The page of a monitor: open alarm, figures by checkpoint, deliveries, and its own state."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lightning_rob.commands.monitor.history import (
    JUDGED,
    AlarmState,
    Fields,
    History,
    as_record,
    timestamp,
)
from lightning_rob.commands.monitor.notify import kind_of
from lightning_rob.commands.monitor.server import Health
from lightning_rob.commands.monitor.snapshot import Snapshot
from lightning_rob.commands.report.blocks import (
    Block,
    Cell,
    heading,
    headline,
    paragraph,
    table,
    warning,
)
from lightning_rob.commands.report.evaluation import evaluation
from lightning_rob.commands.report.formatting import NONE, accuracy_cell
from lightning_rob.commands.report.monitor import checkpoints
from lightning_rob.commands.report.page import page
from lightning_rob.commands.report.runs import attack_result, readable
from lightning_rob.evaluation.results import WORST

REFRESH = 30  # seconds
HELD = "refresh=off"  # the query of a page that does not refresh itself
HEADERS = [
    ("Server", "lightning-rob"),
    ("Content-Type", "text/html; charset=utf-8"),
    # The page has neither scripts nor forms, and loads nothing; its style is inline.
    (
        "Content-Security-Policy",
        "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-store"),
]
UNITS = (("days", 2 * 86400, 86400), ("h", 7200, 3600), ("min", 120, 60), ("s", 0, 1))


class LivePage:
    """Shows the last snapshot of each run; what takes long is drawn once per event.

    Args:
        host: address that it is served on.
        health: of the monitor.
    """

    def __init__(self, host: str, health: Health) -> None:
        self.health, self.is_local = health, is_local(host)
        self.snapshots: dict[str, Snapshot] = {}  # by run
        self.drawing = threading.Lock()
        self.drawn: dict[str, tuple[int, list[Block]]] = {}

    def app(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        """Respond with the page, as a WSGI application.

        A page on this machine is only for names of this machine: the name of another that was
        made to lead here belongs to a website, whose scripts could read the page.
        """
        if self.is_local and not is_local(_host_of(environ)):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"open this page as localhost, or give its address to --serve_host\n"]
        held = environ["QUERY_STRING"] == HELD
        headers = HEADERS if held else [*HEADERS, ("Refresh", str(REFRESH))]
        names = [Path(run).name for run in self.snapshots]
        title = f"Monitor of {', '.join(names)}" if names else "Monitor"
        content = page(title, list(self._sections(held))).encode(errors="backslashreplace")
        start_response("200 OK", [*headers, ("Content-Length", str(len(content)))])
        return [content]

    def _sections(self, held: bool) -> Iterator[list[Block]]:
        """Yield a section for each run, and one of the page itself."""
        snapshots = list(self.snapshots.items())
        if not self.health.healthy:
            yield [warning("the monitor does not look into its folder any more: it hangs")]
        if not snapshots:
            yield [paragraph("The monitor is starting: it has not looked into its folder yet.")]
        if len(snapshots) > 1:
            yield [_overview(snapshots)]
        for number, (run, snapshot) in enumerate(snapshots):
            yield [
                heading(1, f"Monitor of {Path(run).name}", f"run-{number}"),
                paragraph(run, "setup"),
                *_state(snapshot, self.health.age),
                *_deliveries(snapshot),
                *self._figures(f"monitor-{number}", snapshot.history),
            ]
        yield [_footer(held)]

    def _figures(self, name: str, history: History) -> list[Block]:
        """Return the figures of all checkpoints, which change only with the history."""
        with self.drawing:
            lines = list(history.lines)
            count, figures = self.drawn.get(name, (0, []))
            if count != len(lines):
                records = [readable(as_record(line)) for line in lines]
                figures = list(checkpoints(records, name))
                self.drawn[name] = len(lines), figures
        return [heading(2, "Checkpoint by checkpoint"), *figures] if figures else []


def is_local(host: str) -> bool:
    """Return whether an address or a name can only be of this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _host_of(environ: dict[str, Any]) -> str:
    """Return the host that a browser asked for, without its port."""
    try:
        return urlsplit(f"//{environ.get('HTTP_HOST', '')}").hostname or ""
    except ValueError:
        return ""


def _overview(snapshots: Sequence[tuple[str, Snapshot]]) -> Block:
    """Return a row for each of several runs."""
    rows = []
    for number, (run, snapshot) in enumerate(snapshots):
        worst = [line for line in snapshot.group[:-1] if line["name"] == WORST]
        cells = [accuracy_cell(line["accuracy"], line["interval"]) for line in worst]
        state = "ALARM" if snapshot.history.open_alarm() else "no alarm"
        name = Cell(run, link=f"run-{number}")
        rows.append([name, state, *(cells or [Cell(NONE)]), snapshot.queue])
    return table("All models", ["model", "state", f"{WORST}>", "waiting>"], rows)


def _state(snapshot: Snapshot, age: float) -> Iterator[Block]:
    """Yield whether there is an alarm, the queue, ages, and the newest figures."""
    alarm, at = snapshot.history.open_alarm(), snapshot.evaluated_at
    boxes = [("ALARM", f"since {alarm['date']}") if alarm else ("no alarm", "is open")]
    wait = "checkpoint waits" if snapshot.queue == 1 else "checkpoints wait"
    boxes.append((str(snapshot.queue), f"{wait} for evaluation"))
    since = _ago(time.time() - at) if at else NONE
    boxes.append((since, "since the last evaluation"))
    yield headline([*boxes, (_ago(age), "since the last look into the folder")])
    if not snapshot.writable:
        yield warning("the history cannot be written: its disk is full or read-only")
    if alarm:
        name = f"{alarm['checkpoint']}: " if "checkpoint" in alarm else ""
        yield from (warning(f"{name}{reason}", "Alarm") for reason in alarm["alarm"])
    if snapshot.group:
        *lines, event = snapshot.group
        found = [attack_result(readable(as_record(line))) for line in lines]
        yield heading(2, f"The newest checkpoint: {event['checkpoint']}")
        yield paragraph(
            f"Step {event['step']}, epoch {event['epoch']}, evaluated {event['date']}; "
            f"SHA-256 of the weights {event['weights']}.",
            "note",
        )
        yield from evaluation([replace(result, stage="test") for result in found if result])


def _deliveries(snapshot: Snapshot) -> Iterator[Block]:
    """Yield who was alarmed when, the latest first."""
    lines = list(snapshot.history.lines)
    delivered = {(e["id"], e["to"]): e["date"] for e in lines if e.get("event") == "notified"}
    rows, alarms = [], AlarmState()
    for event in (line for line in lines if line.get("event") in JUDGED):
        kind, alarms = kind_of(event, alarms), alarms.after(event)
        if kind:
            reasons = "; ".join(event.get("alarm") or ["no alarm any more"])
            about = Cell(event.get("checkpoint", "the end of the monitor"), small=event["date"])
            rows.append([kind, about, reasons, _receivers(event, delivered)])
    yield heading(2, "Alarms and recoveries")
    columns = ["event", "of", "reason", "notified"]
    if rows:
        yield table("The latest first", columns, rows[::-1], kind="log")
    else:
        yield paragraph("There was no alarm.")
    for name, count in snapshot.waiting.items():
        if count:
            yield warning(
                f"{name} has not accepted {count} of the notifications; they are repeated"
            )


def _receivers(event: Fields, delivered: Mapping[tuple[str, str], str]) -> str:
    """Return the destinations of an event, each with the time of its delivery."""
    note = event.get("notify")
    if note is None:
        return "nobody: there was no --notify"
    known = ((name, delivered.get((note["id"], name))) for name in note["to"])
    return ", ".join(f"{name} {date or 'not yet'}" for name, date in known)


def _ago(seconds: float) -> str:
    """Return a time span in the largest unit of which there are at least two."""
    unit, _, size = next(each for each in UNITS if seconds >= each[1] or each[2] == 1)
    return f"{max(0, seconds) // size:.0f} {unit}"


def _footer(held: bool) -> Block:
    """Return when the page was made, by which version, and how to hold it."""
    now = f"{timestamp()}, lightning-rob {version('lightning-rob')}."
    link = '<a href="/">Refresh it again</a>' if held else f'<a href="/?{HELD}">Hold the page</a>'
    every = "It does not refresh itself." if held else f"It refreshes itself every {REFRESH} s."
    return Block(f'<p class="note">This page is of {escape(now)} {every} {link}.</p>', "")
