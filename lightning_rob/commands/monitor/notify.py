"""Notifications of alarms and recoveries, delivered at least once.

The history is the outbox: an event that is to be delivered has a field `notify`, written with the
event, and every delivery is an event `notified`. After a kill the next monitor delivers the rest.
"""

import json
import os
import time
import uuid
from collections.abc import Callable, Sequence
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.history import JUDGED, Fields, History, alarm_after, timestamp
from lightning_rob.commands.monitor.urls import AUTHORIZATION, receiver_name
from lightning_rob.evaluation.records import with_schema
from lightning_rob.evaluation.results import WORST

TIMEOUT = 10.0  # seconds that a receiver may be silent, for which all wait
SLOW = 2.0  # seconds after which a failure looks like silence, not like a refusal
PAUSES = (1.0, 300.0)  # seconds between two attempts: the first, and after doubling the longest
PATIENCE = 30.0  # seconds for which a monitor that ends waits for the receivers

Send = Callable[[Fields], None]  # delivers a notification, or raises an error


class Undelivered(Exception):
    """A destination did not accept a notification; the message holds no secret."""


class Outbox:
    """Decides which events are notified, and delivers them, to each destination at its own pace."""

    def __init__(self, urls: Sequence[str], history: History, run: str) -> None:
        self.history, self.run = history, run
        self.senders = {receiver_name(url): _webhook(url) for url in urls}
        self.pauses = dict.fromkeys(self.senders, 0.0)  # seconds; 0 while it accepts them
        self.due = dict.fromkeys(self.senders, 0.0)  # time of the next attempt, by `monotonic`
        self.slow: set[str] = set()  # ids that failed slowly, which the others need not wait for

    def mark(self, event: Fields) -> Fields:
        """Return the field that makes an event one to be notified, before it is recorded."""
        kind = kind_of(event, self.history.alarm()) if self.senders else None
        note = {"id": uuid.uuid4().hex, "kind": kind, "to": [*self.senders]}
        return {"notify": note} if kind else {}

    @property
    def waiting(self) -> dict[str, int]:
        """The number of undelivered notifications by destination."""
        return {name: len(self._undelivered(name)) for name in self.senders}

    def deliver(self) -> None:
        """Deliver what waits, with pauses that double as long as a destination fails."""
        for name, send in self.senders.items():
            if time.monotonic() < self.due[name]:
                continue
            reason, silence = "", 0.0
            groups = self._undelivered(name)
            left = [group[-1]["notify"]["id"] for group in groups]
            for group in sorted(groups, key=lambda group: group[-1]["notify"]["id"] in self.slow):
                note, began = group[-1]["notify"], time.monotonic()
                if note["kind"] == "recovery" and left[0] != note["id"]:
                    continue  # no recovery arrives before its alarm
                try:
                    send(notification(group, self.run))
                except Exception as error:  # nothing that a receiver does may end the monitor
                    # The text of another error may have the URL.
                    reason = str(error) if isinstance(error, Undelivered) else type(error).__name__
                    if (spent := time.monotonic() - began) > SLOW:
                        silence = spent  # each of the others would delay the evaluations as long
                        self.slow.add(note["id"])
                        break
                else:
                    line = {"event": "notified", "id": note["id"], "to": name}
                    self.history.append(line | {"date": timestamp()})
                    left.remove(note["id"])
            if bool(reason) != bool(self.pauses[name]):
                state = f"failed ({reason}); trying again" if reason else "accepts them again"
                warn(f"notifications: {name} {state}")
            first, longest = PAUSES
            # Evaluations wait for a silent one at most a tenth of the time.
            pause = max(2 * self.pauses[name] or first, 9 * silence)
            self.pauses[name] = min(pause, longest) if reason else 0.0
            self.due[name] = time.monotonic() + self.pauses[name]

    def close(self, patience: float) -> None:
        """Try for `patience` seconds to deliver what waits, and report what is left."""
        end = time.monotonic() + patience
        self.due = dict.fromkeys(self.senders, 0.0)  # a silent one may be back
        while any(self.waiting.values()) and time.monotonic() < end:
            self.deliver()
            due = [self.due[name] for name, pause in self.pauses.items() if pause]
            if due and min(due) > end:
                break
            time.sleep(max(0.0, min(due) - time.monotonic()) if due else 0.0)
        for name, count in self.waiting.items():
            if count:
                warn(f"notifications: {count} left for {name}; the next monitor delivers them")

    def _undelivered(self, name: str) -> list[list[Fields]]:
        """Return the lines of each event that a destination has not accepted yet."""
        done = {e["id"] for e in self.history.events("notified") if e["to"] == name}
        notes = [(group, group[-1].get("notify")) for group in self.history.groups()]
        return [group for group, n in notes if n and name in n["to"] and n["id"] not in done]


def kind_of(event: Fields, known: Fields | None) -> str | None:
    """Return "alarm" or "recovery" by the open alarm, or None for an event that is not notified."""
    if event["event"] not in JUDGED:
        return None
    if event.get("alarm"):
        # A monitor that is started every hour need not repeat how the last one ended.
        repeated = event["event"] == "ended" and known and event["alarm"] == known.get("alarm")
        return None if repeated else "alarm"
    return "recovery" if known and not alarm_after(known, event) else None


def notification(lines: Sequence[Fields], run: str) -> Fields:
    """Return the content of a notification of lines that were recorded together, the event last."""
    *results, event = lines
    note = event["notify"]
    known = ("date", "checkpoint", "epoch", "step", "file", "weights", "suite")
    content = {name: event[name] for name in known if name in event}
    if change := event.get("change"):
        content |= {key: len(change[key]) for key in ("newly_vulnerable", "won_back")}
    figures = {
        line["name"]: {k: line[k] for k in ("accuracy", "interval", "n")} for line in results
    }
    # Chat services show the text alone.
    worst = [f"robust/{WORST} is {figures[WORST]['accuracy']:.1%}"] if WORST in figures else []
    reasons = "; ".join(event.get("alarm") or worst) or "no alarm any more"
    text = ": ".join(filter(None, [note["kind"], run, event.get("checkpoint"), reasons]))
    head = {"id": note["id"], "kind": note["kind"], "run": run}
    content |= {"alarm": event.get("alarm", []), "text": text, "figures": figures}
    return with_schema(head | content)


def _webhook(url: str) -> Send:
    """Return a function that sends JSON by POST; any status of 200 to 299 accepts it."""
    redirects = HTTPRedirectHandler()
    # A redirect, which would turn the POST into a GET without content, becomes an `HTTPError`.
    redirects.redirect_request = lambda *_: None  # type: ignore[method-assign]
    opener = build_opener(redirects)
    secret = os.environ.get(AUTHORIZATION, "").strip()

    def send(notification: Fields) -> None:
        headers = {"Content-Type": "application/json", "Idempotency-Key": notification["id"]}
        headers |= {"User-Agent": "lightning-rob"} | ({"Authorization": secret} if secret else {})
        request = Request(url, json.dumps(notification).encode(), headers, method="POST")
        try:
            opener.open(request, timeout=TIMEOUT).close()
        except HTTPError as error:
            error.close()
            raise Undelivered(f"HTTP status {error.code}") from None
        except OSError as error:  # such as no response in time
            reason = error.reason if isinstance(error, URLError) else error
            raise Undelivered(str(reason) or type(error).__name__) from None

    return send
