"""Checks of attack strength: more effort is never weaker, and the right attack was run."""

from typing import Any

import torch

from lightning_rob.attacks import Attack
from lightning_rob.attacks.nested import walk
from lightning_rob.audit.target import GRADIENT_FREE, AuditTarget
from lightning_rob.evaluation.findings import (
    Columns,
    Finding,
    images_of,
    is_gain,
    many,
    mean,
    means,
    not_checked,
    percent,
    significant,
)
from lightning_rob.evaluation.power import Power, counted, finding_of
from lightning_rob.evaluation.suites import DISSIMILARITY, MADE_FOR, fitting, plug_in_for
from lightning_rob.objectives import losses_of_rule

RUGGED = 0.1  # of images that five starts break and as many steps from one start do not
FEWEST_STEPS = 5
ADAPTS = "the rounds against a defense that adapts have no such attack"
MASKED = (
    "Gradients mislead. Attack by Auto, the margin with restarts, and without gradients, and look "
    "for what is not smooth inside (docs/audit.md)."
)


def _why_not(columns: Columns, attack: str) -> str:
    """Return why there are no scores under an attack; empty if there are."""
    if attack not in columns:
        return ADAPTS
    return "no gradient attack could run" if columns[attack].isnan().all() else ""


def steps(target: AuditTarget, columns: Columns) -> Finding:
    """Find attacks that grow weaker with more steps."""
    if reason := _why_not(columns, "pgd"):
        return not_checked(reason)
    once, default, longer = columns["fgsm"], columns["pgd"], columns["longer"]
    values = means(one=once, default=default, longer=longer)
    text = f"One step leaves {percent(once)}, PGD {percent(default)}, more steps {percent(longer)}"
    # Which images the last step leaves is random even on a deterministic network.
    if significant(default - once) or significant(longer - default):
        return Finding("severe", f"{text}: more steps are weaker.", MASKED, values)
    if significant(default - longer):
        advice = "Report an attack of more steps: this one had not converged."
        return Finding("note", f"{text}.", advice, values)
    return Finding("fine", f"{text}.", values=values)


def radius(target: AuditTarget, columns: Columns) -> Finding:
    """Find images that stand an attack in a ball that holds every image."""
    if reason := _why_not(columns, "unbounded"):
        return not_checked(reason)
    left = columns["unbounded"]
    text = f"In a ball that holds every image the attack leaves {percent(left)}."
    if not many(left):
        return Finding("fine", text, values=means(left=left))
    if (columns["predicted_class"] == columns["predicted_class"][0]).all():
        return not_checked("it predicts one class for all images")
    text += " It could replace each image by that of another class, and leave nothing."
    return Finding("severe", text, MASKED, means(left=left))


def noise(target: AuditTarget, columns: Columns) -> Finding:
    """Find random noise that is as strong as the default attack."""
    if reason := _why_not(columns, target.suite.default):
        return not_checked(reason)
    clean, random, default = columns["clean"], columns["noise"], columns[target.suite.default]
    values = means(noise=random, default=default)
    text = f"Random noise leaves {percent(random)}, the default attack {percent(default)}."
    breaks = is_gain(clean - random, target.exact)
    if breaks and many(default) and not many(random - default):
        return Finding("severe", f"{text} The attack is no better.", MASKED, values)
    return Finding("fine", text, values=values)


def restarts(target: AuditTarget, columns: Columns) -> Finding:
    """Find a rugged loss: the attack's start decides its success."""
    if reason := _why_not(columns, "pgd"):
        return not_checked(reason)
    default, longer, again = columns["pgd"], columns["longer"], columns["restarts"]
    values = means(default=default, longer=longer, restarts=again)
    text = f"Five starts leave {percent(again)}, as many steps from one start {percent(longer)}."
    # As many steps from one start as from five, so that only the starts differ.
    difference = torch.minimum(default, longer) - again
    if is_gain(difference, target.exact) and mean(difference) > RUGGED:
        text += " Its start decides: the loss is rugged."
        advice = "Report restarts=10 or more, and look for what makes the loss rugged."
        return Finding("warning", text, advice, values)
    return Finding("fine", text, values=values)


def black_box(target: AuditTarget, columns: Columns) -> Finding:
    """Find images that an attack without gradients breaks and no attack with gradients does."""
    if target.transductive:
        return not_checked(ADAPTS)
    square, names = columns["square"], target.suite.within(target.threat)
    seeing = [columns[n].nan_to_num(torch.inf) for n in names if n not in GRADIENT_FREE]
    white = torch.stack([columns["clean"], *seeing]).amin(0)
    # Of noisy scores the negative differences stay: without them chance would look like a loss.
    lost = (white - square).clamp_min(0) if target.exact else white - square
    values = means(white_box=white, square=square, images=lost) | {"queries": target.queries}
    text = (
        f"Square ({target.queries} queries, no gradients) leaves {percent(square)}, all attacks "
        f"with gradients together {percent(white)}."
    )
    if not is_gain(lost, target.exact):
        return Finding("fine", text, values=values)
    found = images_of(lost) if target.exact else percent(lost)
    text += f" {found} stand attacks that see everything and fall to one that sees nothing."
    return Finding("severe", text, MASKED, values)


