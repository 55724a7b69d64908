"""Notifications of alarms and recoveries, delivered in the background at least once.

The history is the outbox: an event that is to be delivered has a field `notify`, written with the
event, and every delivery is an event `notified`. After a kill the next monitor delivers the rest.
"""

import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from http.client import HTTPConnection, HTTPSConnection
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    Request,
    build_opener,
)

from lightning_rob.commands.destinations import WEB, authorization, public_name, receiver_name
from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.history import (
    JUDGED,
    AlarmState,
    Fields,
    History,
    timestamp,
)
from lightning_rob.evaluation.records import with_schema
from lightning_rob.evaluation.results import WORST

TIMEOUT = 10.0  # seconds for a request
PAUSES = (1.0, 300.0)  # seconds between two attempts: the first, and after doubling the longest
PATIENCE = 30.0  # seconds for which a monitor that ends waits for the receivers

Send = Callable[[Fields], None]  # delivers a notification, or raises `Undelivered`


class Undelivered(Exception):
    """A destination did not accept a notification; the message holds no secret.

    Args:
        reason: why.
        reached: whether the destination responded, so that it may accept another notification.
    """

    def __init__(self, reason: str, reached: bool = False) -> None:
        super().__init__(reason)
        self.reached = reached


class Destination(threading.Thread):
    """Delivers notifications to one destination, and repeats each until it is accepted.

    Args:
        title: its name, without secrets.
        send: delivers one notification.
        delivered: records that a notification, by id, was delivered; an OSError is tried again.
    """

    def __init__(self, title: str, send: Send, delivered: Callable[[str, str], None]) -> None:
        super().__init__(daemon=True, name=f"notify {title}")
        self.title, self.send, self.delivered = title, send, delivered
        self.waiting: dict[str, Fields] = {}
        self.accepted: set[str] = set()
        self.changed = threading.Condition()
        self.closed = self.failing = False

    def put(self, notification: Fields) -> None:
        """Add a notification."""
        with self.changed:
            self.waiting[notification["id"]] = notification
            self.changed.notify_all()

    def close(self, patience: float) -> None:
        """Wait until all is delivered, but not longer than `patience` seconds; then end."""
        with self.changed:
            self.changed.wait_for(lambda: not self.waiting, patience)
            self.closed = True
            self.changed.notify_all()

    def run(self) -> None:
        """Deliver until closed, with pauses that double as long as the destination fails."""
        pause = PAUSES[0]
        while self._has_work():
            if self._deliver():
                pause = PAUSES[0]
                continue
            self._rest(pause)
            pause = min(2 * pause, PAUSES[1])

    def _rest(self, seconds: float) -> None:
        """Wait, but not longer than until the next notification."""
        with self.changed:
            count = len(self.waiting)
            self.changed.wait_for(lambda: self.closed or len(self.waiting) > count, seconds)

    def _has_work(self) -> bool:
        """Wait for a notification; return False when closed."""
        with self.changed:
            self.changed.wait_for(lambda: self.closed or bool(self.waiting))
            return not self.closed

    def _deliver(self) -> bool:
        """Try to deliver each notification, no recovery before its alarm; return if all were."""
        complete = True
        for key, notification in list(self.waiting.items()):
            if not complete and notification["kind"] == "recovery":
                continue
            try:
                self._deliver_one(key, notification)
            except Undelivered as error:
                self._report(str(error))
                complete = False
                if not error.reached:
                    break
            except (OSError, ValueError):  # accepted; the history has no space, or is closed
                complete = False
        return complete

    def _deliver_one(self, key: str, notification: Fields) -> None:
        if key not in self.accepted:
            self._send(notification)
            self.accepted.add(key)
            if self.failing:
                warn(f"notifications: {self.title} accepts them again")
            self.failing = False
        self.delivered(key, self.title)
        with self.changed:
            del self.waiting[key]
            self.changed.notify_all()

    def _send(self, notification: Fields) -> None:
        """Send a notification.

        Raises:
            Undelivered: for any reason: nothing that a receiver does may end the thread.
        """
        try:
            self.send(notification)
        except Undelivered:
            raise
        except Exception as error:  # its text may have the URL
            raise Undelivered(type(error).__name__) from None

    def _report(self, reason: str) -> None:
        """Report the first of several failures."""
        if not self.failing and not self.closed:
            warn(f"notifications: {self.title} failed ({reason}); trying again")
        self.failing = True


