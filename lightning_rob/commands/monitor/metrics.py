"""Metrics for Prometheus: served over HTTP, or as a file for node exporter's textfile collector."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, make_wsgi_app, write_to_textfile
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

from lightning_rob.commands.monitor.display import warn
from lightning_rob.commands.monitor.history import Fields
from lightning_rob.commands.monitor.state import Snapshot

PREFIX = "lightning_rob"
FIGURES = {  # of each accuracy, by attack
    "accuracy": "Accuracy of the newest checkpoint under an attack, in 0 … 1.",
    "accuracy_low": "Lower end of the 95 % interval of the accuracy.",
    "accuracy_high": "Upper end of the 95 % interval of the accuracy.",
    "images": "Number of evaluated images.",
    "blind": "Share of images on which the attack had no gradient to follow, in 0 … 1.",
}
GAUGES = {  # of each run
    "findings": "What the checks found of the accuracies of the newest checkpoint.",
    "checkpoint_step": "Training step of the newest checkpoint.",
    "checkpoint_epoch": "Training epoch of the newest checkpoint.",
    "alarm": "1 while an alarm is open, else 0.",
    "queue_length": "Checkpoints that are not evaluated yet.",
    "last_evaluation_timestamp_seconds": "End of the last evaluation, Unix time.",
    "last_look_timestamp_seconds": "Last look into the folder, Unix time.",
}


class Metrics:
    """Publishes the last snapshots; a scrape never waits for an evaluation.

    Args:
        snapshots: state of each run, which others change.
        file: file that `write` writes; None for no file.
    """

    def __init__(self, snapshots: Mapping[str, Snapshot], file: Path | None = None) -> None:
        self.snapshots, self.file = snapshots, file
        self.failing = False
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.app = make_wsgi_app(self.registry)

    def write(self) -> None:
        """Write the file, where there is one; report the first of several failures."""
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

    def collect(self) -> Iterator[Any]:
        """Yield each family with the samples of all runs, for `CollectorRegistry`."""
        states = dict(self.snapshots)
        if not states:
            return
        lines = [(run, line) for run, state in states.items() for line in state.group[:-1]]
        figures = {(run, line["name"]): figures_of(line) for run, line in lines}
        for name, text in FIGURES.items():
            known = {key: found[name] for key, found in figures.items() if name in found}
            yield _family(GaugeMetricFamily, name, text, known, "attack")
        newest = {(run,): state.group[-1] for run, state in states.items() if state.group}
        about = {
            key: {name: str(event[name]) for name in ("checkpoint", "weights", "suite")}
            for key, event in newest.items()
        }
        yield _family(InfoMetricFamily, "checkpoint", "The newest checkpoint.", about)
        gauges = {(run,): gauges_of(state) for run, state in states.items()}
        for name, text in GAUGES.items():
            value = {key: found[name] for key, found in gauges.items() if name in found}
            yield _family(GaugeMetricFamily, name, text, value)
        counts = {(run,): state.counts for run, state in states.items()}
        for name in ("alarms", "evaluations", "missed", "broken"):
            text = f"Number of {name} since the history began."
            number = {key: found[name] for key, found in counts.items()}
            yield _family(CounterMetricFamily, name, text, number)
        left = {(run, to): n for run, state in states.items() for to, n in state.waiting.items()}
        text = "Notifications that are not delivered yet."
        yield _family(GaugeMetricFamily, "notifications_waiting", text, left, "destination")


def _family(kind: Any, name: str, text: str, values: Mapping[Any, Any], *labels: str) -> Any:
    """Return a family with a sample for each run and further labels."""
    family = kind(f"{PREFIX}_{name}", text, labels=["run", *labels])
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def figures_of(line: Fields) -> dict[str, float]:
    """Return the figures of an accuracy; a blindness that is not known is NaN."""
    low, high = line["interval"]
    found = {"accuracy": line["accuracy"], "accuracy_low": low, "accuracy_high": high}
    found |= {"images": line["n"]} | ({"blind": line["blind"]} if "blind" in line else {})
    return {name: float("nan") if value is None else value for name, value in found.items()}


def gauges_of(state: Snapshot) -> dict[str, float]:
    """Return the values of the gauges of a run; of those that are known."""
    found: dict[str, float | None] = {
        "alarm": state.history.open_alarm() is not None,
        "queue_length": state.queue,
        "last_evaluation_timestamp_seconds": state.evaluated_at,
        "last_look_timestamp_seconds": state.looked_at,
    }
    if state.group:
        *results, event = state.group
        texts = {one["text"] for line in results for one in line.get("findings", ())}
        found |= {"findings": len(texts)}
        found |= {f"checkpoint_{name}": event[name] for name in ("step", "epoch")}
    return {name: float(value) for name, value in found.items() if value is not None}
