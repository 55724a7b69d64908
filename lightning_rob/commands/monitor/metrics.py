"""Metrics for Prometheus, served over HTTP."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.exposition import choose_encoder

from lightning_rob.commands.monitor.history import finding_count
from lightning_rob.commands.monitor.page import Snapshot

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
    """Publishes the last snapshots, by run; a scrape never waits for an evaluation."""

    def __init__(self, snapshots: Mapping[str, Snapshot]) -> None:
        self.snapshots = snapshots
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def encoded(self, accept: str) -> tuple[dict[str, str], bytes]:
        encoder, kind = choose_encoder(accept)
        return {"Content-Type": kind}, encoder(self.registry)

    def collect(self) -> Iterator[Any]:
        """Yield each family with the samples of all runs, for `CollectorRegistry`."""
        states = dict(self.snapshots)
        if not states:
            return
        figures = {name: _gauge(name, text, "attack") for name, text in FIGURES.items()}
        gauges = {name: _gauge(name, text) for name, text in GAUGES.items()}
        info = InfoMetricFamily(
            "lightning_rob_checkpoint", "The newest checkpoint.", labels=["run"]
        )
        waiting = _gauge(
            "notifications_waiting", "Notifications that are not delivered yet.", "destination"
        )
        counters: dict[str, Any] = {}
        for run, state in states.items():
            values: dict[str, float | None] = {
                "alarm": state.history.alarms().event is not None,
                "queue_length": state.queue,
                "last_evaluation_timestamp_seconds": state.evaluated_at,
                "last_look_timestamp_seconds": state.looked_at,
            }
            if state.group:
                *lines, newest = state.group
                about = {name: str(newest[name]) for name in ("checkpoint", "weights", "suite")}
                info.add_metric([run], about)
                values["findings"] = finding_count(lines)
                values |= {f"checkpoint_{name}": newest[name] for name in ("step", "epoch")}
                for line in lines:
                    low, high = line["interval"]
                    found = {"accuracy": line["accuracy"], "images": line["n"]}
                    found |= {"accuracy_low": low, "accuracy_high": high}
                    found |= {"blind": line["blind"]} if "blind" in line else {}
                    for name, value in found.items():  # a share that is not known is NaN
                        value = float("nan") if value is None else value
                        figures[name].add_metric([run, line["name"]], value)
            for name, value in values.items():
                if value is not None:
                    gauges[name].add_metric([run], value)
            for to, count in state.waiting.items():
                waiting.add_metric([run, to], count)
            history = list(state.history.lines)
            events = Counter(line.get("event") for line in history)
            counts = {"alarms": sum(len(line.get("alarm", ())) for line in history)}
            counts |= {"evaluations": events["evaluated"]}
            counts |= {name: events[name] for name in ("missed", "broken")}
            for name, count in counts.items():
                text = f"Number of {name} since the history began."
                family = CounterMetricFamily(f"lightning_rob_{name}", text, labels=["run"])
                counters.setdefault(name, family).add_metric([run], count)
        yield from (*figures.values(), info, *gauges.values(), *counters.values(), waiting)


def _gauge(name: str, text: str, *labels: str) -> Any:
    return GaugeMetricFamily(f"lightning_rob_{name}", text, labels=["run", *labels])