class Notifier:
    """Decides which events are notified, and hands them to the destinations.

    Args:
        urls: of the destinations, checked by `check_destinations`.
        history: the outbox.
        run: name of the monitored run in a notification.

    Raises:
        ValueError: apprise does not understand a URL.
    """

    def __init__(self, urls: Sequence[str], history: History, run: str) -> None:
        self.history, self.run = history, run
        named = {receiver_name(url): sender(url) for url in urls}
        self.destinations = {n: Destination(n, s, self._delivered) for n, s in named.items()}
        done = self._notified()
        for group in history.groups():
            self._hand_over(group, done)
        for destination in self.destinations.values():
            destination.start()

    def mark(self, event: Fields) -> Fields:
        """Return the field that makes an event one to be notified, before it is recorded."""
        kind = kind_of(event, self.history.alarms()) if self.destinations else None
        note = {"id": uuid.uuid4().hex, "kind": kind, "to": list(self.destinations)}
        return {"notify": note} if kind else {}

    def send(self, lines: Sequence[Fields]) -> None:
        """Deliver recorded lines, the last of which is an event, in the background."""
        self._hand_over(lines, set())

    @property
    def waiting(self) -> dict[str, int]:
        """The number of undelivered notifications by destination, earlier ones included."""
        counts = dict.fromkeys(self.destinations, 0)
        done = self._notified()
        for key, name in self._wanted():
            counts[name] = counts.get(name, 0) + ((key, name) not in done)
        return counts

    def close(self, patience: float) -> None:
        """End; wait `patience` seconds for the receivers, and report what is left."""
        end = time.monotonic() + patience
        for destination in self.destinations.values():
            destination.close(max(0.0, end - time.monotonic()))
        for name, count in self.waiting.items():
            if count and name in self.destinations:
                warn(f"notifications: {count} left for {name}; the next monitor delivers them")
            elif count:
                warn(f"notifications: {count} left for {name}, which --notify no longer names")

    def _hand_over(self, lines: Sequence[Fields], done: set[tuple[str, str]]) -> None:
        note = lines[-1].get("notify", {})
        for name in note.get("to", ()):
            if name in self.destinations and (note["id"], name) not in done:
                self.destinations[name].put(notification(lines, self.run))

    def _wanted(self) -> Iterator[tuple[str, str]]:
        """Yield id and destination of all notifications."""
        for note in (e["notify"] for e in list(self.history.lines) if "notify" in e):
            yield from ((note["id"], name) for name in note["to"])

    def _notified(self) -> set[tuple[str, str]]:
        """Return id and destination of all deliveries."""
        return {(event["id"], event["to"]) for event in self.history.events("notified")}

    def _delivered(self, key: str, name: str) -> None:
        event = {"event": "notified", "id": key, "to": name, "date": timestamp()}
        self.history.append(event)


def kind_of(event: Fields, before: AlarmState) -> str | None:
    """Return "alarm" or "recovery"; None for an event that is not notified.

    Args:
        event: before it is recorded.
        before: the alarms that are open before it.
    """
    if event["event"] not in JUDGED:
        return None
    known = before.event
    if event.get("alarm"):
        # A monitor that is started every hour need not repeat how the last one ended.
        repeated = event["event"] == "ended" and known and event["alarm"] == known.get("alarm")
        return None if repeated else "alarm"
    return "recovery" if known and not before.after(event).event else None


def notification(lines: Sequence[Fields], run: str) -> Fields:
    """Return the content of a notification.

    Args:
        lines: recorded together, the last of which is the event.
        run: the monitored run.
    """
    *results, event = lines
    note = event["notify"]
    known = ("date", "checkpoint", "epoch", "step", "file", "weights", "suite")
    content = {name: event[name] for name in known if name in event}
    content |= {"alarm": event.get("alarm", []), "text": _text(note["kind"], event, results, run)}
    for key in ("newly_vulnerable", "won_back"):
        if "change" in event:
            content[key] = len(event["change"][key])
    figures = {
        line["name"]: {k: line[k] for k in ("accuracy", "interval", "n")} for line in results
    }
    head = {"id": note["id"], "kind": note["kind"], "run": run}
    return with_schema(head | content | {"figures": figures})


