"""Checks of the gradients that attacks follow: present, finite, and the slope of the predictions.

All are of the margin, the largest wrong logit minus the label's, unless cross-entropy is named.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_rob.attacks import InsideBounds, WithBackward, attacking
from lightning_rob.attacks.backward import entered
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.audit.findings import (
    FEWEST,
    Columns,
    Finding,
    Severity,
    images_finding,
    images_of,
    is_gain,
    known,
    many,
    mean,
    means,
    not_checked,
    percent,
    significant,
)
from lightning_rob.audit.target import AuditBatch, AuditTarget
from lightning_rob.defenses import Defense, Mixture, Single
from lightning_rob.evaluation.suites import DoublePrecision, doubled, surrogate_for
from lightning_rob.objectives import expected_margin
from lightning_rob.randomness import uniform

NO_PATH = "nothing leads from the outputs back to the image"
UNCLAMP = (
    "Attack with PGD(backward=InsideBounds()), any other attack as WithBackward(attack, "
    "InsideBounds()); or take the clamp off the network: images lie within the bounds anyway."
)
MARGIN = ObjectiveGradient(expected_margin)
DIRECTIONS = 4  # random corners, of each image
NEAR, FAR = 1e-3, 4 / 255  # rounding to grey levels has a slope over the second width only
LEAST_CORRELATION = 0.8  # a gradient of half of the pixels, the others cut, has 0.7
FEWEST_PAIRS = 50
HAIR = 1e-4  # of the pixels' range: far below a grey level
FEWEST_PIXELS = 10  # of an image, at one bound
LEAST_SLOPE = 0.01  # of the image's mean: a smooth rounding is as good as flat near its steps
MOST = 0.5  # of the pixels at a bound that have a slope just inside


def no_gradient(batch: AuditBatch) -> Tensor:
    """Return the images [B] to which no gradient leads from the logits."""
    return torch.full_like(batch.nonfinite, not batch.differentiable)


def zero_gradient(batch: AuditBatch) -> Tensor:
    """Return the images [B] with a gradient of exactly zero."""
    return _where(batch, lambda margin, _: (margin == 0).all(1))


def infinite_gradient(batch: AuditBatch) -> Tensor:
    """Return the images [B] with non-finite entries in the gradient of margin or cross-entropy."""
    return _where(batch, lambda *both: ~torch.cat(both, 1).isfinite().all(1))


def loss_saturated(batch: AuditBatch) -> Tensor:
    """Return the images [B] on which cross-entropy is flat and the margin is not."""
    return _where(batch, lambda margin, loss: (loss == 0).all(1) & ~(margin == 0).all(1))


def _where(batch: AuditBatch, test: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a test [B] of the gradients [B, D] of margin and cross-entropy; NaN without any."""
    if batch.gradients is None:
        return batch.unknown()
    return test(*batch.gradients) & ~batch.nonfinite


def largest_logit(batch: AuditBatch) -> Tensor:
    """Return the largest magnitude [B] among the logits."""
    magnitude: Tensor = batch.logits.abs().amax(-1).amax(0)
    return magnitude.nan_to_num(posinf=torch.finfo(magnitude.dtype).max)


def double(batch: AuditBatch) -> Tensor:
    """Return the scores [B] under the default attack in double precision, where it can run."""
    if not batch.target.exact:
        return batch.unknown()
    name = batch.target.suite.default
    try:
        return batch.run(name, DoublePrecision(batch.target.attacks[name]))[1].mean(1)
    except RuntimeError:  # of a network that insists on single precision
        return batch.unknown()


def slope_near(batch: AuditBatch) -> Tensor:
    """Return the correlation [B] of the gradient with differences over 1e-3 of the range."""
    return in_double(batch, partial(_agreement, batch, NEAR))


def slope_far(batch: AuditBatch) -> Tensor:
    """Return the correlation [B] of the gradient with differences over four grey levels."""
    return in_double(batch, partial(_agreement, batch, FAR))


