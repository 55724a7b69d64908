"""The page of a monitor: open alarm, figures by checkpoint, deliveries, and its own state."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jinja2 import Environment, TemplateError

from lightning_rob.commands.configs import MonitorConfig
from lightning_rob.commands.monitor.history import (
    JUDGED,
    AlarmState,
    Fields,
    History,
    identity,
    timestamp,
)
from lightning_rob.commands.monitor.notify import kind_of
from lightning_rob.commands.monitor.state import Snapshot
from lightning_rob.evaluation.results import WORST
from lightning_rob.runtime.errors import InputError
from lightning_rob.tables import CLEAN

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


def page_app(config: MonitorConfig, publisher: Any) -> Callable[..., Iterable[bytes]]:
    """Return the page as a WSGI application, by the user's template or our own.

    Args:
        config: options.
        publisher: object with the `snapshots` of all runs, and the `age` of the last look.

    Raises:
        InputError: the template cannot be read.
    """
    place = config.template or Path(__file__).with_name("page.html")
    environment = Environment(autoescape=True)
    environment.filters |= {"ago": ago, "percent": percent}
    try:
        template = environment.from_string(place.read_text("utf-8"))
    except (OSError, ValueError, TemplateError) as error:
        raise InputError(f"the template {place} cannot be used: {error}") from error
    local = is_local(config.serve_host)

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        # A page on this machine is only for names of this machine: the name of another that was
        # made to lead here belongs to a website, whose scripts could read the page.
        if local and not is_local(_host_of(environ)):
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"open this page as localhost, or give its address to --serve_host\n"]
        held = environ["QUERY_STRING"] == HELD
        runs = [view(name, snapshot) for name, snapshot in list(publisher.snapshots.items())]
        text = template.render(
            {"runs": runs, "held": held, "healthy": publisher.healthy, "age": publisher.age}
            | {"now": timestamp(), "version": version("lightning-rob"), "refresh": REFRESH}
        )
        content = text.encode(errors="backslashreplace")
        headers = HEADERS if held else [*HEADERS, ("Refresh", str(REFRESH))]
        start_response("200 OK", [*headers, ("Content-Length", str(len(content)))])
        return [content]

    return app


def view(name: str, snapshot: Snapshot) -> dict[str, Any]:
    """Return what a template shows of a run.

    Args:
        name: name of the run.
        snapshot: state of the run.
    """
    at, group = snapshot.evaluated_at, snapshot.group
    rows = list(checkpoints(snapshot.history))
    attacks = list(dict.fromkeys(name for row in rows for name in row["results"]))
    attacks.sort(key=lambda name: (name != CLEAN, name == WORST))
    found = {one["text"]: one for line in group[:-1] for one in line.get("findings", ())}
    return {
        "name": name,
        "short": Path(name).name,
        "alarm": snapshot.history.open_alarm(),
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
    # A history of an earlier version may have compared a checkpoint once more.
    later = {(e["suite"], *identity(e)): e for e in history.events("judged")}
    for *results, event in sorted(groups, key=lambda group: group[-1]["position"]):
        if event["suite"] == groups[-1][-1]["suite"]:
            judged = later.get((event["suite"], *identity(event)), {})
            alarms = [*event["alarm"], *judged.get("alarm", ())]
            fields = event | judged | {"alarm": alarms, "change": None}
            change = judged.get("change", event.get("change"))
            yield fields | {"change": change, "results": {r["name"]: r for r in results}}


def curve(rows: Sequence[Mapping[str, Any]], attack: str) -> list[tuple[float, float]]:
    """Return the points of a curve in a box of 600 by 200, over the order of checkpoints."""
    first, last = rows[0]["position"], rows[-1]["position"]
    points = [
        (row["position"], row["results"][attack]["accuracy"])
        for row in rows
        if attack in row["results"]
    ]
    span = max(last - first, 1)
    known = ((x, y) for x, y in points if y == y)  # a NaN has no place
    return [(600 * (x - first) / span, 200 * (1 - y)) for x, y in known]


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


def ago(seconds: float) -> str:
    """Return a time span in the largest unit of which there are at least two."""
    unit, _, size = next(each for each in UNITS if seconds >= each[1] or each[2] == 1)
    return f"{max(0, seconds) // size:.0f} {unit}"


def percent(share: float) -> str:
    """Return a share with one digit after the point."""
    return f"{share:.1%}"
