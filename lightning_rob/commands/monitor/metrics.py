"""Metrics for Prometheus, served over HTTP."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder

from lightning_rob.commands.monitor.history import finding_count
from lightning_rob.commands.monitor.page import Snapshot

Sample = tuple[str, list[str], Any]  # metric, values of its labels beside `run`, value

Gauge, Count = GaugeMetricFamily, CounterMetricFamily
METRICS: dict[str, tuple[Any, str, list[str]]] = {  # class, help, labels beside `run`
    "accuracy": (Gauge, "Accuracy of the newest checkpoint, in 0 … 1.", ["attack"]),
    "accuracy_low": (Gauge, "Lower end of the 95 % interval of the accuracy.", ["attack"]),
    "accuracy_high": (Gauge, "Upper end of the 95 % interval of the accuracy.", ["attack"]),
    "images": (Gauge, "Number of evaluated images.", ["attack"]),
    "blind": (Gauge, "Share of images on which the attack had no gradient.", ["attack"]),
    "checkpoint": (InfoMetricFamily, "The newest checkpoint.", []),
    "findings": (Gauge, "What the checks found of the newest checkpoint.", []),
    "checkpoint_step": (Gauge, "Training step of the newest checkpoint.", []),
    "checkpoint_epoch": (Gauge, "Training epoch of the newest checkpoint.", []),
    "alarm": (Gauge, "1 while an alarm is open, else 0.", []),
    "queue_length": (Gauge, "Checkpoints that are not evaluated yet.", []),
    "last_evaluation_timestamp_seconds": (Gauge, "End of the last evaluation, Unix time.", []),
    "last_look_timestamp_seconds": (Gauge, "Last look into the folder, Unix time.", []),
    "evaluations": (Count, "Number of evaluations since the history began.", []),
    "alarms": (Count, "Number of alarms since the history began.", []),
    "missed": (Count, "Number of missed checkpoints since the history began.", []),
    "broken": (Count, "Number of broken checkpoints since the history began.", []),
    "notifications_waiting": (Gauge, "Notifications not delivered yet.", ["destination"]),
}


class Metrics:
    """Publishes the last snapshots, by run; a scrape never waits for an evaluation."""

    def __init__(self, snapshots: Mapping[str, Snapshot]) -> None:
        self.snapshots = snapshots
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def encoded(self, accept: str) -> tuple[dict[str, str], bytes]:
        encoder, kind = choose_encoder(accept)
        return {"Content-Type": kind}, encoder(self.registry)

    def collect(self) -> Iterator[Any]:
        """Yield each metric with the samples of all runs, for `CollectorRegistry`."""
        families = {
            name: kind(f"lightning_rob_{name}", text, labels=["run", *labels])
            for name, (kind, text, labels) in METRICS.items()
        }
        for run, state in dict(self.snapshots).items():
            for name, labels, value in samples(state):
                families[name].add_metric([run, *labels], value)
        yield from families.values()


def samples(state: Snapshot) -> Iterator[Sample]:
    """Yield the samples of a run."""
    yield "alarm", [], state.history.alarm() is not None
    yield "queue_length", [], state.queue
    yield "last_look_timestamp_seconds", [], state.looked_at
    if state.evaluated_at is not None:
        yield "last_evaluation_timestamp_seconds", [], state.evaluated_at
    if state.group:
        *lines, newest = state.group
        about = ("checkpoint", "weights", "suite")
        yield "checkpoint", [], {name: str(newest[name]) for name in about}
        yield "findings", [], finding_count(lines)
        yield "checkpoint_step", [], newest["step"]
        yield "checkpoint_epoch", [], newest["epoch"]
        for line in lines:
            low, high = line["interval"]
            found = {"accuracy": line["accuracy"], "images": line["n"]}
            found |= {"accuracy_low": low, "accuracy_high": high}
            found |= {"blind": line["blind"]} if "blind" in line else {}
            for name, value in found.items():  # a share that is not known is NaN
                yield name, [line["name"]], float("nan") if value is None else value
    for to, count in state.waiting.items():
        yield "notifications_waiting", [to], count
    history = list(state.history.lines)
    events = Counter(line.get("event") for line in history)
    yield "evaluations", [], events["evaluated"]
    yield "missed", [], events["missed"]
    yield "broken", [], events["broken"]
    yield "alarms", [], sum(len(line.get("alarm", ())) for line in history)