def adaptive(target: AuditTarget, columns: Columns) -> Finding:
    """Find that the user's evaluation lacks the attack made for this kind of defense."""
    suite, lacking = target.suite, _lacking(target)
    if not suite.adaptive:
        return _pgd_is_adaptive(target, lacking)
    inside = [columns[name] for name in suite.adaptive if name in suite.within(target.threat)]
    # The minimum of noisy scores, image by image, would be too low.
    best = torch.stack(inside).amin(0) if target.exact else min(inside, key=mean)
    default = columns[suite.default]
    # A gap alone is no fault: only that the user's evaluation lacks the attack is.
    gain = is_gain(default - best, target.exact)
    values = means(default=default, adaptive=best)
    values["gap"] = values["default"] - values["adaptive"]
    values["attacks"] = means(**{name: columns[name] for name in suite.adaptive})
    text = f"The default attack leaves {percent(default)}, those for its kind {percent(best)}."
    recipe = f"--trainer.callbacks+={plug_in_for(target.defense, suite.kind)}"
    if lacking:
        advice = f"Add {recipe}, and report what it leaves."
        return Finding("severe" if gain else "warning", f"{lacking} {text}", advice, values)
    if gain:
        return Finding("note", text, f"Report the lower accuracy: {recipe}.", values)
    return Finding("fine", text, values=values)


def _pgd_is_adaptive(target: AuditTarget, lacking: str) -> Finding:
    """Return the finding where PGD is adaptive: on an ensemble if it climbs the rule's loss."""
    if target.suite.kind != "ensemble":
        return Finding("fine", "PGD is adaptive here: there is one network and no randomness.")
    if not lacking:
        text = "PGD on the loss of its rule is adaptive here: its prediction has a gradient."
        return Finding("fine", text)
    loss = losses_of_rule(target.defense.rule)[0].__name__
    advice = f"Run PGD with objective lightning_rob.objectives.{loss} within {target.threat}."
    return Finding("warning", lacking, advice)


def _lacking(target: AuditTarget) -> str:
    """Return what the user's attacks lack, in words; empty if nothing, or without such attacks."""
    kind = target.suite.kind
    if not target.other_attacks or kind == "single":
        return ""
    found = fitting(target.other_attacks, kind, target.defense.rule)
    if any(_is_strong_enough(part, target) for part in found):
        return ""
    if not found:
        names = ", ".join(target.other_attacks)
        return f"This evaluation runs {names}, but not {MADE_FOR[kind]}, made for this kind."
    return (
        f"This evaluation runs {MADE_FOR[kind]}, made for this kind, too weakly: it takes a ball "
        f"of at least {target.threat} and {FEWEST_STEPS} steps or more that lead across it."
    )


def _is_strong_enough(attack: Attack, target: AuditTarget) -> bool:
    """Return whether an attack's ball holds the audit's and its steps, if any, lead across it."""
    ball, threat = attack.threat, target.threat
    if "transformed" in attack.made_for and ball.relative:  # PAA has a ball of its own
        covers = ball.eps >= DISSIMILARITY
    else:
        large = ball.eps >= threat.eps * (1 - 1e-6)
        covers = large and ball.p == threat.p and not ball.relative
    searches: list[Any] = [part for part in walk(attack) if "step_size" in part.lengths]
    crosses = not searches or any(
        part.steps >= FEWEST_STEPS
        # Without a step size those that have a default take at least eps / 4.
        and part.steps * (part.step_size or part.threat.eps / 4) >= part.threat.eps
        for part in searches
    )
    return covers and crosses


def power(target: AuditTarget, columns: Columns) -> Finding:
    """Find attacks that miss adversarial images that exist by construction."""
    reasons = set(target.untested.values())
    if len(reasons) == 1 and "" not in reasons:
        return not_checked(*reasons)
    return finding_of({name: power_of(target, columns, name) for name in target.power_columns})


def power_of(target: AuditTarget, columns: Columns, name: str) -> Power:
    """Return the power of one of the audit's attacks."""
    found = torch.stack([columns[column] for column in target.power_columns[name]], 1)
    return Power.of(counted(found), target.untested[name])


CHECKS = (steps, radius, noise, restarts, black_box, adaptive)
