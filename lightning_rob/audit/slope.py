"""The check that the gradient is the slope of the answers."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from lightning_rob.attacks import attacking
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.audit.case import Case, Subject
from lightning_rob.audit.finding import Columns, Finding, Severity, known, many, not_run, share
from lightning_rob.audit.suite import seen as view_of
from lightning_rob.defenses import Defense, Mixture, Single
from lightning_rob.objectives import expected_margin
from lightning_rob.randomness import uniform

DIRECTIONS = 4  # random corners, of each image
NEAR, FAR = 1e-3, 4 / 255  # what is rounded to grey levels has a slope over the second only
LEAST_CORRELATION = 0.8  # a gradient of half of the pixels, the others cut: 0.7
FEWEST_PAIRS = 50


def slope_near(case: Case) -> Tensor:
    """How the gradient correlates [B] with central differences over 1e-3 of the pixels' range."""
    return in_double(case, partial(_agreement, case, NEAR))


def slope_far(case: Case) -> Tensor:
    """The same over four grey levels."""
    return in_double(case, partial(_agreement, case, FAR))


def slope_networks(case: Case) -> Tensor:
    """That of the networks without the defense's transforms, the better [B] of the two widths."""
    defense = case.subject.defense.adapted_model
    if defense.kind not in ("random_transforms", "transform_ensemble"):
        return case.unknown()
    bare = Mixture([Single(net) for net in defense.foldable_networks])
    widths = (partial(_agreement, case, width) for width in (NEAR, FAR))
    return torch.maximum(*(in_double(case, agreement, bare) for agreement in widths))


def in_double(
    case: Case, measure: Callable[[Defense, Tensor], Tensor], bare: Defense | None = None
) -> Tensor:
    """What is measured [B] of a defense and its images, in double precision where it allows.

    NaN where there is no gradient, or the defense adapts.
    """
    target = bare or case.subject.target
    if case.subject.transductive or target is None or not case.differentiable:
        return case.unknown()
    target = copy.deepcopy(target)
    try:
        return measure(target.double(), case.x.double()).to(case.x)
    except RuntimeError:
        return measure(target.to(case.x.dtype), case.x)


def _agreement(case: Case, width: float, target: Defense, x: Tensor) -> Tensor:
    """The cosine [B] of the margin's slopes and differences along random corners.

    NaN of images whose gradient is zero or no number, or that have no answer: others look at it.
    """
    low, high = case.subject.threat.bounds
    side = high - low
    inside = x.detach().clamp(low + FAR * side, high - FAR * side)  # room on both sides
    view, margin = view_of(target), ObjectiveGradient(expected_margin)
    with attacking(target):
        with view(target) if view else nullcontext():
            gradient = margin(target, inside, case.y, case.noise()).gradient
        slopes, differences = [], []
        with torch.no_grad():
            for corner in _corners(case, inside):
                ends = (inside + width * side * corner, inside - width * side * corner)
                up, down = (margin.value(target, end, case.y, case.noise()) for end in ends)
                slopes.append((gradient * corner).flatten(1).sum(1))
                differences.append(up - down)
    return _cosine(torch.stack(slopes, 1), torch.stack(differences, 1)).masked_fill(
        case.sick | (gradient == 0).flatten(1).all(1), torch.nan
    )


def _corners(case: Case, x: Tensor) -> Iterator[Tensor]:
    """Random signs [B, C, H, W], an image's own."""
    streams = case.noise("slope")
    for _ in range(DIRECTIONS):
        yield torch.where(uniform(x, *x.shape[1:], generator=streams) < 0.5, -1.0, 1.0).to(x)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Of vectors [B, D], whatever their lengths; 0 where the second is zero: [B]."""
    a, b = (v / v.abs().amax(1, keepdim=True).clamp_min(1e-300) for v in (a.double(), b.double()))
    lengths = (a.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-300)
    cosine: Tensor = (a * b).sum(1) / lengths
    return cosine


def slope(subject: Subject, seen: Columns) -> Finding:
    """A gradient that is not the slope of the answers: attacks climb something else."""
    if subject.transductive:
        return not_run("slope", "the answers of a defense that adapts depend on the whole batch")
    if many(seen["unrepeatable"]):
        return not_run("slope", "answers differ by chance that cannot be repeated")
    near, far = seen["slope_near"], seen["slope_far"]
    pairs = DIRECTIONS * min(len(known(near)), len(known(far)))
    if pairs < FEWEST_PAIRS:
        reason = f"{pairs} pairs of a slope and a difference, at least {FEWEST_PAIRS} are needed"
        return not_run("slope", reason)
    best = max(share(near), share(far))
    figures = {"near": share(near), "far": share(far), "pairs": pairs}
    told = f"explains {100 * max(best, 0.0) ** 2:.3g} % of how the answers really change"
    if best >= LEAST_CORRELATION:
        return Finding("slope", "fine", f"The gradient {told}.", figures=figures)
    text = (
        f"The gradient only {told} when all pixels move a little (correlation {best:.2f}): a part "
        "of it is cut off, or it is that of something else. Attacks by gradient are blind to the "
        "rest."
    )
    advice = (
        "Look for detach, and for a backward pass that is not the forward's; attack the network "
        "without what wraps it, or with a gradient in its place (BPDA), and by a score-based "
        "attack with more queries."
    )
    return Finding("slope", _severity(subject, seen), text, advice, figures)


def _severity(subject: Subject, seen: Columns) -> Severity:
    """Severe, unless transforms whose gradient is an estimate explain it, or rounding may."""
    if share(seen["slope_networks"]) >= LEAST_CORRELATION:
        return "note"
    return "warning" if many(seen["constant"]) else "severe"
