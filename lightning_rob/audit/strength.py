"""Checks of whether attacks behave as attacks on a network without masked gradients do."""

import torch
from torch import Tensor

from lightning_rob.audit.case import NO_GRADIENT_NEEDED, Subject
from lightning_rob.audit.finding import (
    Columns,
    Finding,
    beyond_chance,
    gains,
    many,
    not_run,
    of_images,
    percent,
    share,
)

RUGGED = 0.1  # of images that five starts break and as many steps from one start do not
ADAPTS = "a game against a defense that adapts has no such attack"
MASKED = (
    "Gradients mislead. Attack the margin and with restarts, without gradients, and look for "
    "what is not smooth inside (docs/audit.md)."
)


def steps(subject: Subject, seen: Columns) -> Finding:
    """More steps must not be weaker."""
    if subject.transductive:
        return not_run("steps", ADAPTS)
    once, usual, longer = seen["fgsm"], seen["pgd"], seen["longer"]
    if usual.isnan().all():
        return not_run("steps", "no gradient attack could run")
    figures = {"one": share(once), "usual": share(usual), "longer": share(longer)}
    told = f"One step leaves {percent(once)}, PGD {percent(usual)}, more steps {percent(longer)}"
    # Which images a last step leaves right is chance, even on a network that has none.
    if beyond_chance(usual - once) or beyond_chance(longer - usual):
        return Finding("steps", "severe", f"{told}: more steps are weaker.", MASKED, figures)
    if beyond_chance(usual - longer):
        advice = "Report an attack of more steps: this one had not arrived."
        return Finding("steps", "note", f"{told}.", advice, figures)
    return Finding("steps", "fine", f"{told}.", figures=figures)


def radius(subject: Subject, seen: Columns) -> Finding:
    """In a ball that holds every image nothing can be robust."""
    left = seen["huge"]
    if left.isnan().all():
        return not_run("radius", "no gradient attack could run")
    figures = {"left": share(left)}
    text = f"In a ball that holds every image the attack leaves {percent(left)}."
    if not many(left):
        return Finding("radius", "fine", text, figures=figures)
    text += " It could replace each image by that of another class, and leave nothing."
    return Finding("radius", "severe", text, MASKED, figures)


def noise(subject: Subject, seen: Columns) -> Finding:
    """Random noise must be weaker than an attack."""
    clean, random, usual = seen["clean"], seen["noise"], seen[subject.suite.usual]
    if usual.isnan().all():
        return not_run("noise", "no gradient attack could run")
    figures = {"noise": share(random), "usual": share(usual)}
    text = f"Random noise leaves {percent(random)}, the usual attack {percent(usual)}."
    breaks = gains(clean - random, subject.exact)
    if breaks and many(usual) and not many(random - usual):
        return Finding("noise", "severe", f"{text} The attack is no better.", MASKED, figures)
    return Finding("noise", "fine", text, figures=figures)


def restarts(subject: Subject, seen: Columns) -> Finding:
    """Starting anywhere else must not matter much."""
    if subject.transductive:
        return not_run("restarts", ADAPTS)
    usual, longer, again = seen["pgd"], seen["longer"], seen["restarts"]
    if usual.isnan().all():
        return not_run("restarts", "no gradient attack could run")
    figures = {"usual": share(usual), "longer": share(longer), "restarts": share(again)}
    text = f"Five starts leave {percent(again)}, as many steps from one start {percent(longer)}."
    lost = torch.minimum(usual, longer) - again
    if gains(lost, subject.exact) and share(lost) > RUGGED:
        text += " Where it starts decides: the loss is rugged."
        advice = "Report restarts=10 or more, and look for what makes the loss rugged."
        return Finding("restarts", "warning", text, advice, figures)
    return Finding("restarts", "fine", text, figures=figures)


def black_box(subject: Subject, seen: Columns) -> Finding:
    """What an attack without gradients breaks, one with gradients must break."""
    if subject.transductive:
        return not_run("black_box", ADAPTS)
    if "square" not in seen:
        return not_run(
            "black_box",
            'the Square Attack needs pyautoattack: pip install "lightning-rob[autoattack]"',
        )
    square, white = seen["square"], white_box(subject, seen)
    lost = (white - square).clamp_min(0) if subject.exact else white - square
    figures = {
        "white_box": share(white),
        "square": share(square),
        "images": share(lost),
        "queries": subject.queries,
    }
    text = (
        f"Square ({subject.queries} queries, no gradients) leaves {percent(square)}, all attacks "
        f"with gradients together {percent(white)}."
    )
    if not gains(lost, subject.exact):
        return Finding("black_box", "fine", text, figures=figures)
    found = of_images(lost) if subject.exact else percent(lost)
    text += f" {found} stand attacks that see everything and fall to one that sees nothing."
    return Finding("black_box", "severe", text, MASKED, figures)


def white_box(subject: Subject, seen: Columns) -> Tensor:
    """The least score [N] under attacks with gradients; of the clean image if none could run."""
    names = [n for n in subject.suite.within(subject.threat) if n not in NO_GRADIENT_NEEDED]
    columns = [seen["clean"], *(seen[name].nan_to_num(torch.inf) for name in names)]
    return torch.stack(columns).amin(0)
