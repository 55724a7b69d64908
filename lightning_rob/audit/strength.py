"""Checks of attack strength: more effort is never weaker, and the right attack was run."""

from typing import Any

import torch
from torch import Tensor

from lightning_rob.attacks import Attack
from lightning_rob.attacks.base import walk
from lightning_rob.audit.findings import (
    Columns,
    Finding,
    Severity,
    images_of,
    is_gain,
    many,
    mean,
    not_checked,
    percent,
    significant,
)
from lightning_rob.audit.target import GRADIENT_FREE, AuditTarget
from lightning_rob.evaluation.suites import DISSIMILARITY
from lightning_rob.objectives import ce_of_rule

RUGGED = 0.1  # of images that five starts break and as many steps from one start do not
FEWEST_STEPS = 5
ADAPTS = "the rounds against a defense that adapts have no such attack"
NO_ATTACK = "no gradient attack could run"
MASKED = (
    "Gradients mislead. Attack the margin and with restarts, without gradients, and look for "
    "what is not smooth inside (docs/audit.md)."
)
MADE_FOR = {  # each kind of defense
    "ensemble": "PGD on the loss of the rule by which it predicts",
    "randomized": "ARC",
    "random": "EoT on the linear loss with AggMo",
    "transformed": "PAA, and PGD through all members that have a gradient",
    "transductive": "GMSA",
}


def steps(target: AuditTarget, columns: Columns) -> Finding:
    """Find attacks that grow weaker with more steps."""
    if target.transductive:
        return not_checked("steps", ADAPTS)
    once, default, longer = columns["fgsm"], columns["pgd"], columns["longer"]
    if default.isnan().all():
        return not_checked("steps", NO_ATTACK)
    values = {"one": mean(once), "default": mean(default), "longer": mean(longer)}
    text = f"One step leaves {percent(once)}, PGD {percent(default)}, more steps {percent(longer)}"
    # Which images the last step leaves is random even on a deterministic network.
    if significant(default - once) or significant(longer - default):
        return Finding("steps", "severe", f"{text}: more steps are weaker.", MASKED, values)
    if significant(default - longer):
        advice = "Report an attack of more steps: this one had not converged."
        return Finding("steps", "note", f"{text}.", advice, values)
    return Finding("steps", "fine", f"{text}.", values=values)


def radius(target: AuditTarget, columns: Columns) -> Finding:
    """Find images that stand an attack in a ball that holds every image."""
    left = columns["unbounded"]
    if left.isnan().all():
        return not_checked("radius", NO_ATTACK)
    values = {"left": mean(left)}
    text = f"In a ball that holds every image the attack leaves {percent(left)}."
    if not many(left):
        return Finding("radius", "fine", text, values=values)
    text += " It could replace each image by that of another class, and leave nothing."
    return Finding("radius", "severe", text, MASKED, values)


def noise(target: AuditTarget, columns: Columns) -> Finding:
    """Find random noise that is as strong as the default attack."""
    clean, random, default = columns["clean"], columns["noise"], columns[target.suite.default]
    if default.isnan().all():
        return not_checked("noise", NO_ATTACK)
    values = {"noise": mean(random), "default": mean(default)}
    text = f"Random noise leaves {percent(random)}, the default attack {percent(default)}."
    breaks = is_gain(clean - random, target.exact)
    if breaks and many(default) and not many(random - default):
        return Finding("noise", "severe", f"{text} The attack is no better.", MASKED, values)
    return Finding("noise", "fine", text, values=values)


def restarts(target: AuditTarget, columns: Columns) -> Finding:
    """Find a rugged loss: the attack's start decides its success."""
    if target.transductive:
        return not_checked("restarts", ADAPTS)
    default, longer, again = columns["pgd"], columns["longer"], columns["restarts"]
    if default.isnan().all():
        return not_checked("restarts", NO_ATTACK)
    values = {"default": mean(default), "longer": mean(longer), "restarts": mean(again)}
    text = f"Five starts leave {percent(again)}, as many steps from one start {percent(longer)}."
    difference = torch.minimum(default, longer) - again
    if is_gain(difference, target.exact) and mean(difference) > RUGGED:
        text += " Its start decides: the loss is rugged."
        advice = "Report restarts=10 or more, and look for what makes the loss rugged."
        return Finding("restarts", "warning", text, advice, values)
    return Finding("restarts", "fine", text, values=values)


def black_box(target: AuditTarget, columns: Columns) -> Finding:
    """Find images that an attack without gradients breaks and no attack with gradients does."""
    if target.transductive:
        return not_checked("black_box", ADAPTS)
    if "square" not in columns:
        return not_checked(
            "black_box",
            'the Square Attack needs pyautoattack: pip install "lightning-rob[autoattack]"',
        )
    square, white = columns["square"], _white_box(target, columns)
    lost = (white - square).clamp_min(0) if target.exact else white - square
    values = {
        "white_box": mean(white),
        "square": mean(square),
        "images": mean(lost),
        "queries": target.queries,
    }
    text = (
        f"Square ({target.queries} queries, no gradients) leaves {percent(square)}, all attacks "
        f"with gradients together {percent(white)}."
    )
    if not is_gain(lost, target.exact):
        return Finding("black_box", "fine", text, values=values)
    found = images_of(lost) if target.exact else percent(lost)
    text += f" {found} stand attacks that see everything and fall to one that sees nothing."
    return Finding("black_box", "severe", text, MASKED, values)


