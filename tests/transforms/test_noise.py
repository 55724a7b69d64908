"""Noises against their distributions and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from lightning_rob.transforms import (
    Erase,
    GaussianNoise,
    Pepper,
    PoissonNoise,
    Salt,
    SpeckleNoise,
    UniformNoise,
)
from lightning_rob.transforms.noise import poisson_quantile, summed_poisson_quantile
from tests.transforms.inputs import generator, streams

X = torch.rand(64, 3, 16, 20, generator=generator())


def test_deviation_of_gaussian_and_speckle():
    (noise,) = GaussianNoise(0.2).sample(X, generator())
    (factor,) = SpeckleNoise(0.2).sample(X, generator())
    assert torch.allclose(factor, 1 + noise)
    alone = noise[:, 0].flatten().double().numpy() / 0.2
    assert stats.kstest(alone, "norm").pvalue > 1e-3


@pytest.mark.parametrize("kind", [GaussianNoise, UniformNoise, SpeckleNoise, Salt, Pepper])
def test_half_of_the_images_get_grey_noise(kind):
    x = torch.full((2000, 3, 6, 6), 0.5)
    (noise,) = kind(0.9).sample(x, generator())
    share = ((noise != noise[:, :1]).flatten(1).any(1)).double().mean()
    few = 0.06 if kind in (Salt, Pepper) else 0  # images without a speck are grey as well
    assert 0.5 - few - 0.04 < share < 0.54


def test_salt_and_pepper_on_masks():
    mask = (torch.rand(X.shape, generator=generator(1)) < 0.3).float()
    assert torch.equal(Salt()(X, mask), torch.where(mask == 1, 1, X))
    assert torch.equal(Pepper()(X, mask), torch.where(mask == 1, 0, X))
    x = (0.1 + 0.8 * X).requires_grad_()
    (gradient,) = torch.autograd.grad(Salt()(x, mask).sum(), x)
    assert torch.equal(gradient, 1 - mask)


@pytest.mark.parametrize("kind", [Salt, Pepper])
def test_share_of_specks_is_uniform(kind):
    x = torch.full((1500, 3, 24, 24), 0.5)
    (mask,) = kind(0.4).sample(x, generator())
    assert set(mask.unique().tolist()) == {0, 1}
    share = mask[:, 0].flatten(1).mean(1).double().numpy()
    assert abs(share.mean() - 0.2) < 0.012
    assert abs(share.std() - 0.4 / math.sqrt(12)) < 0.01


@pytest.mark.parametrize("rate", [0, 1e-3, 0.02, 0.3, 1, 2.5, 7, 40, 1000])
def test_poisson_quantiles_are_exact(rate):
    u = torch.rand(50_000, generator=generator(), dtype=torch.float64).float()
    count = poisson_quantile(u, torch.full_like(u, rate)).double().numpy()
    expected = stats.poisson.ppf(u.double().numpy(), rate) if rate else np.zeros(len(u))
    assert (np.abs(count - expected) > 0).mean() < 1e-4  # float32 against float64
    assert np.abs(count - expected).max() <= 1


def test_poisson_has_the_gradient_of_the_identity():
    x = (0.2 + 0.2 * X).requires_grad_()
    (noise,) = PoissonNoise(0.02).sample(x, generator())
    assert not noise.requires_grad
    y = PoissonNoise(0.02)(x, noise)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert (gradient[(y > 0) & (y < 1)] == 1).all()


def test_erase_blackens_its_box():
    box = torch.tensor([[2, 3, 4, 5], [0, 0, 16, 20]])
    y = Erase()(X[:2], box)
    assert (y[0, :, 2:6, 3:8] == 0).all()
    assert (y[1] == 0).all()
    kept = torch.ones(16, 20, dtype=torch.bool)
    kept[2:6, 3:8] = False
    assert torch.equal(y[0][:, kept], X[0][:, kept])


def test_boxes_to_erase():
    x = torch.zeros(4000, 1, 60, 50)
    (box,) = Erase(0.3).sample(x, streams(*range(4000)))
    top, left, height, width = box.double().unbind(1)
    assert (top + height).max() <= 60
    assert (left + width).max() <= 50
    assert min(top.min(), left.min()) == 0
    share = height * width / 3000
    ratio = height / width
    free = height < 60  # nor is the width ever clipped here
    assert 0.015 < share[free].min() < 0.03
    assert 0.28 < share.max() < 0.32
    assert 0.25 < ratio.min() < 0.33
    assert 2.9 < ratio[free].max() < 3.8
    assert abs((ratio < 1).double().mean() - 0.5) < 0.06


@pytest.mark.parametrize("largest", [0.5, 4.0])
def test_summed_quantile_is_the_quantile(largest):
    u, rate = torch.rand(2, 100_000, generator=generator(), dtype=torch.float64)
    u[:4] = torch.tensor([0.0, 1.0, 2.0**-24, 1 - 2.0**-24])
    rate = largest * rate
    rate[:8:2], rate[1:9:2] = largest, 0.0
    assert torch.equal(summed_poisson_quantile(u, rate, largest), poisson_quantile(u, rate))


def test_what_noise_does():
    noise = torch.linspace(-1, 2, X.numel()).view_as(X)
    for kind in (GaussianNoise, UniformNoise, PoissonNoise):
        assert torch.equal(kind(0.3)(X, noise), (X + noise).clamp(0, 1))
    assert torch.equal(SpeckleNoise(0.3)(X, noise), (X * noise).clamp(0, 1))


def test_poisson_mean_and_variance():
    """Of alpha * Poisson(x / alpha): x and alpha x."""
    x = torch.full((1, 1, 400, 400), 0.37, dtype=torch.float64)
    (noise,) = PoissonNoise(0.1).sample(x, generator())
    assert abs(noise.mean()) < 0.002
    assert abs(noise.var() / 0.037 - 1) < 0.02
    counts = (x + noise) / 0.1
    assert torch.allclose(counts, counts.round(), atol=1e-9)
