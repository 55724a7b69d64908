"""Columns [B] over the images of a batch: what is measured of predictions and gradients.

The gradients are of the margin, the largest wrong logit minus the label's, unless cross-entropy is
named. A value that cannot be measured is NaN.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_rob.attacks import attacking, evaluating
from lightning_rob.attacks.auto import surrogate_for
from lightning_rob.attacks.backward import entered
from lightning_rob.attacks.decorators import doubled
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.defenses import Defense, Mixture, Single
from lightning_rob.defenses.copies import changes, fresh, keep_changes, original, working_copy
from lightning_rob.evaluation.check_batch import CheckBatch
from lightning_rob.evaluation.findings import many, mean
from lightning_rob.evaluation.worst import TIMES
from lightning_rob.objectives import expected_margin
from lightning_rob.randomness import derive_seed, own_streams, uniform
from lightning_rob.runtime.errors import NoGradientError

Measure = Callable[[Any], Tensor]  # of a batch: a column [B]

MARGIN = ObjectiveGradient(expected_margin)
SMALL_CHANGE = 1e-5  # of the pixels' range: far below the 1/255 of a grey level, above rounding
NEAR, FAR = 1e-3, 4 / 255  # rounding to grey levels has a slope over the second width only
LEAST_CORRELATION = 0.8  # a gradient of half of the pixels, the others cut, has 0.7
FEWEST_PAIRS = 50  # of a slope and a difference
HAIR = 1e-4  # of the pixels' range: far below a grey level
FEWEST_PIXELS = 10  # of an image, at one bound
LEAST_SLOPE = 0.01  # of the image's mean: a smooth rounding is as good as flat near its steps
MOST = 0.5  # of the pixels at a bound that have a slope just inside
ROUNDING = 1e-5  # of the largest logit: sums in another order
SMALL_SPAN = 0.05  # largest minus smallest logit
OF_RANGE = 1e-3  # of the logits' range, by which other images of a batch may change them


def is_probability(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose outputs lie in [0, 1] and sum to one."""
    inside = (batch.logits >= -1e-6) & (batch.logits <= 1 + 1e-6)
    sums = (batch.logits.sum(-1) - 1).abs() < 1e-4
    return (inside.all(-1) & sums).all(0)


