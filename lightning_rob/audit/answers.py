"""Checks of what a defense answers with: numbers, logits, the same ones at each call."""

from collections.abc import Iterator

from torch import nn

from lightning_rob.attacks import evaluating
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
from lightning_rob.defenses import Defense

LAYERS = (
    nn.modules.batchnorm._BatchNorm,
    nn.modules.dropout._DropoutNd,
)


def numbers(subject: Subject, seen: Columns) -> Finding:
    """Answers that are no numbers: they count as wrong, never as class 0."""
    clean, near = seen["not_numbers"], seen["not_numbers_near"]
    figures = {"clean": share(clean), "attacked": share(near)}
    if not (clean.any() or near.any()):
        return Finding("numbers", "fine", "All answers are numbers.", figures=figures)
    text = (
        f"No finite number comes out for {of_images(clean)}, and for {of_images(near)} after noise "
        "or an attack. They count as wrong."
    )
    advice = "Find what overflows or divides by zero; until then no attack can follow its gradient."
    severity: Severity = "severe" if many(clean) or many(near) else "warning"
    return Finding("numbers", severity, text, advice, figures)


def outputs(subject: Subject, seen: Columns) -> Finding:
    """Probabilities where logits are expected: the loss flattens where the network is sure."""
    found = seen["probabilities"]
    figures = {"images": share(found)}
    if not many(found):
        text = "The outputs are logits, not probabilities."
        return Finding("outputs", "fine", text, figures=figures)
    text = (
        f"The outputs for {of_images(found)} lie in [0, 1] and sum to one: the network ends in a "
        "softmax. Cross-entropy applies another one, so that its gradient is tiny."
    )
    advice = "Take the softmax off the network, or its logarithm, and run the attacks again."
    return Finding("outputs", "severe", text, advice, figures)


def steps_inside(subject: Subject, seen: Columns) -> Finding:
    """Outputs that are piecewise constant, as those of quantised images are."""
    found = seen["constant"]
    figures = {"images": share(found)}
    if not many(found):
        text = "Outputs change with the smallest change of the image."
        return Finding("steps_inside", "fine", text, figures=figures)
    text = (
        f"The outputs for {of_images(found)} stay the same to the last bit when every pixel "
        "changes by 1e-5: the input is quantised, something inside is rounded or thresholded, or "
        "the outputs are saturated."
    )
    if many(seen["zero_gradient"]) or many(seen["no_gradient"]):
        advice = (
            "Attack with a gradient that passes straight through what rounds (BPDA), and without "
            "gradients; the accuracies under gradient attacks say nothing here."
        )
        return Finding("steps_inside", "severe", text, advice, figures)
    text += " There is a gradient all the same: attacks pass straight through it."
    return Finding("steps_inside", "note", text, figures=figures)


def modes(subject: Subject, seen: Columns) -> Finding:
    """Layers that still train when the defense answers."""
    found = [f"{name} ({kind})" for name, kind in _training(subject.defense)]
    figures = {"layers": found}
    if not found:
        text = "BatchNorm and dropout are in eval mode when it answers."
        return Finding("modes", "fine", text, figures=figures)
    shown = ", ".join(found[:3]) + (" …" if len(found) > 3 else "")
    text = (
        f"{len(found)} layers act as in training when the defense answers: {shown}. Dropout "
        "draws, and BatchNorm looks at the other images of the batch."
    )
    advice = "Let eval() reach them, and keep running statistics; then evaluate again."
    return Finding("modes", "severe", text, advice, figures)


def _training(defense: Defense) -> Iterator[tuple[str, str]]:
    with evaluating(defense):
        for name, module in defense.named_modules():
            batch_only = getattr(module, "track_running_stats", True) is False
            idle = isinstance(module, nn.modules.dropout._DropoutNd) and module.p == 0
            if isinstance(module, LAYERS) and (module.training or batch_only) and not idle:
                yield name, type(module).__name__


def batches(subject: Subject, seen: Columns) -> Finding:
    """Answers that depend on the other images of the batch."""
    if subject.transductive:
        return not_run("batches", "this defense adapts to the batch")
    if seen["unrepeatable"].any():
        return not_run("batches", "answers differ by chance that cannot be repeated")
    found = seen["alone"]
    figures = {"images": share(found)}
    if not many(found):
        text = "An image alone is answered as in a batch."
        return Finding("batches", "fine", text, figures=figures)
    text = f"{of_images(found)} are answered otherwise alone than in a batch with others."
    advice = (
        "If it is meant to adapt to the test batch, give it as a defense with `adapt`, so that it "
        "is played as a game; else find the layer that looks at the batch."
    )
    return Finding("batches", "severe", text, advice, figures)


def randomness(subject: Subject, seen: Columns) -> Finding:
    """Chance in the answers that attacks do not average over."""
    if not (seen["by_chance"].any() or seen["unrepeatable"].any()):
        return Finding("randomness", "fine", "The same image has the same answer every time.")
    usual, averaged = seen[subject.suite.usual], seen["eot"]
    figures = {
        "other_answer": share(seen["second_answer"]),
        "unrepeatable": share(seen["unrepeatable"]),
        "usual": share(usual),
        "averaged": share(averaged),
    }
    text = f"A second answer differs from the first on {percent(seen['second_answer'])} of images."
    gains = beyond_chance(usual - averaged)
    if gains:
        text += (
            f" PGD that looks at one draw a step leaves {percent(usual)}, averaged over ten draws "
            f"(EoT) {percent(averaged)}."
        )
    advice = (
        "Attack with draws (PGD(draws=10)), evaluate with inferences=10 and report the interval."
    )
    if many(seen["unrepeatable"]):
        text += " The chance is not the generator's: no figure of it can be repeated."
        return Finding("randomness", "severe", text, _own_generator(advice), figures)
    if subject.exact:
        text += f" Yet a {type(subject.defense).__name__} stands for one that has no chance in it."
        severity: Severity = "severe" if gains else "warning"
        return Finding("randomness", severity, text, advice, figures)
    text += " The audit's own attack averages over draws."
    return Finding("randomness", "note", text, advice if gains else "", figures)


def _own_generator(advice: str) -> str:
    return f"{advice} Draw from the generator that `logits` is given."
