"""Certificates by randomized smoothing (Cohen et al. 2019), with draws where they are needed."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from lightning_rob.attacks import evaluating
from lightning_rob.attacks.base import check_images
from lightning_rob.certify.bounds import Looks, lower_bound, probability_for, radius_of
from lightning_rob.certify.certificates import Certificates
from lightning_rob.defenses import Defense, Smoothing, is_smoothing
from lightning_rob.defenses.smoothing import sampling_error
from lightning_rob.evaluation.evaluate import as_defense, indexed_groups
from lightning_rob.evaluation.evaluator import EvaluationSettings, check_indices, device_of
from lightning_rob.evaluation.groups import GROUP_SIZE, Unpack, serves_once
from lightning_rob.metrics import PerImage
from lightning_rob.objectives import check_labels
from lightning_rob.randomness import Streams, seeded_global_rng
from lightning_rob.rules import random_member
from lightning_rob.runtime.errors import at_least

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
        raise ValueError(f"the model is smoothed by {defense.sigma:g} already, got sigma {sigma:g}")
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
        own = torch.Generator().manual_seed(self.seed)
        with seeded_global_rng(own, x.device), evaluating(smoothed) as copied:
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
