"""The check that attacks were made for this kind of defense."""

import torch
from torch import Tensor

from lightning_rob.attacks import ARC, GMSA, PAA, PGD, TAA, Attack, OnDifferentiable
from lightning_rob.attacks.rebuild import parts
from lightning_rob.audit.case import Subject
from lightning_rob.audit.finding import (
    Columns,
    Finding,
    Severity,
    beyond_chance,
    many,
    percent,
    share,
)
from lightning_rob.objectives import linear

WORDS = {
    "ensemble": "PGD on the loss of the rule by which it answers",
    "randomized": "ARC",
    "random": "EoT on the linear loss with AggMo",
    "transformed": "PAA, and PGD through all members that have a gradient",
    "transductive": "GMSA",
}


def adaptive(subject: Subject, seen: Columns) -> Finding:
    """The adaptive attack exists: was it run, and what does it change?"""
    suite = subject.suite
    if not suite.adaptive:
        text = "PGD is adaptive here: there is one network and no chance."
        if suite.kind == "ensemble":
            text = "PGD on the loss of its rule is adaptive here: its answer has a gradient."
        return Finding("adaptive", "fine", text)
    usual, best = seen[suite.usual], _least(subject, seen)
    told = {name: share(seen[name]) for name in suite.adaptive}
    gains = many(usual - best) if subject.exact else beyond_chance(usual - best)
    gap = share(usual) - share(best)
    figures = {"usual": share(usual), "adaptive": share(best), "gap": gap, "attacks": told}
    made_for, recipe = WORDS[suite.kind], suite.recipe
    text = f"The usual attack leaves {percent(usual)}, those for its kind {percent(best)}."
    if not subject.others or _ran(subject):
        severity: Severity = "note" if gains else "fine"
        advice = f"Report the lower figure: --trainer.callbacks+={recipe}." if gains else ""
        return Finding("adaptive", severity, text, advice, figures)
    names = ", ".join(subject.others)
    text = f"This evaluation runs {names}, but not {made_for}, made for this kind. {text}"
    advice = f"Add --trainer.callbacks+={recipe}, and report what it leaves."
    return Finding("adaptive", "severe" if gains else "warning", text, advice, figures)


def _least(subject: Subject, seen: Columns) -> Tensor:
    """The least score [N] under the adaptive attacks of this threat."""
    names = [n for n in subject.suite.adaptive if n in subject.suite.within(subject.threat)]
    columns = [seen[name] for name in names]
    if not subject.exact:  # chance picked image by image would be a bias
        return min(columns, key=share)
    return torch.stack(columns).amin(0)


def _ran(subject: Subject) -> bool:
    """Whether an attack of this kind is among those run beside the audit."""
    kind = subject.suite.kind
    if kind == "random":
        made_of = [part for attack in subject.others.values() for part in parts(attack)]
        return any(_averages(part) for part in made_of)
    made_for: dict[str, tuple[type[Attack], ...]] = {
        "randomized": (ARC,),
        "transformed": (PAA, OnDifferentiable, TAA),
        "transductive": (GMSA,),
    }
    return subject.runs(*made_for[kind])


def _averages(attack: Attack) -> bool:
    """Whether it is EoT on the linear loss with several velocities."""
    if not isinstance(attack, PGD):
        return False
    several = len(attack.dampings) > 1 or attack.ascent is not None
    return attack.objective is linear and several
