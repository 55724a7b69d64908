"""Metrics for Prometheus: served over HTTP, or as a file for node exporter's textfile collector."""

import time
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.history import Fields
from lightning_rob.commands.monitor.server import App
from lightning_rob.commands.monitor.snapshot import Snapshot

PREFIX = "lightning_rob"


class Metrics:
    """Publishes snapshots of a monitor; a scrape never waits for an evaluation.

    Args:
        file: is written at each update; None for no file.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        self.families: dict[str, list[Any]] = {}  # by run
        self.failing = False
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.app: App = make_wsgi_app(self.registry)

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

    def update(self, run: str, snapshot: Snapshot) -> None:
        """Publish the state of the monitor of a run."""
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


def families(snapshot: Snapshot, run: str) -> Iterator[Any]:
    """Yield the metrics of a snapshot, each with the label `run`."""
    yield from _figures(snapshot.group[:-1], run)
    if snapshot.group:
        event = snapshot.group[-1]
        labels = {k: str(event[k]) for k in ("checkpoint", "weights", "suite")}
        about = InfoMetricFamily(f"{PREFIX}_checkpoint", "The newest checkpoint.", labels=["run"])
        about.add_metric([run], labels)
        yield about
        results = snapshot.group[:-1]
        text = "What the checks found of the accuracies of the newest checkpoint."
        found = {one["text"] for line in results for one in line.get("findings", ())}
        yield _gauge("findings", text, run, len(found))
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
        "blind": "Share of images on which the attack had no gradient to follow, in 0 … 1.",
    }
    for place, (name, text) in enumerate(texts.items()):
        family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["run", "attack"])
        for line in results:
            values = (line["accuracy"], *line["interval"], line["n"], line.get("blind"))
            value = float("nan") if values[place] is None else values[place]
            if name != "blind" or "blind" in line:
                family.add_metric([run, line["name"]], value)
        yield family


def _gauge(name: str, text: str, run: str, value: float) -> Any:
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["run"])
    family.add_metric([run], float(value))
    return family