def _white_box(target: AuditTarget, columns: Columns) -> Tensor:
    """Return the lowest score [N], clean and under attacks with gradients."""
    names = [name for name in target.suite.within(target.threat) if name not in GRADIENT_FREE]
    scores = [columns["clean"], *(columns[name].nan_to_num(torch.inf) for name in names)]
    return torch.stack(scores).amin(0)


def adaptive(target: AuditTarget, columns: Columns) -> Finding:
    """Find that the user's evaluation lacks the attack made for this kind of defense."""
    suite, lacking = target.suite, _lacking(target)
    if not suite.adaptive:
        return _pgd_is_adaptive(target, lacking)
    default, best = columns[suite.default], _strongest_adaptive(target, columns)
    gain = is_gain(default - best, target.exact)
    values = {
        "default": mean(default),
        "adaptive": mean(best),
        "gap": mean(default) - mean(best),
        "attacks": {name: mean(columns[name]) for name in suite.adaptive},
    }
    text = f"The default attack leaves {percent(default)}, those for its kind {percent(best)}."
    if not lacking:
        severity: Severity = "note" if gain else "fine"
        advice = f"Report the lower accuracy: --trainer.callbacks+={suite.recipe}." if gain else ""
        return Finding("adaptive", severity, text, advice, values)
    advice = f"Add --trainer.callbacks+={suite.recipe}, and report what it leaves."
    severity = "severe" if gain else "warning"
    return Finding("adaptive", severity, f"{lacking} {text}", advice, values)


def _pgd_is_adaptive(target: AuditTarget, lacking: str) -> Finding:
    """Return the finding where PGD is adaptive: on an ensemble if it climbs the rule's loss."""
    if target.suite.kind != "ensemble":
        text = "PGD is adaptive here: there is one network and no randomness."
        return Finding("adaptive", "fine", text)
    if not lacking:
        text = "PGD on the loss of its rule is adaptive here: its prediction has a gradient."
        return Finding("adaptive", "fine", text)
    loss = ce_of_rule(target.defense.rule).__name__
    advice = f"Run PGD with objective lightning_rob.objectives.{loss} within {target.threat}."
    return Finding("adaptive", "warning", lacking, advice)


def _strongest_adaptive(target: AuditTarget, columns: Columns) -> Tensor:
    """Return the lowest scores [N] under the adaptive attacks of this threat."""
    inside = target.suite.within(target.threat)
    scores = [columns[name] for name in target.suite.adaptive if name in inside]
    if not target.exact:  # the minimum of noisy scores, image by image, would be too low
        return min(scores, key=mean)
    return torch.stack(scores).amin(0)


def _lacking(target: AuditTarget) -> str:
    """Return what the user's attacks lack, in words; empty if nothing, or without such attacks.

    One of them, or a part of one, has to be made for this kind of defense, in a ball that holds
    the audit's, with steps enough to cross it.
    """
    kind, rule = target.suite.kind, target.defense.rule
    if not target.other_attacks or kind == "single":
        return ""
    parts = [part for attack in target.other_attacks.values() for part in walk(attack)]
    fitting = [part for part in parts if part.is_made_for(kind, rule)]
    if any(_covers(part, target) and _crosses_ball(part) for part in fitting):
        return ""
    if not fitting:
        names = ", ".join(target.other_attacks)
        return f"This evaluation runs {names}, but not {MADE_FOR[kind]}, made for this kind."
    return (
        f"This evaluation runs {MADE_FOR[kind]}, made for this kind, too weakly: it takes a ball "
        f"of at least {target.threat} and {FEWEST_STEPS} steps or more that lead across it."
    )


def _covers(attack: Attack, target: AuditTarget) -> bool:
    """Return whether an attack's ball holds the audit's; PAA has a ball of its own."""
    ball, threat = attack.threat, target.threat
    if "transformed" in attack.made_for and ball.relative:
        return ball.eps >= DISSIMILARITY
    large = ball.eps >= threat.eps * (1 - 1e-6)
    return large and ball.p == threat.p and not ball.relative


def _crosses_ball(attack: Attack) -> bool:
    """Return whether a search inside the attack has steps enough to cross its ball, if any has."""
    searches: list[Any] = [part for part in walk(attack) if "step_size" in part.lengths]
    return not searches or any(
        part.steps >= FEWEST_STEPS
        # Without a step size it is ARC with the paper's, which is at least eps / 4.
        and part.steps * (part.step_size or part.threat.eps / 4) >= part.threat.eps
        for part in searches
    )
