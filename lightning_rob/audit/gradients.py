"""Checks of what gradient attacks go by."""

from lightning_rob.audit.case import Subject
from lightning_rob.audit.finding import (
    Columns,
    Finding,
    Severity,
    beyond_chance,
    many,
    not_run,
    of_images,
    percent,
    share,
)

NOTHING = "nothing leads from the outputs back to the image"


def gradient(subject: Subject, seen: Columns) -> Finding:
    """A graph that is cut: no gradient attack can run."""
    found = seen["no_gradient"]
    figures = {"images": share(found)}
    if not many(found):
        text = "Gradients lead from the outputs back to the image."
        return Finding("gradient", "fine", text, figures=figures)
    text = f"For {of_images(found)} {NOTHING} (detach, numpy, argmax, no_grad): no gradient attack."
    advice = (
        "Give the defense a gradient: its own, one that passes straight through, or that of a "
        "network in its place (BPDA). What black-box attacks leave is an upper bound only."
    )
    return Finding("gradient", "severe", text, advice, figures)


def zero_gradients(subject: Subject, seen: Columns) -> Finding:
    """Gradients that are exactly zero: attacks stay where they are."""
    found = seen["zero_gradient"]
    if found.isnan().all():
        return not_run("zero_gradients", NOTHING)
    figures = {"images": share(found)}
    if not many(found):
        text = "Gradients are not zero."
        return Finding("zero_gradients", "fine", text, figures=figures)
    text = (
        f"The gradient is exactly zero for {of_images(found)}: gradient attacks stay where they "
        "start, and what they leave is no robustness."
    )
    advice = (
        "Look for sign, round, argmax or clamp inside; attack with a gradient that passes straight "
        "through them (BPDA), and without gradients."
    )
    return Finding("zero_gradients", "severe", text, advice, figures)


def infinite_gradients(subject: Subject, seen: Columns) -> Finding:
    """Gradients that are infinite or no numbers: attacks take them for zero."""
    found = seen["infinite_gradient"]
    if found.isnan().all():
        return not_run("infinite_gradients", NOTHING)
    figures = {"images": share(found)}
    if not (found > 0).any():
        return Finding("infinite_gradients", "fine", "Gradients are finite.", figures=figures)
    text = (
        f"The gradient is infinite or no number for {of_images(found)}, though the outputs are: "
        "attacks can only take it for zero."
    )
    advice = "Look for sqrt, log, norm or a division at 0 and give it a floor; then attack again."
    severity: Severity = "severe" if many(found) else "warning"
    return Finding("infinite_gradients", severity, text, advice, figures)


def saturation(subject: Subject, seen: Columns) -> Finding:
    """Outputs too large for single precision: the loss is flat though the network is not."""
    flat, usual, double = seen["vanished"], seen[subject.suite.usual], seen["double"]
    if flat.isnan().all():
        return not_run("saturation", NOTHING)
    figures = {
        "vanished": share(flat),
        "usual": share(usual),
        "double": share(double),
        "largest_output": float(seen["largest_output"].max()),
    }
    weaker = beyond_chance(usual - double) and not seen["unrepeatable"].any()
    if not (many(flat) or weaker):
        text = "Double precision makes the attack no stronger, and the loss has a slope."
        if double.isnan().all():
            text = "The loss has a slope. The attack was not run again in double precision."
        return Finding("saturation", "fine", text, figures=figures)
    text = f"The outputs are as large as {figures['largest_output']:.3g}."
    if many(flat):
        text += f" For {of_images(flat)} cross-entropy is so flat that its gradient is zero."
    if weaker:
        text += f" PGD leaves {percent(usual)}, in double precision {percent(double)}."
    advice = (
        "Divide the logits by a constant, which changes no answer, or attack the margin "
        "(objective lightning_rob.objectives.linear)."
    )
    return Finding("saturation", "severe", text, advice, figures)
