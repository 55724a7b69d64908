"""Checks of a defense on a few images: what its predictions and its gradients are worth.

A check judges columns of measurements in one sentence. Every evaluation makes the checks on its
first images, and the audit on all of its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_rob.attacks import evaluating
from lightning_rob.attacks.folding import FoldingError
from lightning_rob.evaluation.check_batch import DIRECTIONS, CheckBatch, CheckTarget
from lightning_rob.evaluation.columns import (
    FEWEST_PIXELS,
    HAIR,
    LEAST_CORRELATION,
    MOST,
    SMALL_SPAN,
    LazyColumns,
)
from lightning_rob.evaluation.findings import (
    FEWEST,
    Columns,
    Finding,
    Severity,
    by_severity,
    images_finding,
    images_of,
    known,
    many,
    mean,
    means,
    not_checked,
    percent,
)

T = TypeVar("T", bound=CheckTarget)
Check = Callable[[CheckTarget, Columns], Finding]

NO_PATH = "nothing leads from the outputs back to the image"


def condition(
    name: str,
    column: str,
    fine: str,
    text: str,
    advice: str,
    few: Severity = "fine",
    least: float = 0.0,
) -> Check:
    """Return the check that a measured condition holds for few images.

    The text of its finding has their number as "{images}". `few` is the severity where it holds for
    some images, but not for many. Below the share `least` of the images it is fine in any case.
    """

    def check(target: CheckTarget, columns: Columns) -> Finding:
        found = columns[column]
        if found.isnan().all():
            return not_checked(NO_PATH)
        finding = images_finding(found, fine, text.format(images=images_of(found)), advice, few)
        return replace(finding, severity="fine") if mean(found) < least else finding

    check.__name__ = name
    return check


def numbers(target: CheckTarget, columns: Columns) -> Finding:
    """Find non-finite predictions: they count as wrong, never as class 0."""
    clean = columns["nonfinite_clean"]
    attacked = columns["nonfinite_attacked"] if "nonfinite_attacked" in columns else clean[:0]
    values = means(clean=clean, attacked=attacked)
    if not (clean.any() or attacked.any()):
        return Finding("fine", "All predictions are finite.", values=values)
    text = f"The logits are not finite for {images_of(clean)}"
    if len(attacked):
        text += f", and for {images_of(attacked)} after noise or an attack"
    return Finding(
        "severe" if many(clean) or many(attacked) else "warning",
        f"{text}. They count as wrong.",
        "Find what overflows or divides by zero; until then no attack can follow its gradient.",
        values,
    )


outputs = condition(
    "outputs",
    "is_probability",
    "The outputs are logits, not probabilities.",
    "The outputs for {images} lie in [0, 1] and sum to one: the network ends in a softmax. "
    "Cross-entropy applies another one, so that its gradient is tiny.",
    "Take the softmax off the network, or its logarithm, and run the attacks again.",
)


def steps_inside(target: CheckTarget, columns: Columns) -> Finding:
    """Find piecewise constant logits, as a network of quantized images has them."""
    found = columns["is_constant"]
    blind = many(columns["zero_gradient"]) or many(columns["no_gradient"])
    finding = images_finding(
        found,
        "The logits change with the smallest change of the image.",
        f"The logits for {images_of(found)} stay the same to the last bit when every pixel "
        "changes by 1e-5: the input is quantized, something inside is rounded or thresholded, or "
        "the logits are saturated.",
        "Attack by Auto, or with a gradient that passes straight through the rounding (BPDA), and "
        "without gradients; accuracies under attacks by the network's own gradient say nothing.",
    )
    if blind or not finding.flagged:
        return finding
    text = f"{finding.text} There is a gradient all the same: attacks pass straight through it."
    return Finding("note", text, values=finding.values)


def modes(target: CheckTarget, columns: Columns) -> Finding:
    """Find layers that act as in training when the defense predicts."""
    modules = dict(target.defense.named_modules())
    left_on = [
        f"{name} ({type(module).__name__})"
        for name, module in modules.items()
        if module.training
        and _drops(module)
        # In a network that forgot eval() its parent trains as well.
        and not modules[name.rpartition(".")[0]].training
    ]
    with evaluating(target.defense) as copied:
        found = [
            f"{name} ({type(module).__name__})"
            for name, module in copied.named_modules()
            if isinstance(module, _BatchNorm | _DropoutNd)
            and not (isinstance(module, _DropoutNd) and module.p == 0)
            # Without running statistics BatchNorm takes the batch's, in eval mode too.
            and (module.training or getattr(module, "track_running_stats", True) is False)
        ]
    if found:
        return Finding(
            "severe",
            f"{len(found)} layers act as in training when the defense predicts: {_first(found)}. "
            "Dropout draws, and BatchNorm looks at the other images of the batch.",
            "Let eval() reach them, and keep running statistics; then evaluate again.",
            {"layers": found},
        )
    if left_on:
        return Finding(
            "severe",
            f"Dropout was on in a network in eval mode, and is off here: {_first(left_on)}. The "
            "accuracies are of another classifier.",
            "Call torch.nn.functional.dropout(x, p, training=True) in forward, and evaluate with "
            "inferences=10 and attacks that average over draws, PGD(draws=10).",
            {"layers": left_on},
        )
    text = "BatchNorm and dropout are in eval mode when the defense predicts."
    return Finding("fine", text, values={"layers": []})


def _drops(module: nn.Module) -> bool:
    """Return whether a layer drops values in training: dropout, an RNN, attention, DropPath."""
    rate = getattr(module, "dropout", getattr(module, "drop_prob", 0))
    rate = module.p if isinstance(module, _DropoutNd) else rate
    return isinstance(rate, int | float) and rate > 0


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def normalization(target: CheckTarget, columns: Columns) -> Finding:
    """Find networks of timm that were made for normalized images and get others."""
    try:
        nets: list[Any] = target.defense.classifiers
    except TypeError:  # drawn anew
        nets = [getattr(target.defense, "net", None)]
    for net in nets:
        made_for = getattr(net, "pretrained_cfg", None)
        made_for = made_for if isinstance(made_for, Mapping) else {}
        wanted = [made_for.get(name) for name in ("mean", "std")]
        mean_of, std_of = (tuple(one) if isinstance(one, Sequence) else () for one in wanted)
        if any(mean_of) or {*std_of} - {1.0}:
            return Finding(
                "warning",
                f"{type(net).__name__} was made for images normalized by mean {mean_of} and std "
                f"{std_of}, and gets images in [0, 1].",
                "Evaluate with preprocess=Normalize(mean, std) of lightning_rob.nets, unless it "
                "was trained on images in [0, 1].",
            )
    return Finding("fine", "No network asks for normalized images.")


def batches(target: CheckTarget, columns: Columns) -> Finding:
    """Find predictions that depend on the other images of the batch."""
    if target.transductive:
        return not_checked("this defense adapts to the batch")
    if columns["is_nondeterministic"].any() or (
        target.declared_exact and columns["is_random"].any()
    ):
        return not_checked("predictions are random, other than by the generator of each image")
    found = columns["depends_on_batch"]
    classes = (found > 1).float()
    finding = images_finding(
        (found > 0).float(),
        "The logits of an image are the same in another batch.",
        f"The logits of {images_of(found)} are others in another batch, the predicted class "
        f"of {images_of(classes)}.",
        "If it is meant to adapt to the test batch, give it as a defense with `adapt`, so "
        "that it is attacked in rounds; else find the layer that looks at the batch.",
    )
    return (
        replace(finding, severity="warning") if finding.flagged and not many(classes) else finding
    )


def itself(target: CheckTarget, columns: Columns) -> Finding:
    """Find predictions that change the network."""
    found = columns["changes_itself"]
    if found.isnan().all():
        return not_checked("this defense adapts to the batch")
    if not found.any():
        return Finding("fine", "Predicting leaves the network as it is.", values=means(found=found))
    names, defense = sorted(target.changed), target.defense
    # Changed weights or buffers change predictions; another attribute may be a mere counter.
    tensors = dict([*defense.named_parameters(), *defense.named_buffers()])
    return Finding(
        "severe" if tensors.keys() & set(names) else "warning",
        f"Predicting changes the network itself: {_first(names)}. Here each attack and each "
        "prediction begins with what it was given.",
        "If it is meant to adapt to the test batch, give it as a defense with `adapt`, so that it "
        "is attacked in rounds; else keep what forward writes out of it.",
        {"names": names},
    )


def randomness(target: CheckTarget, columns: Columns) -> Finding:
    """Find predictions that no seed repeats, or over which attacks do not average."""
    if columns["is_nondeterministic"].any():
        return Finding(
            "severe",
            f"The same seed gives other logits for {images_of(columns['is_nondeterministic'])}: "
            "noise from the system or from a generator of its own, or a state. No accuracy of it "
            "can be reproduced.",
            "Draw from the generator that `logits` is given, or from torch's random stream.",
        )
    if target.declared_exact and columns["is_random"].any():
        return Finding(
            "warning",
            f"The logits of {images_of(columns['is_random'])} are random: a network draws noise, "
            "which attacks without draws do not average over.",
            "Attack with draws (PGD(draws=10)), evaluate with inferences=10 and report the "
            "interval.",
        )
    return Finding("fine", "The same seed gives the same logits.")


def gradients_seen(target: CheckTarget, columns: Columns) -> Finding:
    """Find logits that are others while an attack asks for their gradient."""
    found = columns["sees_gradients"]
    if found.isnan().all():
        return not_checked(
            NO_PATH if many(columns["no_gradient"]) else "attacks follow a part of it"
        )
    if columns["is_nondeterministic"].any():
        return not_checked("predictions are nondeterministic, whatever the seed")
    return images_finding(
        found,
        "The logits are the same while a gradient is asked for.",
        f"The logits for {images_of(found)} are others while an attack asks for their "
        "gradient than when they decide: it climbs something else.",
        "Look for requires_grad, is_grad_enabled or the call stack in the forward pass.",
    )


ties = condition(
    "ties",
    "tied",
    "One logit is the largest.",
    "The two largest logits are equal for {images}: they are rounded, and the first of them is "
    "predicted.",
    "Return the logits before rounding, or multiply them before they are rounded.",
    least=0.1,  # half precision has a few
)
small_logits = condition(
    "small_logits",
    "is_small",
    "The logits are no smaller than usual.",
    f"The logits of {{images}}, which are right, differ by less than {SMALL_SPAN:g}: cross-entropy "
    "then raises all wrong classes alike, and PGD is weak.",
    "Multiply the logits by a constant, which changes no prediction, or attack the margin "
    "(objective lightning_rob.objectives.linear).",
    least=0.5,
)
gradient = condition(
    "gradient",
    "no_gradient",
    "Gradients lead from the outputs back to the image.",
    f"For {{images}} {NO_PATH} (detach, numpy, argmax, no_grad): no gradient attack can run.",
    "Give the defense a gradient: its own, one that passes straight through, or that of a network "
    "in its place (BPDA). The accuracy under black-box attacks is an upper bound only.",
)
zero_gradients = condition(
    "zero_gradients",
    "zero_gradient",
    "Gradients are not zero.",
    "The gradient is exactly zero for {images}: attacks by it stay where they start, and the "
    "accuracy that they leave is no robustness.",
    "Look for sign, round, argmax or clamp inside; attack by Auto, or with a gradient that passes "
    "straight through them (BPDA), and without gradients.",
)
infinite_gradients = condition(
    "infinite_gradients",
    "infinite_gradient",
    "Gradients are finite.",
    "The gradient is not finite for {images}, though the logits are: attacks can only take it for "
    "zero.",
    "Look for sqrt, log, norm or a division at 0 and give it a floor; then attack again.",
    few="warning",
)
saturation = condition(
    "saturation",
    "loss_saturated",
    "The loss has a slope.",
    "For {images} cross-entropy is so flat that its gradient is zero, though the margin has one: "
    "the logits are too large, or infinite.",
    "Divide the logits by a constant, which changes no prediction, or attack the margin (objective "
    "lightning_rob.objectives.linear).",
)


def _why_no_slope(target: CheckTarget, columns: Columns) -> str:
    """Return why predictions cannot be compared with slopes; empty if they can."""
    if target.transductive:
        return "the predictions of a defense that adapts depend on the whole batch"
    return "predictions are nondeterministic" if many(columns["is_nondeterministic"]) else ""


def slope(target: CheckTarget, columns: Columns) -> Finding:
    """Find a gradient that is not the slope of the margin: attacks climb something else."""
    near, far = columns["slope_near"], columns["slope_far"]
    images, best = min(len(known(near)), len(known(far))), max(mean(near), mean(far))
    values = means(near=near, far=far) | {"images": images}
    explains = f"explains {100 * max(best, 0.0) ** 2:.3g} % of how the predictions really change"
    if best >= LEAST_CORRELATION:
        return Finding("fine", f"The gradient {explains}.", values=values)
    if reason := _why_no_slope(target, columns):
        return not_checked(reason)
    if not images:
        return not_checked("no gradient that is finite and not zero")
    # Where logits are rounded, differences over a small width say little.
    severity: Severity = "warning" if many(columns["is_constant"]) else "severe"
    if mean(columns["slope_networks"]) >= LEAST_CORRELATION:
        severity = "note"  # the gradients of transforms may be estimates
    return Finding(
        severity,
        f"The gradient only {explains} when all pixels move a little (correlation {best:.2f}): a "
        "part of it is cut off, or it is that of something else. Attacks by gradient are blind to "
        "the rest.",
        "Look for detach, and for a backward pass that is not the forward's; attack the network "
        "without what wraps it, or with a gradient in its place (BPDA), and by a score-based "
        "attack with more queries.",
        values,
    )


def bounds(target: CheckTarget, columns: Columns) -> Finding:
    """Find pixels at a bound that have no gradient, though the predictions depend on them."""
    if reason := _why_no_slope(target, columns):
        return not_checked(reason)
    shares = known(columns["hidden_pixels"])
    low, high = (f"{bound:g}" for bound in target.bounds)
    if len(shares) < FEWEST:
        return not_checked(
            f"{len(shares)} images have {FEWEST_PIXELS} pixels that are exactly {low} or exactly "
            f"{high} and have a slope just inside, at least {FEWEST} are needed"
        )
    found = (shares > MOST).float()
    values = means(images=found, pixels=shares)
    if not many(found):
        text = f"Pixels that are exactly {low} or {high} have a gradient, as those just inside."
        return Finding("fine", text, values=values)
    return Finding(
        "warning",
        f"For {images_of(found)} the gradient of pixels that are exactly {low} or {high} is "
        f"exactly zero ({percent(shares)} of those that have one {HAIR:g} further inside), though "
        "the predictions change with them: a clamp, hardtanh or ReLU of the input has slope 0 at "
        "its edge. Attacks by gradient do not see these pixels.",
        "Attack with PGD(backward=InsideBounds()), any other attack as WithBackward(attack, "
        "InsideBounds()); or take the clamp off the network: images lie within the bounds anyway.",
        values,
    )


CHECKS: tuple[Check, ...] = (
    numbers,
    outputs,
    steps_inside,
    modes,
    normalization,
    batches,
    itself,
    randomness,
    gradients_seen,
    ties,
    small_logits,
    gradient,
    zero_gradients,
    infinite_gradients,
    saturation,
    slope,
    bounds,
)


def checked(
    target: CheckTarget,
    x: Tensor,
    y: Tensor,
    index: Tensor,
    checks: Sequence[Check] = CHECKS,
    directions: int = DIRECTIONS,
) -> list[Finding]:
    """Return what checks find of a defense on a few images, the most severe first."""
    columns = LazyColumns(CheckBatch(target, x, y, index, directions))
    return by_severity(made(check, target, columns) for check in checks)


def made(check: Callable[[T, Columns], Finding], target: T, columns: Columns) -> Finding:
    """Return what a check finds under its name; a warning where the network fails in it."""
    try:
        try:
            found = check(target, columns)
        except FoldingError:  # once: this network is not folded a second time
            found = check(target, columns)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of a network that attacks may be able to use all the same
        reason = str(error).removesuffix(".")
        found = Finding(
            "warning",
            f"This check could not be made: {type(error).__name__}: {reason}.",
            "Let the network take any float32 images, also one alone; then evaluate again.",
            {"run": False},
        )
    return replace(found, name=check.__name__)
