"""Metrics for Prometheus: served over HTTP, or as a file for node exporter's textfile collector."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from lightning_rob.commands.configs import MonitorConfig
from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.history import (
    Fields,
    History,
    Identity,
    identity,
    seconds_of,
)
from lightning_rob.errors import InputError

PREFIX = "lightning_rob"
LIFE = 3600.0  # /healthz fails after as many seconds, and --every, without a look into the folder


@dataclass(frozen=True)
class Snapshot:
    """The state of a monitor.

    Args:
        group: the lines of the newest checkpoint, the last of which is their event; may be empty.
        history: of the run.
        queue: checkpoints that wait, and the one that is being evaluated.
        waiting: undelivered notifications by destination.
        writable: whether the history can be written.
    """

    group: Sequence[Fields]
    history: History
    queue: int
    waiting: Mapping[str, int]
    writable: bool

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


def newest_group(history: History, suite: str, present: Sequence[Identity]) -> list[Fields]:
    """Return the last evaluation of the newest checkpoint, of those whose files are there if any.

    Args:
        history: of the run.
        suite: key of the suite.
        present: checkpoints whose files are there, the newest first.
    """
    groups = [g for g in history.groups() if g[-1]["event"] == "evaluated"]
    groups = [g for g in groups if g[-1]["suite"] == suite]
    last = {identity(group[-1]): group for group in groups}
    found = next((last[one] for one in present if one in last), None)
    # Of equal positions max returns the first, and the later one counts.
    return found or max(reversed(groups), key=lambda g: g[-1]["position"], default=[])


class Metrics:
    """Publishes snapshots of a monitor; a scrape never waits for an evaluation.

    Args:
        config: options.

    Raises:
        InputError: the port cannot be used.
    """

    def __init__(self, config: MonitorConfig) -> None:
        self.run, self.file, self.every = config.name, config.metrics_file, config.every
        self.families: dict[str, list[Any]] = {}  # by run
        self.looked_at = time.monotonic()
        self.failing = False
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.server: Any = None
        if config.metrics_port is not None:
            self._serve(config.metrics_host, config.metrics_port)

    def collect(self) -> Iterable[Any]:
        """Return the metrics of the last snapshots, for `CollectorRegistry`.

        A family has the samples of all runs, for its name may occur only once.
        """
        merged: dict[str, Any] = {}
        for family in chain(*list(self.families.values())):
            known = merged.setdefault(family.name, copy(family))
            if known.samples is not family.samples:
                known.samples = [*known.samples, *family.samples]
        return merged.values()

    def update(
        self,
        history: History,
        suite: str,
        present: Sequence[Identity],
        queue: int,
        waiting: Mapping[str, int],
        writable: bool,
        run: str | None = None,
    ) -> None:
        """Publish the state of a monitor.

        Args:
            history: of the run.
            suite: key of the suite.
            present: checkpoints whose files are there, the newest first.
            queue: how many of them are not evaluated yet.
            waiting: undelivered notifications by destination.
            writable: whether the history can be written.
            run: name of one of several runs.
        """
        self.looked_at = time.monotonic()
        snapshot = Snapshot(
            newest_group(history, suite, present), history, queue, waiting, writable
        )
        run = run or self.run
        self.families[run] = list(families(snapshot, run))
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_to_textfile(str(self.file), self.registry)
        except OSError as error:
            if not self.failing:
                warn(f"--metrics_file cannot be written ({error}); trying again")
            self.failing = True
        else:
            self.failing = False

    def close(self) -> None:
        """End the server."""
        if self.server is not None:
            self.server.shutdown()
            self.server.server_close()

    def _serve(self, host: str, port: int) -> None:
        try:
            self.server, _ = start_http_server(port, host, self.registry)
        except (OSError, OverflowError) as error:
            raise InputError(f"--metrics_port {port} on {host} cannot be used: {error}") from error
        self.server.set_app(self._with_health(self.server.get_app()))
        warn(f"metrics are served on {host}, port {self.server.server_port}")

    def _with_health(self, metrics: Callable[..., Any]) -> Callable[..., Any]:
        """Return a WSGI application with /healthz beside the metrics."""

        def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            if environ["PATH_INFO"] != "/healthz":
                return metrics(environ, start_response)
            age = time.monotonic() - self.looked_at
            healthy = age < LIFE + self.every
            start_response(
                "200 OK" if healthy else "503 Service Unavailable",
                [("Content-Type", "application/json")],
            )
            return [json.dumps({"healthy": healthy, "seconds_since_look": age}).encode()]

        return app


def families(snapshot: Snapshot, run: str) -> Iterator[Any]:
    """Yield the metrics of a snapshot, each with the label `run`."""
    yield from _figures(snapshot.group[:-1], run)
    if snapshot.group:
        event = snapshot.group[-1]
        labels = {k: str(event[k]) for k in ("checkpoint", "weights", "suite")}
        about = InfoMetricFamily(f"{PREFIX}_checkpoint", "The newest checkpoint.", labels=["run"])
        about.add_metric([run], labels)
        yield about
        for name in ("step", "epoch"):
            text = f"Training {name} of the newest checkpoint."
            yield _gauge(f"checkpoint_{name}", text, run, event[name])
    alarm = snapshot.history.open_alarm() is not None
    yield _gauge("alarm", "1 while an alarm is open, else 0.", run, alarm)
    yield _gauge("history_writable", "0 while the disk is full, else 1.", run, snapshot.writable)
    yield _gauge("queue_length", "Checkpoints that are not evaluated yet.", run, snapshot.queue)
    if (evaluated_at := snapshot.evaluated_at) is not None:
        text = "End of the last evaluation, Unix time."
        yield _gauge("last_evaluation_timestamp_seconds", text, run, evaluated_at)
    yield from _counts(snapshot, run)


def _counts(snapshot: Snapshot, run: str) -> Iterator[Any]:
    """Yield the time of the snapshot, and what has been counted."""
    text = "Last look into the folder, Unix time."
    yield _gauge("last_look_timestamp_seconds", text, run, time.time())
    for name, count in snapshot.counts.items():
        text = f"Number of {name} since the history began."
        counter = CounterMetricFamily(f"{PREFIX}_{name}", text, labels=["run"])
        counter.add_metric([run], count)
        yield counter
    text = "Notifications that are not delivered yet."
    waiting = GaugeMetricFamily(
        f"{PREFIX}_notifications_waiting", text, labels=["run", "destination"]
    )
    for destination, count in snapshot.waiting.items():
        waiting.add_metric([run, destination], count)
    yield waiting


def _figures(results: Sequence[Fields], run: str) -> Iterator[Any]:
    """Yield every accuracy with the ends of its interval and the number of images."""
    texts = {
        "accuracy": "Accuracy of the newest checkpoint under an attack, in 0 … 1.",
        "accuracy_low": "Lower end of the 95 % interval of the accuracy.",
        "accuracy_high": "Upper end of the 95 % interval of the accuracy.",
        "images": "Number of evaluated images.",
    }
    for place, (name, text) in enumerate(texts.items()):
        family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["run", "attack"])
        for line in results:
            values = (line["accuracy"], *line["interval"], line["n"])
            value = float("nan") if values[place] is None else values[place]
            family.add_metric([run, line["name"]], value)
        yield family


def _gauge(name: str, text: str, run: str, value: float) -> Any:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["run"])
    family.add_metric([run], float(value))
    return family
