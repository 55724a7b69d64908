"""The check that pixels which are exactly black or white have a gradient."""

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from lightning_rob.attacks import InsideBounds, WithBackward, attacking
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.audit.case import Case, Subject
from lightning_rob.audit.finding import (
    FEWEST,
    Columns,
    Finding,
    Severity,
    gains,
    known,
    many,
    not_run,
    of_images,
    percent,
    share,
)
from lightning_rob.audit.slope import in_double
from lightning_rob.audit.suite import seen as view_of
from lightning_rob.defenses import Defense
from lightning_rob.objectives import expected_margin

HAIR = 1e-4  # of the pixels' range: far below a grey level
FEWEST_PIXELS = 10  # of an image, at one bound
LEAST_SLOPE = 0.01  # of the image's mean: a smooth rounding is as good as flat near its steps
MOST = 0.5  # of the pixels at a bound that have a slope just inside


def hidden(case: Case) -> Tensor:
    """Of an image's pixels at a bound that have a slope just inside, which share has none there.

    That of the bound where it is larger: [B]. NaN of images that have fewer than ten at either.
    """
    return in_double(case, partial(_hidden, case))


def _hidden(case: Case, target: Defense, x: Tensor) -> Tensor:
    low, high = case.subject.threat.bounds
    inside = x.clamp(low + HAIR * (high - low), high - HAIR * (high - low))
    view, margin = view_of(target), ObjectiveGradient(expected_margin)
    with attacking(target):
        with view(target) if view else nullcontext():
            there, near = (margin(target, z, case.y, case.noise()).gradient for z in (x, inside))
        sloped = near.abs() > LEAST_SLOPE * near.abs().mean((1, 2, 3), keepdim=True)
        lost = sloped & (there == 0)
        up = torch.where(lost & (near * (inside - x) > 0), inside, x)
        promised = (near * (up - x)).flatten(1).sum(1)
        with torch.no_grad():
            risen, stood = (margin.value(target, z, case.y, case.noise()) for z in (up, x))
    # What is flat all around has slopes of rounding just inside, which the answers do not keep.
    kept = ((risen - stood - promised).abs() < 0.5 * promised).view(-1, 1, 1, 1)
    shares = [_share(lost & kept, sloped & (x == bound)) for bound in (low, high)]
    return torch.fmax(*shares).masked_fill(case.sick, torch.nan)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """How much of the whole is in the part, image by image; NaN where it is too small to tell."""
    count = whole.flatten(1).sum(1)
    found: Tensor = (part & whole).flatten(1).sum(1) / count
    return found.double().masked_fill(count < FEWEST_PIXELS, torch.nan)


def inside_bounds(case: Case) -> Tensor:
    """The score under the usual attack with gradients from just inside the bounds."""
    usual = case.subject.suite.usual
    if not (hidden(case) > MOST).any():
        return case.score(usual)
    view = InsideBounds(bounds=case.subject.threat.bounds)
    try:
        return case.play(usual, WithBackward(case.subject.attacks[usual], view))[1].mean(1)
    except TypeError:  # of a defense that names no networks
        return case.unknown()


def bounds(subject: Subject, seen: Columns) -> Finding:
    """Pixels at a bound that no gradient attack sees."""
    if subject.transductive:
        return not_run("bounds", "the answers of a defense that adapts depend on the whole batch")
    if many(seen["unrepeatable"]):
        return not_run("bounds", "answers differ by chance that cannot be repeated")
    shares = known(seen["hidden"])
    low, high = (f"{bound:g}" for bound in subject.threat.bounds)
    if len(shares) < FEWEST:
        reason = (
            f"{len(shares)} images have {FEWEST_PIXELS} pixels that are exactly {low} or exactly "
            f"{high} and have a slope just inside, at least {FEWEST} are needed"
        )
        return not_run("bounds", reason)
    found = (shares > MOST).float()
    usual, inside = seen[subject.suite.usual], seen["inside_bounds"]
    figures = {
        "images": share(found),
        "pixels": share(shares),
        "usual": share(usual),
        "inside": share(inside),
    }
    if not many(found):
        text = f"Pixels that are exactly {low} or {high} have a gradient, as those just inside."
        return Finding("bounds", "fine", text, figures=figures)
    text = (
        f"For {of_images(found)} the gradient of pixels that are exactly {low} or {high} is "
        f"exactly zero ({percent(shares)} of those that have one {HAIR:g} further inside), though "
        "the answers change with them: a clamp, hardtanh or ReLU of the input has slope 0 at its "
        "edge. Attacks by gradient do not see these pixels."
    )
    stronger = gains(usual - inside, subject.exact)
    if not inside.isnan().all():
        text += f" PGD leaves {percent(usual)}, with gradients from just inside {percent(inside)}."
    advice = (
        "Attack with PGD(backward=InsideBounds()), any other attack as WithBackward(attack, "
        "InsideBounds()); or take the clamp off the network: images lie within the bounds anyway."
    )
    severity: Severity = "severe" if stronger else "warning"
    return Finding("bounds", severity, text, advice, figures)
