"""Checks of a defense on a few images: what its predictions and its gradients are worth.

Every evaluation makes them on its first images, and the audit on all of its own. The gradients are
of the margin, the largest wrong logit minus the label's, unless cross-entropy is named.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_rob.attacks import attacking, evaluating
from lightning_rob.attacks.auto import suite_kind, surrogate_for
from lightning_rob.attacks.backward import entered
from lightning_rob.attacks.controls import doubled
from lightning_rob.attacks.folding import FoldingError
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.defenses import Defense, Mixture, Single, is_transform_ensemble
from lightning_rob.defenses.copies import changes, fresh, keep_changes, original, working_copy
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
from lightning_rob.objectives import Objective, expected_ce, expected_margin
from lightning_rob.randomness import Streams, derive_seed, seeded_global_rng, uniform
from lightning_rob.runtime.errors import NoGradientError

T = TypeVar("T", bound="CheckTarget")

NO_PATH = "nothing leads from the outputs back to the image"
MARGIN = ObjectiveGradient(expected_margin)
SMALL_CHANGE = 1e-5  # of the pixels' range: far below the 1/255 of a grey level, above rounding
DIRECTIONS = 4  # random corners, of each image; more where there are few images
NEAR, FAR = 1e-3, 4 / 255  # rounding to grey levels has a slope over the second width only
LEAST_CORRELATION = 0.8  # a gradient of half of the pixels, the others cut, has 0.7
FEWEST_PAIRS = 50  # of a slope and a difference
UNCLAMP = (
    "Attack with PGD(backward=InsideBounds()), any other attack as WithBackward(attack, "
    "InsideBounds()); or take the clamp off the network: images lie within the bounds anyway."
)
HAIR = 1e-4  # of the pixels' range: far below a grey level
FEWEST_PIXELS = 10  # of an image, at one bound
LEAST_SLOPE = 0.01  # of the image's mean: a smooth rounding is as good as flat near its steps
MOST = 0.5  # of the pixels at a bound that have a slope just inside
ROUNDING = 1e-5  # of the largest logit: sums in another order
SMALL_SPAN, MOST_SMALL = 0.05, 0.5  # largest minus smallest logit; share of images
MOST_TIES = 0.1  # of images: half precision has a few
OF_RANGE = 1e-3  # of the logits' range, by which other images of a batch may change them


class CheckTarget:
    """A defense that is checked.

    Args:
        defense: the defense; it is not changed.
        bounds: smallest and largest value of a pixel.
        seed: of all noise.
    """

    def __init__(
        self, defense: Defense, bounds: tuple[float, float] = (0.0, 1.0), seed: int = 0
    ) -> None:
        self.defense = defense
        self.bounds = bounds
        self.seed = seed
        self.kind = suite_kind(defense)
        self.changed: set[str] = set()  # by predicting, see `changes_itself`

    @property
    def transductive(self) -> bool:
        """Whether the defense adapts to the test batch, so that a batch is a round."""
        return self.kind == "transductive"

    @property
    def exact(self) -> bool:
        """Whether `forward` returns the exact expectation over the defense's randomness."""
        return self.kind in ("single", "ensemble", "randomized")

    @property
    def differentiable_part(self) -> Defense | None:
        """The current defense; of a transformation ensemble the members that have a gradient."""
        if not is_transform_ensemble(self.defense):
            return self.defense.adapted_model
        transforms = self.defense.transforms.values()
        members = [i for i, transform in enumerate(transforms) if transform.differentiable]
        return self.defense.part(members) if members else None


