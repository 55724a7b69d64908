"""The audit of a defense: attacks by its kind, columns over all images, and all checks."""

from collections.abc import Sequence
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor, nn

from lightning_rob.audit import attacked, strength
from lightning_rob.audit.report import Check, Report
from lightning_rob.audit.target import AuditBatch, AuditTarget
from lightning_rob.evaluation import checks as basic
from lightning_rob.evaluation import columns as basic_columns
from lightning_rob.evaluation import worst_case
from lightning_rob.evaluation.checks import made
from lightning_rob.evaluation.columns import LazyColumns, Measure
from lightning_rob.evaluation.evaluate import as_defense
from lightning_rob.evaluation.evaluator import TRIED
from lightning_rob.evaluation.findings import Columns, by_severity, known
from lightning_rob.evaluation.records import Result, measured
from lightning_rob.evaluation.suites import KINDS
from lightning_rob.evaluation.worst import draws_noise
from lightning_rob.runtime.identity import attack_spec
from lightning_rob.threat import Threat

COLUMNS: dict[str, Measure] = {
    **basic_columns.COLUMNS,
    **{measure.__name__: measure for measure in attacked.COLUMNS},
}
# With attacks the audit looks closer at three of the checks that every evaluation makes.
CLOSER: dict[Check, Check] = {
    basic.randomness: attacked.randomness,
    basic.saturation: attacked.saturation,
    basic.bounds: attacked.bounds,
}
CHECKS: tuple[Check, ...] = (*(CLOSER.get(one, one) for one in basic.CHECKS), *strength.CHECKS)


def audit(
    defense: nn.Module,
    x: Tensor,
    y: Tensor,
    threat: Threat | None = None,
    index: Tensor | None = None,
    checks: Sequence[Check] = CHECKS,
    **options: Any,
) -> Report:
    """Check a defense for a false sense of security, without a Trainer.

    Args:
        defense: a defense, or a network as of `evaluate`; it and torch's global random stream are
            not changed.
        x: [B, C, H, W] images; a defense that adapts has them all in one round.
        threat: linf, l2 or l1; None is linf 8/255.
        index: [B] the images' indices, by which noise is keyed; None for the positions.
        checks: the checks that are made; only the columns that they need are measured.
        **options: see `AuditTarget`.
    """
    whole, index = as_defense(defense), torch.arange(len(x)) if index is None else index
    random = draws_noise(whole, x[:TRIED], index[:TRIED])
    target = AuditTarget(whole, threat or Threat(), random=random, **options)
    columns = LazyColumns(AuditBatch(target, x, y, index.to(x.device)), measures(target))
    return build_report(target, columns, checks)


def measures(target: AuditTarget) -> dict[str, Measure]:
    """Return what measures each column, by name: scores, the attacks' power, then `COLUMNS`."""
    names = [*target.attacks, *target.inferences]
    scores: dict[str, Measure] = {n: methodcaller("score", *n.split("/")) for n in names}
    for name, columns in target.power_columns.items():
        scores |= {column: methodcaller("power", name, i) for i, column in enumerate(columns)}
    return scores | COLUMNS


def measure(target: AuditTarget, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """Return all columns of a batch, in the order of `measures`: [B, len(measures)]."""
    columns, found = LazyColumns(AuditBatch(target, x, y, index), measures(target)), []
    for name in columns:
        try:
            found.append(columns[name])
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if name not in COLUMNS:  # an attack: without it there is nothing to report
                raise
            target.failed[name] = error
            found.append(columns.batch.unknown())
    return torch.stack(found, 1)


class _Measured(dict[str, Tensor]):
    """Columns by name; to read one that could not be measured raises the error."""

    def __init__(self, columns: Columns, failed: dict[str, Exception]) -> None:
        super().__init__((name, one) for name, one in columns.items() if name not in failed)
        self.failed = failed

    def __missing__(self, name: str) -> Tensor:
        raise self.failed[name]


def build_report(target: AuditTarget, columns: Columns, checks: Sequence[Check] = CHECKS) -> Report:
    """Judge the columns [N] of all images together."""
    read = _Measured(columns, target.failed) if target.failed else columns
    if target.power_columns:
        checks = (*checks, strength.power)
    findings = by_severity(made(check, target, read) for check in checks)
    title = f"{type(target.defense).__name__} · {KINDS[target.suite.kind]}"
    results = _results(target, columns) if set(CHECKS) <= set(checks) else []
    return Report(title, results, findings)


def _results(target: AuditTarget, columns: Columns) -> list[Result]:
    """Return the accuracy under each attack that could run, and the worst case in the threat."""
    found = []
    for name, attack in target.attacks.items():
        ball = "every image" if name == "unbounded" else str(attack.threat)
        details = {"attack": attack_spec(attack), "ball": ball} if name != "clean" else {}
        if name in target.power_columns:
            details["power"] = strength.power_of(target, columns, name).record()
        if len(known(columns[name])):
            found.append(measured(name, columns[name], target.seconds[name], details))
    names = target.inferences or target.worst_names
    # An attack that could not run is never the strongest.
    scores = torch.stack([columns[name].nan_to_num(torch.inf) for name in names], 1)
    scores = scores.reshape(len(scores), len(target.worst_names), -1)
    # A minimum of noisy scores, image by image, would be too low.
    random = any(bool(columns[name].any()) for name in ("is_random", "is_nondeterministic"))
    table = torch.arange(len(scores)), scores
    worst = worst_case([table], random or target.kind == "random", joint=target.transductive)
    return [*found, worst.row({"ball": str(target.threat)})]