def _text(kind: str, event: Fields, results: Sequence[Fields], run: str) -> str:
    """Return a notification as one line, which chat services show."""
    worst = [line["accuracy"] for line in results if line["name"] == WORST]
    figures = [f"robust/{WORST} is {accuracy:.1%}" for accuracy in worst]
    reasons = "; ".join(event.get("alarm") or figures) or "no alarm any more"
    return ": ".join(filter(None, [kind, run, event.get("checkpoint"), reasons]))


def sender(url: str) -> Send:
    """Return the function that delivers to a URL.

    Raises:
        ValueError: apprise does not understand it.
    """
    return _webhook(url) if urlsplit(url).scheme in WEB else _apprise(url)


class _NoRedirect(HTTPRedirectHandler):
    """Refuses redirects, which would turn a POST into a GET without its content."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Return no request: the redirect becomes an `HTTPError`."""


class _Timed(HTTPConnection):
    """Ends a request after `TIMEOUT` seconds; a socket's own timeout begins anew at each byte."""

    def connect(self) -> None:
        """Connect, within the same time."""
        end = time.monotonic() + TIMEOUT
        timer = threading.Timer(TIMEOUT, self._expire)
        timer.daemon = True
        timer.start()
        super().connect()
        if time.monotonic() >= end:
            raise TimeoutError("timed out")

    def _expire(self) -> None:
        with suppress(OSError, AttributeError):  # there is no socket any more
            self.sock.shutdown(socket.SHUT_RDWR)


class _TimedTLS(_Timed, HTTPSConnection):
    """The same with TLS."""


class _InTime(HTTPHandler):
    """Opens http URLs within `TIMEOUT` seconds."""

    def http_open(self, request: Request) -> Any:
        """Open a URL."""
        return self.do_open(_Timed, request)


class _InTimeTLS(HTTPSHandler):
    """Opens https URLs within `TIMEOUT` seconds."""

    def https_open(self, request: Request) -> Any:
        """Open a URL."""
        return self.do_open(_TimedTLS, request)


def _webhook(url: str) -> Send:
    """Return a function that sends JSON by POST; any status of 200 to 299 accepts it."""
    opener = build_opener(_NoRedirect, _InTime, _InTimeTLS)
    secret = authorization()

    def send(notification: Fields) -> None:
        headers = {"Content-Type": "application/json", "Idempotency-Key": notification["id"]}
        headers |= {"User-Agent": "lightning-rob"} | ({"Authorization": secret} if secret else {})
        request = Request(url, json.dumps(notification).encode(), headers, method="POST")
        try:
            opener.open(request, timeout=TIMEOUT).close()
        except HTTPError as error:
            error.close()
            raise Undelivered(f"HTTP status {error.code}", reached=True) from None
        except URLError as error:
            raise Undelivered(str(error.reason)) from None
        except OSError as error:  # such as no response in time
            raise Undelivered(str(error) or type(error).__name__) from None

    return send


def _apprise(url: str) -> Send:
    """Return a function that sends the text by apprise, to Slack, mail and many others.

    Raises:
        ValueError: apprise does not understand the URL.
    """
    import apprise

    log = logging.getLogger("apprise")  # without a handler it prints URLs on stderr
    log.addHandler(logging.NullHandler())
    log.propagate = False
    target = apprise.Apprise.instantiate(url, suppress_exceptions=True)
    if target is None:
        raise ValueError(f"--notify {public_name(url)}: apprise does not understand this URL")
    kinds = {"alarm": apprise.NotifyType.FAILURE, "recovery": apprise.NotifyType.SUCCESS}

    def send(notification: Fields) -> None:
        kind, body = notification["kind"], f"{notification['text']}\nid {notification['id']}"
        if not target.notify(body, f"lightning-rob: {kind}", kinds[kind]):
            raise Undelivered("apprise could not deliver it", reached=True)

    return send
