"""The audit of a defense: all checks, on as many batches as there are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_rob.audit.adaptive import adaptive
from lightning_rob.audit.answers import batches, modes, numbers, outputs, randomness, steps_inside
from lightning_rob.audit.bounds import bounds
from lightning_rob.audit.case import Case, Subject
from lightning_rob.audit.finding import SEVERITIES, Check, Columns, known
from lightning_rob.audit.gradients import gradient, infinite_gradients, saturation, zero_gradients
from lightning_rob.audit.measures import MEASURES, Seen
from lightning_rob.audit.page import Report
from lightning_rob.audit.slope import slope
from lightning_rob.audit.strength import black_box, noise, radius, restarts, steps
from lightning_rob.defenses import Defense
from lightning_rob.evaluation import worst_case
from lightning_rob.evaluation.records import Result, measured
from lightning_rob.identity import attack_spec
from lightning_rob.threat import Threat

CHECKS: tuple[Check, ...] = (
    numbers,
    outputs,
    steps_inside,
    modes,
    batches,
    randomness,
    gradient,
    zero_gradients,
    infinite_gradients,
    saturation,
    slope,
    bounds,
    steps,
    radius,
    noise,
    restarts,
    black_box,
    adaptive,
)


def audit(
    defense: Defense,
    x: Tensor,
    y: Tensor,
    threat: Threat | None = None,
    index: Tensor | None = None,
    checks: Sequence[Check] = CHECKS,
    **options: Any,
) -> Report:
    """Look for a false sense of security, without a Trainer.

    Args:
        defense: it stays as it is, as does torch's global random stream.
        x: [B, C, H, W] images; a defense that adapts has them all in one round.
        y: [B] labels.
        threat: linf or l2; None is linf 8/255.
        index: [B] the images' indices, by which noise is keyed; None counts them.
        checks: which ones; only what they need is run.
        **options: see `Subject`.
    """
    subject = Subject(defense, threat or Threat(), **options)
    return report(subject, Seen(Case(subject, x, y, index)), checks)


def columns(subject: Subject) -> list[str]:
    """The names of all that is known of an image."""
    return [*subject.attacks, *subject.halves, *MEASURES]


def rows(subject: Subject, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
    """All that is known of a batch [B, len(columns)]."""
    seen = Seen(Case(subject, x, y, index))
    return torch.stack([seen[name] for name in columns(subject)], 1)


def report(subject: Subject, seen: Columns, checks: Sequence[Check] = CHECKS) -> Report:
    """What all the images say together."""
    findings = [check(subject, seen) for check in checks]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    title = f"{type(subject.defense).__name__} · {KINDS[subject.suite.kind]}"
    results = results_of(subject, seen) if tuple(checks) == CHECKS else []
    return Report(title, results, findings)


KINDS = {
    "single": "one network",
    "ensemble": "an ensemble with one answer",
    "randomized": "a randomized ensemble",
    "random": "random answers",
    "transformed": "a transformation ensemble",
    "transductive": "adapts to the test batch",
}


def results_of(subject: Subject, seen: Columns) -> list[Result]:
    """The accuracy under each attack that could run, and the worst case within the threat."""
    found = []
    for name, attack in subject.attacks.items():
        details = {"attack": attack_spec(attack), "ball": str(attack.threat)}
        if name == "huge":
            details["ball"] = "every image"
        if len(known(seen[name])):
            seconds = subject.seconds[name]
            found.append(measured(name, seen[name], seconds, details))
    return [*found, _worst(subject, seen)]


def _worst(subject: Subject, seen: Columns) -> Result:
    """The accuracy under the strongest attack, see `worst_case`."""
    names = subject.halves or subject.counted
    scores = torch.stack([seen[name].nan_to_num(torch.inf) for name in names], 1)
    scores = scores.reshape(len(scores), len(subject.counted), -1)
    table = torch.arange(len(scores)), scores
    chance = any(bool(seen[name].any()) for name in ("by_chance", "unrepeatable"))
    worst = worst_case([table], not subject.exact or chance, joint=subject.transductive)
    details = {"choice": worst.choice, "ball": str(subject.threat)}
    return measured("worst", worst.scores.mean(1), 0.0, details)
