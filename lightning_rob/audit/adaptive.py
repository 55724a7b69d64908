"""The check that attacks were made for this kind of defense."""

from typing import Any

import torch
from torch import Tensor

from lightning_rob.attacks import PGD, Attack
from lightning_rob.attacks.base import walk
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
from lightning_rob.audit.suite import DISSIMILARITY, climbed
from lightning_rob.defenses import Defense
from lightning_rob.objectives import expected_margin, linear
from lightning_rob.rules import mean_logits, mean_probs

FEWEST_STEPS = 5

WORDS = {
    "ensemble": "PGD on the loss of the rule by which it answers",
    "randomized": "ARC",
    "random": "EoT on the linear loss with AggMo",
    "transformed": "PAA, and PGD through all members that have a gradient",
    "transductive": "GMSA",
}


def adaptive(subject: Subject, seen: Columns) -> Finding:
    """The adaptive attack exists: was it run, well enough, and what does it change?"""
    suite = subject.suite
    if not suite.adaptive:
        return _by_pgd(subject)
    usual, best = seen[suite.usual], _least(subject, seen)
    told = {name: share(seen[name]) for name in suite.adaptive}
    gains = many(usual - best) if subject.exact else beyond_chance(usual - best)
    gap = share(usual) - share(best)
    figures = {"usual": share(usual), "adaptive": share(best), "gap": gap, "attacks": told}
    text = f"The usual attack leaves {percent(usual)}, those for its kind {percent(best)}."
    lacking = _lacking(subject)
    if not lacking:
        severity: Severity = "note" if gains else "fine"
        advice = f"Report the lower figure: --trainer.callbacks+={suite.recipe}." if gains else ""
        return Finding("adaptive", severity, text, advice, figures)
    advice = f"Add --trainer.callbacks+={suite.recipe}, and report what it leaves."
    severity = "severe" if gains else "warning"
    return Finding("adaptive", severity, f"{lacking} {text}", advice, figures)


def _by_pgd(subject: Subject) -> Finding:
    """Where PGD is adaptive; on an ensemble if it climbs what decides its answer."""
    if subject.suite.kind != "ensemble":
        text = "PGD is adaptive here: there is one network and no chance."
        return Finding("adaptive", "fine", text)
    lacking = _lacking(subject)
    if not lacking:
        text = "PGD on the loss of its rule is adaptive here: its answer has a gradient."
        return Finding("adaptive", "fine", text)
    loss = climbed(subject.defense).__name__
    advice = f"Run PGD with objective lightning_rob.objectives.{loss} within {subject.threat}."
    return Finding("adaptive", "warning", lacking, advice)


def _least(subject: Subject, seen: Columns) -> Tensor:
    """The least score [N] under the adaptive attacks of this threat."""
    names = [n for n in subject.suite.adaptive if n in subject.suite.within(subject.threat)]
    columns = [seen[name] for name in names]
    if not subject.exact:  # chance picked image by image would be a bias
        return min(columns, key=share)
    return torch.stack(columns).amin(0)


def _lacking(subject: Subject) -> str:
    """What the attacks run beside the audit lack, in words; empty if nothing, or if there are none.

    One of them has to be made for this kind, in a ball that holds the audit's, and to cross it.
    """
    if not subject.others:
        return ""
    made_of = [part for attack in subject.others.values() for part in walk(attack)]
    fitting = [part for part in made_of if _made_for(subject, part)]
    if any(_covers(subject, part) and _arrives(part) for part in fitting):
        return ""
    names, made_for = ", ".join(subject.others), WORDS[subject.suite.kind]
    if not fitting:
        return f"This evaluation runs {names}, but not {made_for}, made for this kind."
    return (
        f"This evaluation runs {made_for}, made for this kind, too weakly: it takes a ball of at "
        f"least {subject.threat} and {FEWEST_STEPS} steps or more that lead across it."
    )


def _made_for(subject: Subject, part: Attack) -> bool:
    """Whether an attack is one for this kind of defense."""
    kind = subject.suite.kind
    if kind == "random":
        return _averages(part)
    if kind == "ensemble":
        return _climbs(subject.defense, part)
    return kind in part.made_for


def _averages(attack: Attack) -> bool:
    """Whether it is EoT on the linear loss with several velocities."""
    if not isinstance(attack, PGD):
        return False
    several = len(attack.momentum) > 1 or attack.ascent is not None
    return attack.objective is linear and several


def _climbs(defense: Defense, attack: Attack) -> bool:
    """Whether it goes by what decides the ensemble's answer."""
    by_mean = defense.rule in (mean_logits, mean_probs)
    if "ensemble" in attack.made_for:  # AutoAttack: it attacks the mean, not a vote
        return by_mean
    margin = linear if by_mean else expected_margin
    return isinstance(attack, PGD) and attack.objective in (climbed(defense), margin)


def _covers(subject: Subject, part: Attack) -> bool:
    """Whether its ball holds the audit's; that of PAA is another."""
    ball, threat = part.threat, subject.threat
    if "transformed" in part.made_for and ball.relative:
        return ball.eps >= DISSIMILARITY
    large = ball.eps >= threat.eps * (1 - 1e-6)
    return large and ball.p == threat.p and not ball.relative


def _arrives(attack: Attack) -> bool:
    """Whether a search that it is made of has steps enough to cross its ball, if any has steps."""
    searches: list[Any] = [part for part in walk(attack) if "step_size" in part.lengths]
    return not searches or any(
        part.steps >= FEWEST_STEPS
        # without a step size it is ARC with the paper's, which is at least eps / 4
        and part.steps * (part.step_size or part.threat.eps / 4) >= part.threat.eps
        for part in searches
    )