def slope_networks(batch: AuditBatch) -> Tensor:
    """Return the correlation [B] for the networks without transforms, of the better width."""
    defense = batch.target.defense.adapted_model
    if defense.kind not in ("random_transforms", "transform_ensemble"):
        return batch.unknown()
    networks = Mixture([Single(net) for net in defense.foldable_networks])
    widths = (partial(_agreement, batch, width) for width in (NEAR, FAR))
    return torch.maximum(*(in_double(batch, agreement, networks) for agreement in widths))


def in_double(
    batch: AuditBatch,
    measure: Callable[[Defense, Tensor], Tensor],
    defense: Defense | None = None,
) -> Tensor:
    """Measure [B] a defense on the images, in double precision where the defense allows it.

    Args:
        batch: the images.
        measure: defense and images -> [B].
        defense: None for the part of the audit's target that has a gradient.

    Returns:
        [B]; NaN where there is no gradient, or the defense adapts.
    """
    defense = defense or batch.target.differentiable_part
    if batch.target.transductive or defense is None or not batch.differentiable:
        return batch.unknown()
    try:
        return measure(doubled(defense), batch.x.double()).to(batch.x)
    except RuntimeError:
        return measure(defense, batch.x)


def _margin(batch: AuditBatch, defense: Defense, x: Tensor) -> Tensor:
    with attacking(defense), torch.no_grad():
        return MARGIN.value(defense, x, batch.y, batch.noise())


def _margin_gradient(batch: AuditBatch, defense: Defense, x: Tensor) -> Tensor:
    with attacking(defense), entered(surrogate_for(defense), defense):
        return MARGIN(defense, x, batch.y, batch.noise()).gradient


def _agreement(batch: AuditBatch, width: float, defense: Defense, x: Tensor) -> Tensor:
    """Return the cosine [B] of slopes and central differences along random corners.

    NaN for images with a zero gradient or non-finite logits: other checks are about them.
    """
    low, high = batch.target.threat.bounds
    side = high - low
    inside = x.detach().clamp(low + FAR * side, high - FAR * side)  # room on both sides
    gradient = _margin_gradient(batch, defense, inside)
    slopes, differences = [], []
    streams = batch.noise("slope")  # each image's corners are from its own stream
    for _ in range(DIRECTIONS):
        draws = uniform(inside, *inside.shape[1:], generator=streams)
        corner = torch.where(draws < 0.5, -1.0, 1.0).to(inside)
        step = width * side * corner
        up, down = (_margin(batch, defense, end) for end in (inside + step, inside - step))
        slopes.append((gradient * corner).flatten(1).sum(1))
        differences.append(up - down)
    return _cosine(torch.stack(slopes, 1), torch.stack(differences, 1)).masked_fill(
        batch.nonfinite | (gradient == 0).flatten(1).all(1), torch.nan
    )


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine [B] of vectors [B, D]; 0 where one is zero."""
    # Scaled first: the squares of very long or short vectors would overflow or vanish.
    a, b = (v / v.abs().amax(1, keepdim=True).clamp_min(1e-300) for v in (a.double(), b.double()))
    lengths = (a.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-300)
    cosine: Tensor = (a * b).sum(1) / lengths
    return cosine


def hidden_pixels(batch: AuditBatch) -> Tensor:
    """Return the share [B] of pixels at a bound without a gradient, of those that have one inside.

    It is that of the bound where it is larger; NaN for images with fewer than ten such pixels.
    """
    return in_double(batch, partial(_hidden_pixels, batch))


def _hidden_pixels(batch: AuditBatch, defense: Defense, x: Tensor) -> Tensor:
    low, high = batch.target.threat.bounds
    hair = HAIR * (high - low)
    inside = x.clamp(low + hair, high - hair)
    depths = hair * (1 + uniform(x, *x.shape[1:], generator=batch.noise("depth")))
    deeper = x.maximum(low + depths).minimum(high - depths)
    at_bound, near, next_to_it = (
        _margin_gradient(batch, defense, images) for images in (x, inside, deeper)
    )
    sloped = near.abs() > LEAST_SLOPE * near.abs().mean((1, 2, 3), keepdim=True)
    # Where all is flat the slopes just inside are rounding: other depths have others.
    lost = sloped & (at_bound == 0) & ((next_to_it - near).abs() < 0.5 * near.abs())
    up = torch.where(lost & (near * (inside - x) > 0), inside, x)
    promised = (near * (up - x)).flatten(1).sum(1)
    rise = _margin(batch, defense, up) - _margin(batch, defense, x)
    # The margin does not follow slopes of rounding either.
    kept = ((rise - promised).abs() < 0.5 * promised).view(-1, 1, 1, 1)
    shares = [_share(lost & kept, sloped & (x == bound)) for bound in (low, high)]
    return torch.fmax(*shares).masked_fill(batch.nonfinite, torch.nan)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Return the share [B] of a set of pixels that lies in a part; NaN for small sets."""
    count = whole.flatten(1).sum(1)
    found: Tensor = (part & whole).flatten(1).sum(1) / count
    return found.double().masked_fill(count < FEWEST_PIXELS, torch.nan)


