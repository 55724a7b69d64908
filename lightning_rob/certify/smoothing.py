"""Certificates by randomized smoothing (Cohen et al. 2019), with draws where they are needed."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, ndtri
from torch import Tensor, nn
from tqdm import tqdm

from lightning_rob.attacks import evaluating
from lightning_rob.attacks.base import check_images
from lightning_rob.defenses import Defense, Smoothing, is_smoothing
from lightning_rob.defenses.smoothing import sampling_error
from lightning_rob.evaluation.evaluate import as_defense, indexed_groups
from lightning_rob.evaluation.evaluator import EvaluationSettings, check_indices, device_of
from lightning_rob.evaluation.groups import GROUP_SIZE, Unpack, serves_once
from lightning_rob.evaluation.records import Result, measured
from lightning_rob.evaluation.result_file import write_table
from lightning_rob.evaluation.results import EvaluationResult
from lightning_rob.metrics import PerImage
from lightning_rob.objectives import check_labels
from lightning_rob.randomness import Streams, own_streams
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import at_least
from lightning_rob.tables import table_text

Floats = NDArray[np.float64]
FEWEST = 50  # draws before the first look
ROUNDING = 2.0**-30  # relative, of quantiles and radii: far above their error in double precision


def lower_bound(right: Floats, draws: int, failure: float) -> Floats:
    """Compute the one-sided lower bound of Clopper and Pearson (1934) from `right` of `draws`."""
    k = np.maximum(right, 1)
    bound = betaincinv(k, draws - k + 1, failure)
    return np.where(right > 0, bound * (1 - ROUNDING), 0.0)


@dataclass(frozen=True)
class Looks:
    """When to look at the votes, and how much of the failure probability each look may spend.

    Whichever look is used, and whatever decides to stop, some bound is above the truth with a
    probability of at most `failure`.
    """

    draws: int  # n, of the last look
    failure: float  # the probability with which some bound may be above the truth
    early: bool = True  # look before the last draw

    @property
    def schedule(self) -> list[tuple[int, float]]:
        """The number of draws of each look, rising, and the failure probability it spends."""
        # A bound that is computed after each look and kept where it is good fails more often than
        # one that is computed once. The looks therefore share the failure probability, a union
        # bound over a schedule that is fixed before: half is the last look's, which hard images
        # need, and the looks before, each after half as many draws, share the rest.
        counts = [self.draws]
        while self.early and counts[0] // 2 >= FEWEST:
            counts = [counts[0] // 2, *counts]
        if len(counts) == 1:
            return [(self.draws, self.failure)]
        share = self.failure / 2
        return [*((n, share / (len(counts) - 1)) for n in counts[:-1]), (self.draws, share)]

    def undecided(
        self, right: Floats, draws: int, lower: Floats, wanted: Floats
    ) -> NDArray[np.bool_]:
        """Return which images [B] more draws can help beyond one of the wanted bounds [R].

        Of the draws so far `right` [B] were for the chosen class, with `lower` [B] the best bound.
        """
        best = lower_bound(right + self.draws - draws, self.draws, self.schedule[-1][1])
        # Giving up too early costs power alone, not soundness.
        hopeless = 1 - lower_bound(draws - right, draws, self.failure)
        reach = np.minimum(best, hopeless)[:, None]
        return np.asarray(((lower[:, None] < wanted) & (wanted < reach)).any(1))


def radius_of(probability: Floats, sigma: float) -> Floats:
    """Compute sigma times the normal quantile, rounded down; 0 below a probability of 1/2."""
    inside = np.maximum(probability, 0.5)
    return np.asarray(sigma * ndtri(inside) * (1 - ROUNDING))


def probability_for(radii: Floats, sigma: float) -> Floats:
    """Compute the bound of the probability that certifies these radii, rounded up."""
    return np.asarray(ndtr(radii / sigma * (1 + 4 * ROUNDING)) * (1 + 4 * ROUNDING))


def largest_radius(sigma: float, draws: int, failure: float) -> float:
    """Return the radius of an image on which all draws agree, which none exceeds."""
    looks = Looks(draws, failure, early=True).schedule
    best = max(float(lower_bound(np.array([float(n)]), n, share)[0]) for n, share in looks)
    return float(radius_of(np.array([best]), sigma)[0])


DIGITS = 10**6  # radii in files are rounded down to multiples of 1 / DIGITS


@dataclass(frozen=True)
class Certificates:
    """Certified l2 radii of N images by rising index; see `certify`.

    The prediction abstains, by class -1, where no class has more than half of the votes with
    certainty.
    """

    index: Tensor
    label: Tensor
    prediction: Tensor
    draws: Tensor  # [N] that were taken, those that choose the class among them
    probability: Tensor  # [N] lower bound of the probability of the class's votes
    radius: Tensor  # [N] certified radius in pixel units, 0 where the prediction abstains
    details: Mapping[str, Any] = field(default_factory=dict)  # sigma and the other settings

    def per_image(self, radius: float) -> Tensor:
        """Return which images [N] are predicted right everywhere within a radius, as 0 or 1."""
        right = (self.prediction == self.label) & (self.radius >= radius)
        return right.double()

    def certified(self, radius: float) -> float:
        """Return the certified accuracy in [0, 1] within an l2 radius in pixel units."""
        return self.measurement(radius).accuracy

    def measurement(self, radius: float) -> Result:
        """Return the certified accuracy within a radius with its 95 % interval over images."""
        if not radius >= 0:
            raise ValueError(f"a radius is a length of at least 0, got {radius}")
        ball = {"ball": f"l2 {radius:.4g}", "interval_covers": "images"}
        scores = self.per_image(radius)
        return measured(f"certified_{radius:g}", scores, 0.0, {**self.details, **ball})

    def table(self, radii: Sequence[float], title: str = "Certified accuracy") -> str:
        """Return the table of certified accuracies within some radii, for a terminal."""
        return table_text(title, [self.measurement(radius) for radius in radii])

    def record(self, radii: Sequence[float]) -> dict[str, Any]:
        """Return the certified accuracies within some radii as a record."""
        rows = [self.measurement(radius) for radius in radii]
        found = {"accuracy": [r.accuracy for r in rows], "intervals": [r.interval for r in rows]}
        own = {**self.details, "radii": list(radii)}
        return {"kind": "certified", "name": "certified", **own, **found, "n": len(self.index)}

    def columns(self) -> dict[str, list[Any]]:
        """Return the columns of a CSV file by name; radii and bounds are rounded down."""
        floor = {
            name: [math.floor(value * DIGITS) / DIGITS for value in values.tolist()]
            for name, values in (("radius", self.radius), ("probability", self.probability))
        }
        own = {"prediction": self.prediction.tolist(), **floor, "draws": self.draws.tolist()}
        return {f"certified_{name}": values for name, values in own.items()}

    def save(self, path: Path | str) -> None:
        """Write the certificate of each image as CSV and, beside it, the settings as JSON."""
        images = {"index": self.index.tolist(), "label": self.label.tolist()}
        write_table(Path(path), images | self.columns(), {"kind": "certificates", **self.details})

    def violations(self, attacked: EvaluationResult) -> list[tuple[str, int]]:
        """Return (attack, image) where an attack succeeds within the radius that is certified.

        Attacks are on the same smoothed defense, in l2; they succeed where every inference is
        wrong, which 10 inferences are by bad luck on one of 1,000 images at most. Any success is
        a bug of the attack or of the certificate, or the model's prediction on a copy depends on
        more than this copy, but for the small probability with which a certificate fails.
        """
        if not torch.equal(self.index, attacked.index):
            raise ValueError("certificates and attacks are of other images: evaluate the same ones")
        found = []
        for name, attack in attacked.attacks.items():
            if attack.threat.p != 2 or attack.threat.relative:
                continue
            broken = attacked.per_image(name) == 0
            broken &= self.per_image(attack.threat.eps) == 1
            found += [(name, image) for image in self.index[broken].tolist()]
        return found


SELECTION = 100  # draws that choose the class, n0 of the paper
COPIES = 2**13  # noisy images at a time


def certify(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    sigma: float | None = None,
    draws: int = 10_000,
    failure: float = 0.001,
    radii: Sequence[float] | None = None,
    seed: int = 0,
    max_images: int | None = None,
    group_size: int = GROUP_SIZE,
    unpack: Unpack | None = None,
    preprocess: Callable[[Tensor], Tensor] | None = None,
    progress: bool = True,
) -> Certificates:
    """Bound how far in l2 each image may be moved before a smoothed prediction changes.

    The prediction is the most frequent one of the model on Gaussian copies of the image; see
    `Smoothing`. Of each image 100 draws choose the class, and up to `draws` others bound its
    probability from below; the radius is sigma times the normal quantile of that bound. For each
    image by itself, the probability is at most `failure` that a radius is too large.

    The noise is that of seed and index, fixed before any image is seen, and not the one by which
    defenses predict in `evaluate`. The guarantee holds in floating point: see `gaussian_copies`,
    and `sampling_error`, which is subtracted from each bound. It is assumed that the model's
    prediction on a copy does not depend on the copies beside it.

    Other arguments are those of `evaluate`.

    Args:
        model: a `Smoothing`; or a defense, a module with one or a network, with `sigma`.
        sigma: standard deviation of the noise in pixel units.
        draws: n, the most draws that bound a probability.
        failure: probability that the radius of an image is too large.
        radii: radii to decide: an image takes no more draws once they cannot certify more of them.
            Such looks share `failure`. None takes all draws of each image, for the largest radius.
    """
    smoothed = smoothed_by(as_defense(model, preprocess), sigma)
    certifier = Certifier(draws, failure, radii, seed)
    settings = EvaluationSettings(seed, max_images=max_images, group_size=group_size)
    device, rows, count = device_of(smoothed), new_rows(), 0
    total = len(batches.dataset) if serves_once(batches) else None  # type: ignore[attr-defined]
    total = total if max_images is None or total is None else min(total, max_images)
    with tqdm(desc="Certifying", unit="image", total=total, disable=not progress or None) as bar:
        for batch in indexed_groups(batches, settings, None, unpack):
            x, y, index = (part.to(device) for part in batch)
            rows.update(index.cpu(), certifier(smoothed, x.float(), y, index))
            bar.update(len(x))
            count += len(x)
    if not count:
        raise ValueError("there are no images to certify: the batches are empty")
    found = certifier.certificates(smoothed.sigma, rows)
    check_indices(found.index, count)
    return found


def smoothed_by(defense: Defense, sigma: float | None) -> Smoothing:
    """Return a defense smoothed by sigma, or one that is smoothed already; else ValueError."""
    if not is_smoothing(defense):
        if sigma is None:
            raise ValueError(
                "the model is not smoothed: give the standard deviation of the noise, such as "
                "sigma=0.25 (--sigma 0.25)"
            )
        return Smoothing(defense, sigma).to(device_of(defense))
    if sigma not in (None, defense.sigma):
        raise ValueError(
            f"the model is smoothed by {defense.sigma:g} already, got sigma {sigma:g}: leave it "
            "out, in a plug-in by --trainer.callbacks.sigma=null"
        )
    return defense


def new_rows() -> PerImage:
    """Return the place of the columns that `Certifier` computes."""
    return PerImage(5, torch.float64)


@dataclass(frozen=True)
class Certifier:
    """Certifies batches of images; arguments as of `certify`."""

    draws: int = 10_000
    failure: float = 0.001
    radii: Sequence[float] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(1, draws=self.draws)
        if not 0 < self.failure < 1:
            raise ValueError(f"failure must be a probability in (0, 1), got {self.failure}")
        if self.radii is not None and not (self.radii and min(self.radii) >= 0):
            raise ValueError(f"radii must be l2 lengths of at least 0, got {list(self.radii)}")

    @torch.no_grad()
    def __call__(self, smoothed: Smoothing, x: Tensor, y: Tensor, index: Tensor) -> Tensor:
        """Compute label, class, bound of its probability, radius and draws of images: [B, 5]."""
        check_images(x, (0.0, 1.0))
        streams = Streams.from_index(index, self.seed, *b"certify")
        looks = Looks(self.draws, self.failure, self.radii is not None)
        sigma, error = smoothed.sigma, sampling_error(x, smoothed.sigma)
        wanted = probability_for(np.array([*(self.radii or ())], dtype=float), sigma)
        # A network may draw from torch's own streams.
        with own_streams(self.seed, x.device), evaluating(smoothed) as copied:
            votes = _votes(copied, x, streams, 0, SELECTION)
            check_labels(y, votes.shape[1])
            chosen = votes.argmax(1)
            right, taken, lower = (np.zeros(len(x)) for _ in range(3))
            rows, before = np.arange(len(x)), 0
            for count, failure in looks.schedule:
                some = torch.from_numpy(rows).to(x.device)
                first, last = SELECTION + before, SELECTION + count
                votes = _votes(copied, x[some], streams[some], first, last)
                right[rows] += votes.gather(1, chosen[some, None])[:, 0].cpu().double().numpy()
                taken[rows], before = last, count
                found = lower_bound(right[rows], count, failure) - error
                lower[rows] = np.maximum(lower[rows], found)
                rows = rows[looks.undecided(right[rows], count, lower[rows], wanted)]
                if not len(rows):
                    break
        predicted = np.where(lower > 0.5, chosen.cpu().numpy(), -1)
        columns = (y.cpu().numpy(), predicted, lower, radius_of(lower, sigma), taken)
        return torch.from_numpy(np.stack(columns, 1))

    def certificates(self, sigma: float, rows: PerImage) -> Certificates:
        """Return what the rows of all batches and processes hold."""
        index, columns = rows.rows()
        label, predicted, probability, radius, draws = columns.unbind(1)
        own: dict[str, Any] = {"sigma": sigma, **asdict(self)}
        label, predicted, draws = (part.long() for part in (label, predicted, draws))
        return Certificates(index, label, predicted, draws, probability, radius, own)


def _votes(smoothed: Smoothing, x: Tensor, streams: Streams, first: int, last: int) -> Tensor:
    """Count the votes [B, K] of draws number first … last - 1 on each image."""
    size, found = max(COPIES // len(x), 1), []
    for start in range(first, last, size):
        # Each draw has a number, so that its noise depends on nothing else.
        parts = [streams.fold_in(number) for number in range(start, min(start + size, last))]
        noise = Streams(torch.cat([part.keys for part in parts]), streams.batch_key)
        logits = smoothed.copy_logits(x.repeat(len(parts), *[1] * (x.dim() - 1)), noise)
        logits = logits.view(len(parts), len(x), -1)
        # With weights of one it counts the votes; a draw that is not finite has none.
        found.append(random_member(logits, logits.new_ones(len(parts))))
    return torch.stack(found).sum(0)