class CheckBatch:
    """A batch of images, predicted and differentiated on demand.

    Args:
        target: the defense that is checked.
        x: [B, C, H, W] images.
        y: [B] labels.
        index: [B] the images' indices, by which noise is keyed; None for the positions.
        directions: in which slopes of each image are compared with differences, at least.
    """

    def __init__(
        self,
        target: CheckTarget,
        x: Tensor,
        y: Tensor,
        index: Tensor | None = None,
        directions: int = DIRECTIONS,
    ) -> None:
        self.target = target
        self.directions = directions
        self.x, self.y = x.detach().clone(), y  # a network may write to them
        self.index = torch.arange(len(x), device=x.device) if index is None else index
        self.near: Tensor | None = None  # see `slope_near`

    def noise(self, key: str = "") -> Streams:
        """Return the source of the defense's randomness, the same at every call with one key."""
        return Streams.from_index(self.index, self.target.seed, *b"audit", *key.encode())

    @contextmanager
    def drawn(self, key: str = "", rows: slice = slice(None)) -> Iterator[Streams]:
        """Yield the source of randomness of a part of the batch; seed torch's own streams by it."""
        noise = self.noise(key)[torch.arange(len(self.x), device=self.x.device)[rows]]
        own = torch.Generator().manual_seed(derive_seed(noise.batch_key, *noise.keys.tolist()))
        with seeded_global_rng(own, self.x.device):
            yield noise

    def unknown(self) -> Tensor:
        """Return the column [B] of a value that could not be measured: NaN."""
        return self.x.new_full((len(self.x),), torch.nan)

    def logits_of(self, x: Tensor, key: str = "", rows: slice = slice(None)) -> Tensor:
        """Return the current defense's logits [S, B, K] of images [B, C, H, W].

        Args:
            x: images.
            key: of the noise.
            rows: the part of the batch whose noise it is.
        """
        defense = fresh(self.target.defense.adapted_model)
        with evaluating(defense) as copied, torch.no_grad(), self.drawn(key, rows) as noise:
            return copied.sample_logits(x, noise)[0].float()

    @cached_property
    def logits(self) -> Tensor:
        """The logits [S, B, K] of the clean images."""
        return self.logits_of(self.x)

    @cached_property
    def nonfinite(self) -> Tensor:
        """Images [B] with non-finite logits."""
        return nonfinite(self.logits)

    @cached_property
    def differentiable(self) -> bool:
        """Whether the logits depend on the images by operations that have a gradient."""
        return self.margin_gradient is not None

    @cached_property
    def margin_gradient(self) -> Tensor | None:
        """The gradient [B, C, H, W] of the margin; None without one."""
        return self.gradient(expected_margin)

    @cached_property
    def gradients(self) -> tuple[Tensor, Tensor] | None:
        """The gradients [B, D] of margin and loss; None without a gradient."""
        margin, loss = self.margin_gradient, self.gradient(expected_ce)
        if margin is None or loss is None:
            return None
        return margin.flatten(1), loss.flatten(1)

    def gradient(self, objective: Objective) -> Tensor | None:
        """Return an objective's gradient [B, C, H, W] by the images; None if there is none."""
        part = self.target.differentiable_part
        if part is None:
            return None
        with (
            attacking(fresh(part)) as defense,
            entered(surrogate_for(self.target.defense), defense),
            self.drawn() as noise,
        ):
            x = self.x.detach().clone().requires_grad_()
            logits, weights = defense.sample_logits(x, noise)
            if not logits.requires_grad:
                return None
            value = objective(logits.float(), weights, self.y.clone()).sum()
            return torch.autograd.grad(value, x, allow_unused=True)[0]


def nonfinite(logits: Tensor) -> Tensor:
    """Return the images [B] of which no draw of the logits [S, B, K] is finite throughout."""
    return ~logits.amax(-1).isfinite().all(0)


def nonfinite_clean(batch: CheckBatch) -> Tensor:
    """Return the images [B] with non-finite logits."""
    return batch.nonfinite