def is_constant(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose logits stay the same when every pixel changes a little."""
    low, high = batch.target.bounds
    # Inward: a clamp of the input would hide a step over the bound.
    inward = torch.where(batch.x > (low + high) / 2, -1.0, 1.0)
    moved = batch.x + SMALL_CHANGE * (high - low) * inward
    return ~_differ(batch.logits_of(moved), batch.logits, 0.0)


def uses_noise(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose logits depend on the noise."""
    return _differs(batch, *(f"again {i}" for i in range(1, TIMES)))


def is_nondeterministic(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose logits differ with the same noise."""
    return _differs(batch, *([""] * (TIMES - 1)))


def _differs(batch: CheckBatch, *noises: str) -> Tensor:
    """Return the images [B] whose logits differ from the first ones, in any prediction."""
    found = [_differ(batch.logits_of(batch.x, noise), batch.logits) for noise in noises]
    return torch.stack(found).any(0) & ~batch.nonfinite


def _differ(a: Tensor, b: Tensor, rounding: float = ROUNDING) -> Tensor:
    """Return the images [B] on which logits [S, B, K] differ by more than rounding."""
    room = rounding * b.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    found: Tensor = ~torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    found &= ~((a - b).abs() <= room)
    return found.any(-1).any(0)


def depends_on_batch(batch: CheckBatch) -> Tensor:
    """Return 1 for images [B] whose logits differ in a part of the batch, 2 for other classes."""
    if batch.target.transductive or len(batch.x) < 2:
        return batch.unknown()
    # One image alone shows statistics of the batch best.
    parts = [slice(0, 1), slice(1, None)]
    alone = torch.cat([batch.logits_of(batch.x[rows], rows=rows) for rows in parts], 1)
    moved = _moved(batch, alone)
    other = (alone.argmax(-1) != batch.logits.argmax(-1)) & moved
    return moved.any(0).float() + other.any(0).float()


def _moved(batch: CheckBatch, logits: Tensor) -> Tensor:
    """Return where [S, B] logits [S, B, K] are not the clean ones, even with sums reordered."""
    types = {weight.dtype for weight in batch.target.defense.parameters()}
    eps = [torch.finfo(one).eps for one in types if one.is_floating_point]
    share = max(OF_RANGE, 20 * max(eps, default=0.0))
    span = (batch.logits.amax(-1) - batch.logits.amin(-1)).nan_to_num(0.0, 0.0, 0.0)
    return (logits - batch.logits).abs().amax(-1) > share * span


def changes_itself(batch: CheckBatch) -> Tensor:
    """Return 1 for all images [B] if predicting them changes weights, buffers or attributes."""
    if batch.target.transductive:
        return batch.unknown()
    copied, half = working_copy(original(batch.target.defense)), (len(batch.x) + 1) // 2
    with evaluating(copied), torch.no_grad():
        # Twice, so that what the first forward only sets up is no change.
        for rows in (slice(half), slice(half, None)):
            keep_changes(copied)  # a constant that a first forward stores changes nothing
            with batch.drawn(rows=rows) as noise:
                copied.sample_logits(batch.x[rows], noise)
    found = changes(copied)
    batch.target.changed |= set(found)
    return torch.full_like(batch.unknown(), bool(found))


def sees_gradients(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose logits are others while an attack asks for their gradient."""
    part = batch.target.differentiable_part
    if part is not batch.target.defense.adapted_model or surrogate_for(batch.target.defense):
        return batch.unknown()  # attacks follow a part of it, or a surrogate
    if not batch.differentiable or batch.target.transductive:
        return batch.unknown()
    with attacking(fresh(part)) as defense, batch.drawn() as noise:
        seen = MARGIN(defense, batch.x, batch.y, noise).logits.float()
    return _moved(batch, seen).any(0)


def is_small(batch: CheckBatch) -> Tensor:
    """Return the images [B] that are right by logits so near each other that softmax is even."""
    span = (batch.logits.amax(-1) - batch.logits.amin(-1)).nan_to_num(torch.inf)
    right = batch.logits.mean(0).argmax(-1) == batch.y
    return (span < SMALL_SPAN).all(0) & right & ~is_probability(batch)


def tied(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose two largest logits are equal."""
    if batch.logits.shape[-1] < 2:
        return batch.unknown()
    first, second = batch.logits.topk(2).values.unbind(-1)
    return ((first == second) & first.isfinite()).all(0) & ~batch.nonfinite


def of_gradients(test: Callable[[Tensor, Tensor], Tensor]) -> Measure:
    """Return a test [B] of the gradients [B, D] of margin and cross-entropy; NaN without any."""

    def measure(batch: CheckBatch) -> Tensor:
        if batch.gradients is None:
            return batch.unknown()
        return test(*batch.gradients) & ~batch.nonfinite

    return measure


def slope_near(batch: CheckBatch) -> Tensor:
    """Return the correlation [B] of the gradient with differences over 1e-3 of the range."""
    part = batch.target.differentiable_part
    batch.near = batch.unknown()
    if batch.target.transductive or part is None:
        return batch.near
    try:
        with attacking(fresh(part)) as copied:
            batch.near = _agreement(batch, NEAR, copied, batch.x)
    except NoGradientError:
        return batch.near
    # Large logits lose small differences in single precision.
    if mean(batch.near) < LEAST_CORRELATION:
        batch.near = in_double(batch, partial(_agreement, batch, NEAR))
    return batch.near


def slope_far(batch: CheckBatch) -> Tensor:
    """Return the correlation [B] with differences over four grey levels, if that is needed."""
    near = slope_near(batch) if batch.near is None else batch.near
    if mean(near) >= LEAST_CORRELATION:
        return near
    return in_double(batch, partial(_agreement, batch, FAR))


def slope_networks(batch: CheckBatch) -> Tensor:
    """Return the correlation [B] for the networks without transforms, of the better width."""
    defense = batch.target.defense.adapted_model
    if not defense.transforms:
        return batch.unknown()
    networks = Mixture([Single(net) for net in defense.foldable_networks])
    widths = (partial(_agreement, batch, width) for width in (NEAR, FAR))
    return torch.maximum(*(in_double(batch, agreement, networks) for agreement in widths))


def in_double(
    batch: CheckBatch, measure: Callable[[Defense, Tensor], Tensor], defense: Defense | None = None
) -> Tensor:
    """Measure [B] a defense in double precision, in single where it takes no other."""
    defense = defense or batch.target.differentiable_part
    if batch.target.transductive or defense is None or not batch.differentiable:
        return batch.unknown()
    try:
        with attacking(doubled(defense)) as copied:
            return measure(copied, batch.x.double()).to(batch.x)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # code that takes float32 only may raise anything
        with attacking(fresh(defense)) as copied:
            return measure(copied, batch.x)


def _margin(batch: CheckBatch, defense: Defense, x: Tensor) -> Tensor:
    with attacking(defense) as copied, torch.no_grad(), batch.drawn() as noise:
        return MARGIN.value(copied, x, batch.y, noise)


def _margin_gradient(batch: CheckBatch, defense: Defense, x: Tensor) -> Tensor:
    with (
        attacking(defense) as copied,
        entered(surrogate_for(defense), copied),
        batch.drawn() as noise,
    ):
        return MARGIN(copied, x, batch.y, noise).gradient


def _agreement(batch: CheckBatch, width: float, defense: Defense, x: Tensor) -> Tensor:
    """Return the cosine [B] of slopes and central differences along random corners, or NaN."""
    low, high = batch.target.bounds
    side, streams = high - low, batch.noise("slope")  # each image's draws are from its own stream
    # Beside the image: on a uniform background the maxima of a pooling are tied, and a gradient
    # through any one of them is no slope.
    beside = FAR * side * (2 * uniform(x, *x.shape[1:], generator=streams) - 1)
    inside = x.detach().clamp(low + 2 * FAR * side, high - 2 * FAR * side) + beside
    gradient = _margin_gradient(batch, defense, inside)
    unknown = batch.nonfinite | (gradient == 0).flatten(1).all(1)
    # Few images need more directions each, so that the mean correlation is as certain.
    least = math.ceil(FEWEST_PAIRS / max(1, int((~unknown).sum())))
    slopes, differences = [], []
    for _ in range(max(batch.directions, least)):
        draws = uniform(inside, *inside.shape[1:], generator=streams)
        corner = torch.where(draws < 0.5, -1.0, 1.0).to(inside)
        step = width * side * corner
        up, down = (_margin(batch, defense, end) for end in (inside + step, inside - step))
        slopes.append((gradient * corner).flatten(1).sum(1))
        differences.append(up - down)
    # Scaled first: the squares of very long or short vectors would overflow or vanish.
    both = (torch.stack(vectors, 1).double() for vectors in (slopes, differences))
    a, b = (v / v.abs().amax(1, keepdim=True).clamp_min(1e-300) for v in both)
    cosine: Tensor = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-300)
    return cosine.masked_fill(unknown, torch.nan)  # other checks are about these images


def hidden_pixels(batch: CheckBatch) -> Tensor:
    """Return the share [B] of pixels at a bound that have a gradient just inside, not there."""
    part = batch.target.differentiable_part
    if batch.target.transductive or part is None or not batch.differentiable:
        return batch.unknown()
    assert batch.gradients is not None
    low, high = batch.target.bounds
    at_bound = ((batch.x == low) | (batch.x == high)).flatten(1)
    # Without zero gradients at the bounds there is nothing to look for just inside.
    if (((batch.gradients[0] == 0) & at_bound).sum(1) < FEWEST_PIXELS).all():
        found = torch.zeros_like(batch.unknown())
        return found.masked_fill(at_bound.sum(1) < FEWEST_PIXELS, torch.nan)
    with attacking(fresh(part)) as copied:
        found = _hidden_pixels(batch, copied, batch.x)
    if not many((found > MOST).float()):
        return found
    return in_double(batch, partial(_hidden_pixels, batch))


def _hidden_pixels(batch: CheckBatch, defense: Defense, x: Tensor) -> Tensor:
    low, high = batch.target.bounds
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
    shares = []
    for bound in (low, high):
        pixels = sloped & (x == bound)
        count = pixels.flatten(1).sum(1)
        share = (lost & kept & pixels).flatten(1).sum(1) / count
        shares.append(share.double().masked_fill(count < FEWEST_PIXELS, torch.nan))
    # The larger share of both bounds; NaN for images with few such pixels.
    return torch.fmax(*shares).masked_fill(batch.nonfinite, torch.nan)


COLUMNS: dict[str, Measure] = {
    "nonfinite_clean": lambda batch: batch.nonfinite,
    "is_probability": is_probability,
    "is_constant": is_constant,
    "is_small": is_small,
    "is_random": uses_noise,
    "is_nondeterministic": is_nondeterministic,
    "depends_on_batch": depends_on_batch,
    "changes_itself": changes_itself,
    "sees_gradients": sees_gradients,
    "tied": tied,
    "no_gradient": lambda batch: torch.full_like(batch.nonfinite, not batch.differentiable),
    "zero_gradient": of_gradients(lambda margin, _: (margin == 0).all(1)),
    "infinite_gradient": of_gradients(lambda *both: ~torch.cat(both, 1).isfinite().all(1)),
    "loss_saturated": of_gradients(lambda a, loss: (loss == 0).all(1) & ~(a == 0).all(1)),
    "slope_near": slope_near,
    "slope_far": slope_far,
    "slope_networks": slope_networks,
    "hidden_pixels": hidden_pixels,
}


class LazyColumns(Mapping[str, Tensor]):
    """The columns [B] of a batch by name, each measured when it is first read."""

    def __init__(self, batch: CheckBatch, measures: Mapping[str, Measure] = COLUMNS) -> None:
        self.batch = batch
        self.measures = measures
        self.columns: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self.measures)

    def __len__(self) -> int:
        return len(self.measures)

    def __getitem__(self, name: str) -> Tensor:
        """Return a column; reading in another order measures the same."""
        if name not in self.columns:
            measure, batch = self.measures[name], self.batch
            seed = derive_seed(batch.target.seed, *name.encode(), *batch.index.tolist())
            with own_streams(seed, batch.x.device):
                self.columns[name] = measure(batch).float()
        return self.columns[name]
