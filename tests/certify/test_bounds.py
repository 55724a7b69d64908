"""The promise of the bounds, simulated, and the noise on its grid."""

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from scipy.stats import chisquare, norm

from lightning_rob.certify.smoothing import Looks, lower_bound, probability_for, radius_of
from lightning_rob.defenses.smoothing import GRID, gaussian_copies, sampling_error
from lightning_rob.metrics import clopper_pearson
from lightning_rob.randomness import Streams


def test_the_bound_is_that_of_clopper_and_pearson():
    for right, n in ((0, 5), (3, 10), (99, 100), (100, 100), (7000, 10_000)):
        exact = clopper_pearson(right, n, level=0.98)[0]
        found = float(lower_bound(np.array([float(right)]), n, 0.01)[0])
        assert exact * (1 - 1e-8) <= found <= exact


def failures(schedule, p, runs, seed):
    """The share of runs in which a bound of any look is above p: the worst way to stop."""
    rng, right, before = np.random.default_rng(seed), np.zeros(runs, dtype=int), 0
    failed = np.zeros(runs, dtype=bool)
    for count, failure in schedule:
        right += rng.binomial(count - before, p, runs)
        before = count
        failed |= lower_bound(np.arange(count + 1.0), count, failure)[right] > p
    return failed.mean()


def just_below(schedule):
    """Probabilities just below bounds, where failures are most frequent."""
    for count, failure in schedule:
        for right in {count, count - 1, int(0.9 * count), int(0.7 * count)}:
            yield float(lower_bound(np.array([float(right)]), count, failure)[0]) * (1 - 1e-9)


@pytest.mark.parametrize("failure", [0.05, 0.001])
def test_looking_early_is_paid_for(failure):
    looks = Looks(800, failure)
    schedule = looks.schedule
    assert [count for count, _ in schedule] == [50, 100, 200, 400, 800]
    assert sum(share for _, share in schedule) == pytest.approx(failure)
    runs = 40_000
    found = [failures(schedule, p, runs, i) for i, p in enumerate(just_below(schedule))]
    assert max(found) <= failure + 3 * np.sqrt(failure / runs)
    # The same looks at the full level each fail too often: the simulation can tell.
    unpaid = [(count, failure) for count, _ in schedule]
    assert max(failures(unpaid, p, runs, 0) for p in just_below(unpaid)) > 1.3 * failure
    assert Looks(800, failure, early=False).schedule == [(800, failure)]
    assert Looks(70, failure).schedule == [(70, failure)]


def test_an_image_stops_when_more_draws_cannot_help():
    looks, wanted = Looks(1000, 0.001), probability_for(np.array([0.0, 0.25]), 0.25)
    right = np.array([62.0, 55.0, 31.0, 12.0])
    lower = lower_bound(right, 62, 1e-4)
    # All certified; the second radius is open; the first is open; hopeless.
    assert looks.undecided(right, 62, lower, wanted).tolist() == [False, True, True, False]
    assert not looks.undecided(right, 62, lower, wanted[:0]).any()


def test_radii_and_probabilities_are_rounded_to_the_safe_side():
    radii = np.array([0.0, 0.1, 0.5, 1.0])
    assert (probability_for(radii, 0.25) > norm.cdf(radii / 0.25)).all()
    p = np.array([0.3, 0.5, 0.7, 0.999999])
    assert radius_of(p, 0.25)[:2].tolist() == [0.0, 0.0]
    assert (radius_of(p, 0.25)[2:] < 0.25 * ndtri(p[2:])).all()
    assert (radius_of(probability_for(radii, 0.25), 0.25) >= radii).all()


def noise(count=1, seed=0):
    return Streams.from_index(torch.arange(count), seed)


def test_a_network_sees_places_on_a_grid_which_tell_nothing_of_the_image():
    """Plain float32 noise tells by its last bits whether the image was 0 or 1/3."""
    zeros, thirds = torch.zeros(1, 1, 64, 64), torch.full((1, 1, 64, 64), 1 / 3)

    def fine(values):
        return float((values / 2.0**-26 % 1 != 0).float().mean())

    for x in (zeros, thirds):
        copies = gaussian_copies(x, 0.25, noise())
        assert copies.dtype == torch.float32 and not (copies / GRID % 1).any()
    shifted = gaussian_copies(zeros + 5 * GRID, 0.25, noise())
    assert torch.equal(shifted, gaussian_copies(zeros, 0.25, noise()) + 5 * GRID)
    plain = 0.25 * torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    assert fine(zeros + plain) > 0.2 and fine(thirds + plain) == 0


def test_places_have_their_exact_probabilities():
    sigma, x = 1.5 * GRID, torch.full((1, 1, 300, 300), 0.3 * GRID)
    for generator in (noise(), torch.Generator().manual_seed(0)):
        places = (gaussian_copies(x, sigma, generator) / GRID).round().long().flatten().numpy()
        borders = np.array([-np.inf, *np.arange(-3.5, 4), np.inf])
        observed = np.histogram(places, borders)[0]
        expected = np.diff(norm.cdf(borders, 0.3, 1.5)) * places.size
        assert chisquare(observed, expected).pvalue > 0.001


def test_the_error_of_the_sampling_is_bounded():
    """Of 2^48 quantiles a border falls into one; each is exact but for 2e-14."""
    u = torch.cat(
        [2.0 ** -torch.arange(1.0, 49.0).double(), torch.linspace(0.01, 0.99, 99).double()]
    )
    found = torch.special.ndtri(u).numpy()
    assert np.abs(found - norm.ppf(u.numpy())).max() < 2e-14
    for sigma in (0.01, 0.25, 1.0, 4.0):
        borders = 2 * 8.1 * sigma / GRID + 2
        a_pixel = borders * 2.0**-48 + 2 * 2e-14 * max(sigma, GRID) / GRID
        assert a_pixel <= sampling_error(torch.zeros(1, 1, 1, 1), sigma)
    assert sampling_error(torch.zeros(5, 3, 32, 32), 0.25) == 3072 * 2.0**-31