def inside_bounds(batch: AuditBatch) -> Tensor:
    """Return the scores [B] under the default attack with gradients from just inside the bounds."""
    name = batch.target.suite.default
    if not (hidden_pixels(batch) > MOST).any():
        return batch.score(name)
    view = InsideBounds(bounds=batch.target.threat.bounds)
    try:
        return batch.run(name, WithBackward(batch.target.attacks[name], view))[1].mean(1)
    except TypeError:  # of a defense that names no networks
        return batch.unknown()


MEASUREMENTS = (
    no_gradient,
    zero_gradient,
    infinite_gradient,
    loss_saturated,
    slope_near,
    slope_far,
    slope_networks,
    hidden_pixels,
    inside_bounds,
    largest_logit,
    double,
)


def gradient(target: AuditTarget, columns: Columns) -> Finding:
    """Find a graph that is cut: no gradient attack can run."""
    found = columns["no_gradient"]
    return images_finding(
        found,
        fine="Gradients lead from the outputs back to the image.",
        text=f"For {images_of(found)} {NO_PATH} (detach, numpy, argmax, no_grad): no gradient "
        "attack can run.",
        advice="Give the defense a gradient: its own, one that passes straight through, or that "
        "of a network in its place (BPDA). The accuracy under black-box attacks is an upper bound "
        "only.",
    )


def zero_gradients(target: AuditTarget, columns: Columns) -> Finding:
    """Find gradients of exactly zero: attacks do not move."""
    found = columns["zero_gradient"]
    if found.isnan().all():
        return not_checked(NO_PATH)
    return images_finding(
        found,
        fine="Gradients are not zero.",
        text=f"The gradient is exactly zero for {images_of(found)}: gradient attacks stay where "
        "they start, and the accuracy that they leave is no robustness.",
        advice="Look for sign, round, argmax or clamp inside; attack with a gradient that passes "
        "straight through them (BPDA), and without gradients.",
    )


def infinite_gradients(target: AuditTarget, columns: Columns) -> Finding:
    """Find non-finite gradients: attacks take them for zero."""
    found = columns["infinite_gradient"]
    if found.isnan().all():
        return not_checked(NO_PATH)
    return images_finding(
        found,
        fine="Gradients are finite.",
        text=f"The gradient is not finite for {images_of(found)}, though the logits are: attacks "
        "can only take it for zero.",
        advice="Look for sqrt, log, norm or a division at 0 and give it a floor; then attack "
        "again.",
        few="warning",
    )


