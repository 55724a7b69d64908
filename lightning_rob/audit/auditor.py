"""The audit of a defense: attacks by its kind, measurements of each image, and all checks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_rob.audit import gradients, predictions, strength
from lightning_rob.audit.findings import STYLES, Check, Columns, Report, known
from lightning_rob.audit.target import AuditBatch, AuditTarget
from lightning_rob.defenses import Defense
from lightning_rob.evaluation import worst_case
from lightning_rob.evaluation.records import Result, measured
from lightning_rob.evaluation.suites import SuiteKind
from lightning_rob.identity import attack_spec
from lightning_rob.randomness import derive_seed, seeded_global_rng
from lightning_rob.threat import Threat

MEASUREMENTS: dict[str, Callable[[AuditBatch], Tensor]] = {
    measure.__name__: measure for measure in (*predictions.MEASUREMENTS, *gradients.MEASUREMENTS)
}
CHECKS: tuple[Check, ...] = (*predictions.CHECKS, *gradients.CHECKS, *strength.CHECKS)
KINDS: dict[SuiteKind, str] = {
    "single": "one network",
    "ensemble": "an ensemble with one prediction",
    "randomized": "a randomized ensemble",
    "random": "random predictions",
    "transformed": "a transformation ensemble",
    "transductive": "adapts to the test batch",
}


def audit(
    defense: Defense,
    x: Tensor,
    y: Tensor,
    threat: Threat | None = None,
    index: Tensor | None = None,
    checks: Sequence[Check] = CHECKS,
    **options: Any,
) -> Report:
    """Check a defense for a false sense of security, without a Trainer.

    Args:
        defense: the defense; it and torch's global random stream are not changed.
        x: [B, C, H, W] images; a defense that adapts has them all in one round.
        y: [B] labels.
        threat: linf or l2; None is linf 8/255.
        index: [B] the images' indices, by which noise is keyed; None for the positions.
        checks: which ones; only the measurements that they need are made.
        **options: see `AuditTarget`.
    """
    target = AuditTarget(defense, threat or Threat(), **options)
    return build_report(target, LazyMeasurements(AuditBatch(target, x, y, index)), checks)


class LazyMeasurements(Mapping[str, Tensor]):
    """The columns [B] of a batch by name, each measured when it is first read.

    Args:
        batch: the batch.
    """

    def __init__(self, batch: AuditBatch) -> None:
        self.batch = batch
        self.columns: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(column_names(self.batch.target))

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(column_names(self.batch.target))

    def __getitem__(self, name: str) -> Tensor:
        """Return a column; reading in another order measures the same."""
        if name not in self.columns:
            batch = self.batch
            seed = derive_seed(batch.target.seed, *name.encode(), *batch.index.tolist())
            with seeded_global_rng(torch.Generator().manual_seed(seed), batch.x.device):
                attack, _, half = name.partition("/")
                attacked = attack in batch.target.attacks
                found = batch.score(attack, half) if attacked else MEASUREMENTS[name](batch).float()
                self.columns[name] = found
        return self.columns[name]


def column_names(target: AuditTarget) -> list[str]:
    """Return the names of all columns: scores under attacks, then measurements."""
    return [*target.attacks, *target.half_columns, *MEASUREMENTS]


def measure(target: AuditTarget, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Return all columns of a batch: [B, len(column_names)]."""
    return torch.stack(list(LazyMeasurements(AuditBatch(target, x, y, index)).values()), 1)


def build_report(target: AuditTarget, columns: Columns, checks: Sequence[Check] = CHECKS) -> Report:
    """Judge the columns [N] of all images together."""
    findings = [replace(check(target, columns), name=check.__name__) for check in checks]
    findings.sort(key=lambda finding: list(STYLES).index(finding.severity))
    title = f"{type(target.defense).__name__} · {KINDS[target.suite.kind]}"
    results = _results(target, columns) if tuple(checks) == CHECKS else []
    return Report(title, results, findings)


def _results(target: AuditTarget, columns: Columns) -> list[Result]:
    """Return the accuracy under each attack that could run, and the worst case in the threat."""
    found = []
    for name, attack in target.attacks.items():
        ball = "every image" if name == "unbounded" else str(attack.threat)
        details = {"attack": attack_spec(attack), "ball": ball}
        if len(known(columns[name])):
            found.append(measured(name, columns[name], target.seconds[name], details))
    return [*found, _worst(target, columns)]


def _worst(target: AuditTarget, columns: Columns) -> Result:
    """Return the accuracy under the strongest attack, see `worst_case`."""
    names = target.half_columns or target.worst_over
    scores = torch.stack([columns[name].nan_to_num(torch.inf) for name in names], 1)
    scores = scores.reshape(len(scores), len(target.worst_over), -1)
    random = any(bool(columns[name].any()) for name in ("is_random", "is_nondeterministic"))
    table = torch.arange(len(scores)), scores
    worst = worst_case([table], random or not target.exact, joint=target.transductive)
    details = {"choice": worst.choice, "ball": str(target.threat)}
    return measured("worst", worst.scores.mean(1), 0.0, details)