def is_probability(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose outputs lie in [0, 1] and sum to one."""
    inside = (batch.logits >= -1e-6) & (batch.logits <= 1 + 1e-6)
    sums = (batch.logits.sum(-1) - 1).abs() < 1e-4
    return (inside.all(-1) & sums).all(0)


def is_constant(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose logits stay the same when every pixel changes a little."""
    low, high = batch.target.bounds
    inward = torch.where(batch.x > (low + high) / 2, -1.0, 1.0)
    moved = batch.x + SMALL_CHANGE * (high - low) * inward
    return ~_differ(batch.logits_of(moved), batch.logits, 0.0)


def is_random(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose logits depend on the noise."""
    return _differ(batch.logits_of(batch.x, "again"), batch.logits) & ~batch.nonfinite


def is_nondeterministic(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose logits differ with the same noise."""
    return _differ(batch.logits_of(batch.x), batch.logits) & ~batch.nonfinite


def _differ(a: Tensor, b: Tensor, rounding: float = ROUNDING) -> Tensor:
    """Return the images [B] on which logits [S, B, K] differ by more than rounding."""
    room = rounding * b.abs().nan_to_num(0.0, 0.0, 0.0).amax(-1, keepdim=True)
    found: Tensor = ~torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    found &= ~((a - b).abs() <= room)
    return found.any(-1).any(0)


def depends_on_batch(batch: CheckBatch) -> Tensor:
    """Return the images [B] whose logits are others in a part of the batch.

    2 where another class is predicted.
    """
    if batch.target.transductive or len(batch.x) < 2:
        return batch.unknown()
    parts = [slice(0, 1), slice(1, None)]
    alone = torch.cat([batch.logits_of(batch.x[rows], rows=rows) for rows in parts], 1)
    together = batch.logits
    span = (together.amax(-1) - together.amin(-1)).nan_to_num(0.0, 0.0, 0.0)
    moved = (alone - together).abs().amax(-1) > _rounding(batch) * span
    other = (alone.argmax(-1) != together.argmax(-1)) & moved
    return moved.any(0).float() + other.any(0).float()


def changes_itself(batch: CheckBatch) -> Tensor:
    """Return 1 for all images [B] if predicting them changes weights, buffers or attributes."""
    if batch.target.transductive:
        return batch.unknown()
    copied, half = working_copy(original(batch.target.defense)), (len(batch.x) + 1) // 2
    with evaluating(copied), torch.no_grad():
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
    span = (batch.logits.amax(-1) - batch.logits.amin(-1)).nan_to_num(0.0, 0.0, 0.0)
    return ((seen - batch.logits).abs().amax(-1) > _rounding(batch) * span).any(0)


def _rounding(batch: CheckBatch) -> float:
    """Return the share of the logits' range by which another order of sums may change them."""
    types = {weight.dtype for weight in batch.target.defense.parameters()}
    eps = [torch.finfo(one).eps for one in types if one.is_floating_point]
    return max(OF_RANGE, 20 * max(eps, default=0.0))


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


def no_gradient(batch: CheckBatch) -> Tensor:
    """Return the images [B] to which no gradient leads from the logits."""
    return torch.full_like(batch.nonfinite, not batch.differentiable)


def zero_gradient(batch: CheckBatch) -> Tensor:
    """Return the images [B] with a gradient of exactly zero."""
    return _where(batch, lambda margin, _: (margin == 0).all(1))


def infinite_gradient(batch: CheckBatch) -> Tensor:
    """Return the images [B] with non-finite entries in the gradient of margin or cross-entropy."""
    return _where(batch, lambda *both: ~torch.cat(both, 1).isfinite().all(1))


def loss_saturated(batch: CheckBatch) -> Tensor:
    """Return the images [B] on which cross-entropy is flat and the margin is not."""
    return _where(batch, lambda margin, loss: (loss == 0).all(1) & ~(margin == 0).all(1))


def _where(batch: CheckBatch, test: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a test [B] of the gradients [B, D] of margin and cross-entropy; NaN without any."""
    if batch.gradients is None:
        return batch.unknown()
    return test(*batch.gradients) & ~batch.nonfinite


def slope_near(batch: CheckBatch) -> Tensor:
    """Return the correlation [B] of the gradient with differences over 1e-3 of the range.

    In double precision where single precision does not show that they agree.
    """
    part = batch.target.differentiable_part
    batch.near = batch.unknown()
    if batch.target.transductive or part is None:
        return batch.near
    try:
        with attacking(fresh(part)) as copied:
            batch.near = _agreement(batch, NEAR, copied, batch.x)
    except NoGradientError:
        return batch.near
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
    if defense.kind not in ("random_transforms", "transform_ensemble"):
        return batch.unknown()
    networks = Mixture([Single(net) for net in defense.foldable_networks])
    widths = (partial(_agreement, batch, width) for width in (NEAR, FAR))
    return torch.maximum(*(in_double(batch, agreement, networks) for agreement in widths))


def in_double(
    batch: CheckBatch,
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
    """Return the cosine [B] of slopes and central differences along random corners.

    NaN for images with a zero gradient or non-finite logits: other checks are about them.
    """
    low, high = batch.target.bounds
    side = high - low
    inside = x.detach().clamp(low + FAR * side, high - FAR * side)  # room on both sides
    gradient = _margin_gradient(batch, defense, inside)
    unknown = batch.nonfinite | (gradient == 0).flatten(1).all(1)
    least = math.ceil(FEWEST_PAIRS / max(1, int((~unknown).sum())))
    slopes, differences = [], []
    streams = batch.noise("slope")  # each image's corners are from its own stream
    for _ in range(max(batch.directions, least)):
        draws = uniform(inside, *inside.shape[1:], generator=streams)
        corner = torch.where(draws < 0.5, -1.0, 1.0).to(inside)
        step = width * side * corner
        up, down = (_margin(batch, defense, end) for end in (inside + step, inside - step))
        slopes.append((gradient * corner).flatten(1).sum(1))
        differences.append(up - down)
    found = _cosine(torch.stack(slopes, 1), torch.stack(differences, 1))
    return found.masked_fill(unknown, torch.nan)


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine [B] of vectors [B, D]; 0 where one is zero."""
    # Scaled first: the squares of very long or short vectors would overflow or vanish.
    a, b = (v / v.abs().amax(1, keepdim=True).clamp_min(1e-300) for v in (a.double(), b.double()))
    lengths = (a.norm(dim=1) * b.norm(dim=1)).clamp_min(1e-300)
    cosine: Tensor = (a * b).sum(1) / lengths
    return cosine


def hidden_pixels(batch: CheckBatch) -> Tensor:
    """Return the share [B] of pixels at a bound without a gradient, of those that have one inside.

    It is that of the bound where it is larger; NaN for images with fewer than ten such pixels.
    """
    part = batch.target.differentiable_part
    if batch.target.transductive or part is None or not batch.differentiable:
        return batch.unknown()
    assert batch.gradients is not None
    low, high = batch.target.bounds
    at_bound = ((batch.x == low) | (batch.x == high)).flatten(1)
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
    shares = [_share(lost & kept, sloped & (x == bound)) for bound in (low, high)]
    return torch.fmax(*shares).masked_fill(batch.nonfinite, torch.nan)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Return the share [B] of a set of pixels that lies in a part; NaN for small sets."""
    count = whole.flatten(1).sum(1)
    found: Tensor = (part & whole).flatten(1).sum(1) / count
    return found.double().masked_fill(count < FEWEST_PIXELS, torch.nan)


MEASUREMENTS: dict[str, Callable[[CheckBatch], Tensor]] = {
    measure.__name__: measure
    for measure in (
        nonfinite_clean,
        is_probability,
        is_constant,
        is_small,
        is_random,
        is_nondeterministic,
        depends_on_batch,
        changes_itself,
        sees_gradients,
        tied,
        no_gradient,
        zero_gradient,
        infinite_gradient,
        loss_saturated,
        slope_near,
        slope_far,
        slope_networks,
        hidden_pixels,
    )
}


class LazyMeasurements(Mapping[str, Tensor]):
    """The columns [B] of a batch by name, each measured when it is first read.

    Args:
        batch: the batch.
    """

    def __init__(self, batch: CheckBatch) -> None:
        self.batch = batch
        self.columns: dict[str, Tensor] = {}

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(MEASUREMENTS)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(list(iter(self)))

    def __getitem__(self, name: str) -> Tensor:
        """Return a column; reading in another order measures the same."""
        if name not in self.columns:
            batch = self.batch
            seed = derive_seed(batch.target.seed, *name.encode(), *batch.index.tolist())
            with seeded_global_rng(torch.Generator().manual_seed(seed), batch.x.device):
                self.columns[name] = self.measure(name)
        return self.columns[name]

    def measure(self, name: str) -> Tensor:
        """Measure a column [B].

        Raises:
            KeyError: no measurement has this name.
        """
        return MEASUREMENTS[name](self.batch).float()


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


def outputs(target: CheckTarget, columns: Columns) -> Finding:
    """Find probabilities in place of logits: the loss flattens where the network is confident."""
    found = columns["is_probability"]
    return images_finding(
        found,
        fine="The outputs are logits, not probabilities.",
        text=f"The outputs for {images_of(found)} lie in [0, 1] and sum to one: the network ends "
        "in a softmax. Cross-entropy applies another one, so that its gradient is tiny.",
        advice="Take the softmax off the network, or its logarithm, and run the attacks again.",
    )


def steps_inside(target: CheckTarget, columns: Columns) -> Finding:
    """Find piecewise constant logits, as those of quantized images are."""
    found = columns["is_constant"]
    blind = many(columns["zero_gradient"]) or many(columns["no_gradient"])
    finding = images_finding(
        found,
        fine="The logits change with the smallest change of the image.",
        text=f"The logits for {images_of(found)} stay the same to the last bit when every pixel "
        "changes by 1e-5: the input is quantized, something inside is rounded or thresholded, or "
        "the logits are saturated.",
        advice="Attack with a gradient that passes straight through the rounding (BPDA), and "
        "without gradients; the accuracies under gradient attacks say nothing here.",
    )
    if blind or not finding.flagged:
        return finding
    text = f"{finding.text} There is a gradient all the same: attacks pass straight through it."
    return Finding("note", text, values=finding.values)


def modes(target: CheckTarget, columns: Columns) -> Finding:
    """Find layers that act as in training when the defense predicts."""
    found = list(_training_layers(target.defense))
    values = {"layers": found}
    if not found:
        text = "BatchNorm and dropout are in eval mode when the defense predicts."
        return Finding("fine", text, values=values)
    shown = ", ".join(found[:3]) + (" …" if len(found) > 3 else "")
    return Finding(
        "severe",
        f"{len(found)} layers act as in training when the defense predicts: {shown}. Dropout "
        "draws, and BatchNorm looks at the other images of the batch.",
        "Let eval() reach them, and keep running statistics; then evaluate again.",
        values,
    )


def _training_layers(defense: Defense) -> Iterator[str]:
    """Yield name and class of each layer that eval mode does not reach."""
    with evaluating(defense):
        for name, module in defense.named_modules():
            batch_only = getattr(module, "track_running_stats", True) is False
            idle = isinstance(module, _DropoutNd) and module.p == 0
            trains = isinstance(module, _BatchNorm | _DropoutNd) and (module.training or batch_only)
            if trains and not idle:
                yield f"{name} ({type(module).__name__})"


def batches(target: CheckTarget, columns: Columns) -> Finding:
    """Find predictions that depend on the other images of the batch."""
    if target.transductive:
        return not_checked("this defense adapts to the batch")
    if columns["is_nondeterministic"].any() or (target.exact and columns["is_random"].any()):
        return not_checked("predictions are random, other than by the generator of each image")
    found = columns["depends_on_batch"]
    finding = images_finding(
        (found > 0).float(),
        fine="The logits of an image are the same in another batch.",
        text=f"The logits of {images_of(found)} are others in another batch, the predicted class "
        f"of {images_of((found > 1).float())}.",
        advice="If it is meant to adapt to the test batch, give it as a defense with `adapt`, so "
        "that it is attacked in rounds; else find the layer that looks at the batch.",
    )
    if finding.flagged and not many((found > 1).float()):
        return replace(finding, severity="warning")
    return finding


def itself(target: CheckTarget, columns: Columns) -> Finding:
    """Find predictions that change the network."""
    found = columns["changes_itself"]
    if found.isnan().all():
        return not_checked("this defense adapts to the batch")
    if not found.any():
        return Finding("fine", "Predicting leaves the network as it is.", values=means(found=found))
    names = sorted(target.changed)
    tensors = {name for name, _ in _tensors_of(target.defense)}
    return Finding(
        "severe" if tensors & set(names) else "warning",
        f"Predicting changes the network itself: {', '.join(names[:3])}"
        + (" …" if len(names) > 3 else "")
        + ". Here each attack and each prediction begins with what it was given.",
        "If it is meant to adapt to the test batch, give it as a defense with `adapt`, so that it "
        "is attacked in rounds; else keep what forward writes out of it.",
        {"names": names},
    )


def _tensors_of(defense: Defense) -> Iterator[tuple[str, Tensor]]:
    yield from defense.named_parameters()
    yield from defense.named_buffers()


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
    if target.exact and columns["is_random"].any():
        return Finding(
            "warning",
            f"The logits of {images_of(columns['is_random'])} are random, though a "
            f"{type(target.defense).__name__} stands for a defense without randomness.",
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
        fine="The logits are the same while a gradient is asked for.",
        text=f"The logits for {images_of(found)} are others while an attack asks for their "
        "gradient than when they decide: it climbs something else.",
        advice="Look for requires_grad, is_grad_enabled or the call stack in the forward pass.",
    )


def small_logits(target: CheckTarget, columns: Columns) -> Finding:
    """Find logits so small that cross-entropy does not see which wrong class is near."""
    found = columns["is_small"]
    finding = images_finding(
        found,
        fine="The logits are no smaller than usual.",
        text=f"The logits of {images_of(found)}, which are right, differ by less than "
        f"{SMALL_SPAN:g}: cross-entropy then raises all wrong classes alike, and PGD is weak.",
        advice="Multiply the logits by a constant, which changes no prediction, or attack the "
        "margin (objective lightning_rob.objectives.linear).",
    )
    return replace(finding, severity="fine") if mean(found) < MOST_SMALL else finding


def ties(target: CheckTarget, columns: Columns) -> Finding:
    """Find largest logits that are equal: the order of classes decides, and margins are zero."""
    found = columns["tied"]
    finding = images_finding(
        found,
        fine="One logit is the largest.",
        text=f"The two largest logits are equal for {images_of(found)}: they are rounded, and the "
        "first of them is predicted.",
        advice="Return the logits before rounding, or multiply them before they are rounded.",
    )
    return replace(finding, severity="fine") if mean(found) < MOST_TIES else finding


def gradient(target: CheckTarget, columns: Columns) -> Finding:
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


def zero_gradients(target: CheckTarget, columns: Columns) -> Finding:
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


def infinite_gradients(target: CheckTarget, columns: Columns) -> Finding:
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


def saturation(target: CheckTarget, columns: Columns) -> Finding:
    """Find a loss that is flat where the margin is not: the logits are too large for it."""
    found = columns["loss_saturated"]
    if found.isnan().all():
        return not_checked(NO_PATH)
    return images_finding(
        found,
        fine="The loss has a slope.",
        text=f"For {images_of(found)} cross-entropy is so flat that its gradient is zero, though "
        "the margin has one: the logits are too large, or infinite.",
        advice="Divide the logits by a constant, which changes no prediction, or attack the margin "
        "(objective lightning_rob.objectives.linear).",
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
    text = (
        f"For {images_of(found)} the gradient of pixels that are exactly {low} or {high} is "
        f"exactly zero ({percent(shares)} of those that have one {HAIR:g} further inside), though "
        "the predictions change with them: a clamp, hardtanh or ReLU of the input has slope 0 at "
        "its edge. Attacks by gradient do not see these pixels."
    )
    return Finding("warning", text, UNCLAMP, values)


Check = Callable[[CheckTarget, Columns], Finding]
CHECKS: tuple[Check, ...] = (
    numbers,
    outputs,
    steps_inside,
    modes,
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
    """Return what the checks find of a defense on a few images, the most severe first.

    Args:
        target: the defense.
        x: [B, C, H, W] images.
        y: [B] labels.
        index: [B] the images' indices, by which noise is keyed.
        checks: which ones.
        directions: see `CheckBatch`.
    """
    columns = LazyMeasurements(CheckBatch(target, x, y, index, directions))
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