def saturation(target: AuditTarget, columns: Columns) -> Finding:
    """Find logits too large for single precision: the loss is flat though the network is not."""
    flat, default = columns["loss_saturated"], columns[target.suite.default]
    in_doubles = columns["double"]
    if flat.isnan().all():
        return not_checked(NO_PATH)
    largest = float(columns["largest_logit"].max())
    values = means(loss_saturated=flat, default=default, double=in_doubles)
    values["largest_logit"] = largest
    weaker = significant(default - in_doubles) and not columns["is_nondeterministic"].any()
    if not (many(flat) or weaker):
        text = "Double precision makes the attack no stronger, and the loss has a slope."
        if in_doubles.isnan().all():
            text = "The loss has a slope. The attack was not run again in double precision."
        return Finding("fine", text, values=values)
    text = f"The logits are as large as {largest:.3g}."
    if many(flat):
        text += f" For {images_of(flat)} cross-entropy is so flat that its gradient is zero."
    if weaker:
        text += f" PGD leaves {percent(default)}, in double precision {percent(in_doubles)}."
    advice = (
        "Divide the logits by a constant, which changes no prediction, or attack the margin "
        "(objective lightning_rob.objectives.linear)."
    )
    return Finding("severe", text, advice, values)


def _why_no_slope(target: AuditTarget, columns: Columns) -> str:
    """Return why predictions cannot be compared with slopes; empty if they can."""
    if target.transductive:
        return "the predictions of a defense that adapts depend on the whole batch"
    return "predictions are nondeterministic" if many(columns["is_nondeterministic"]) else ""


def slope(target: AuditTarget, columns: Columns) -> Finding:
    """Find a gradient that is not the slope of the margin: attacks climb something else."""
    if reason := _why_no_slope(target, columns):
        return not_checked(reason)
    near, far = columns["slope_near"], columns["slope_far"]
    pairs = DIRECTIONS * min(len(known(near)), len(known(far)))
    if pairs < FEWEST_PAIRS:
        reason = f"{pairs} pairs of a slope and a difference, at least {FEWEST_PAIRS} are needed"
        return not_checked(reason)
    best = max(mean(near), mean(far))
    values = means(near=near, far=far) | {"pairs": pairs}
    explains = f"explains {100 * max(best, 0.0) ** 2:.3g} % of how the predictions really change"
    if best >= LEAST_CORRELATION:
        return Finding("fine", f"The gradient {explains}.", values=values)
    severity: Severity = "warning" if many(columns["is_constant"]) else "severe"  # rounding
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


def bounds(target: AuditTarget, columns: Columns) -> Finding:
    """Find pixels at a bound that have no gradient, though the predictions depend on them."""
    if reason := _why_no_slope(target, columns):
        return not_checked(reason)
    shares = known(columns["hidden_pixels"])
    low, high = (f"{bound:g}" for bound in target.threat.bounds)
    if len(shares) < FEWEST:
        return not_checked(
            f"{len(shares)} images have {FEWEST_PIXELS} pixels that are exactly {low} or exactly "
            f"{high} and have a slope just inside, at least {FEWEST} are needed"
        )
    found = (shares > MOST).float()
    default, inside = columns[target.suite.default], columns["inside_bounds"]
    values = means(images=found, pixels=shares, default=default, inside=inside)
    if not many(found):
        text = f"Pixels that are exactly {low} or {high} have a gradient, as those just inside."
        return Finding("fine", text, values=values)
    text = (
        f"For {images_of(found)} the gradient of pixels that are exactly {low} or {high} is "
        f"exactly zero ({percent(shares)} of those that have one {HAIR:g} further inside), though "
        "the predictions change with them: a clamp, hardtanh or ReLU of the input has slope 0 at "
        "its edge. Attacks by gradient do not see these pixels."
    )
    if not inside.isnan().all():
        text += (
            f" PGD leaves {percent(default)}, with gradients from just inside {percent(inside)}."
        )
    gain = is_gain(default - inside, target.exact)
    return Finding("severe" if gain else "warning", text, UNCLAMP, values)


CHECKS = (gradient, zero_gradients, infinite_gradients, saturation, slope, bounds)
