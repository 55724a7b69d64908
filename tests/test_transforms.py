"""What holds for all 33 transforms; each group's own truths are in test_transforms_<group>.py."""

import dataclasses
import random

import numpy as np
import pytest
import torch

from lightning_rob import transforms
from lightning_rob.randomness import Streams
from lightning_rob.transforms import (
    HSV,
    LAB,
    XYZ,
    YUV,
    ColorJitter,
    Gray,
    GrayMix,
    GrayOneChannel,
    GrayTwoChannels,
    PoissonNoise,
    Transform,
    catalogue,
)
from lightning_rob.transforms.pool import pool

ALL = pytest.mark.parametrize("kind", catalogue().values(), ids=catalogue().keys())
COLOR = {HSV, LAB, XYZ, YUV, Gray, GrayMix, GrayTwoChannels, GrayOneChannel, ColorJitter}
FIXED = {
    "BoxBlur",
    "GaussianBlur",
    "MedianBlur",
    "Laplacian",
    "Sobel",
    "HorizontalFlip",
    "VerticalFlip",
}


def images(count=4, channels=3, height=19, width=26, dtype=torch.float32, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return torch.rand(count, channels, height, width, generator=chance, dtype=dtype)


def streams(*indices):
    return Streams.from_index(torch.tensor(indices), 5)


def strong(kind, alpha):
    return kind(alpha=alpha) if "alpha" in kind.__dataclass_fields__ else kind()


def test_there_are_33():
    kinds = catalogue()
    assert len(kinds) == 33
    assert sum(len(group) for group in transforms.GROUPS.values()) == 33
    assert [len(group) for group in transforms.GROUPS.values()] == [7, 4, 8, 2, 3, 5, 4]
    assert set(kinds) | {"Bilateral", "Transform", "catalogue", "named"} == set(transforms.__all__)
    assert all(kind.differentiable for kind in kinds.values())


@ALL
def test_frozen_with_strength_and_probability(kind):
    transform = kind(p=0.25)
    assert (transform.p, kind().p) == (0.25, 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        transform.p = 0.5
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\], got 1.5"):
        kind(p=1.5)
    if hasattr(kind, "alpha"):
        assert kind(0.125).alpha == 0.125
        with pytest.raises(ValueError, match=r"alpha must be in \[0, 1\], got -0.5"):
            kind(alpha=-0.5)


@ALL
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shape_type_range_and_a_gradient(kind, alpha, dtype):
    transform, x = strong(kind, alpha), images(dtype=dtype).requires_grad_()
    y = transform(x, *transform.sample(x, streams(0, 1, 2, 3)))
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert y.min() >= 0
    assert y.max() <= 1
    (gradient,) = torch.autograd.grad((y * images(seed=1).to(dtype)).sum(), x)
    assert gradient.isfinite().all()
    assert (gradient != 0).any()


@ALL
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_flat_images_do_no_harm(kind, value):
    transform = strong(kind, 0.5)
    x = torch.full((2, 3, 16, 16), value, requires_grad=True)
    y = transform(x, *transform.sample(x, streams(0, 1)))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all()
    assert gradient.isfinite().all()


@ALL
def test_grey_images_work_or_are_refused(kind):
    transform, x = strong(kind, 0.3), images(channels=1)
    if kind in COLOR:
        with pytest.raises(ValueError, match=f"{kind.__name__} .*RGB"):
            transform(x, *transform.sample(x, streams(0, 1, 2, 3)))
    else:
        assert transform(x, *transform.sample(x, streams(0, 1, 2, 3))).shape == x.shape


@ALL
def test_one_set_of_parameters_per_image(kind):
    transform = strong(kind, 0.5)
    x = images(1).expand(4, -1, -1, -1)
    for generator in (torch.Generator().manual_seed(3), streams(0, 1, 2, 3)):
        params = transform.sample(x, generator)
        assert (params == ()) == (kind.__name__ in FIXED)
        assert all(len(param) == 4 for param in params)
        assert all(param.dtype in (x.dtype, torch.int64) for param in params)
        y = transform(x, *params)
        different = [not torch.equal(y[0], other) for other in y[1:]]
        assert all(different) if params else not any(different)


@ALL
def test_all_chance_is_in_the_parameters(kind):
    transform, x = strong(kind, 0.5), images()
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    params = transform.sample(x, torch.Generator().manual_seed(0))
    y = transform(x, *params)
    assert torch.equal(transform(x, *params), y)
    again = transform.sample(x, torch.Generator().manual_seed(0))
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@ALL
def test_a_batch_is_its_images_one_by_one(kind):
    transform, x = strong(kind, 0.5), images(5, dtype=torch.float64)
    params = transform.sample(x, streams(10, 11, 12, 13, 14))
    y = transform(x, *params)
    for i in range(5):
        own = [param[i : i + 1] for param in params]
        assert torch.allclose(transform(x[i : i + 1], *own), y[i : i + 1], rtol=0, atol=1e-9)
        alone = transform.sample(x[i : i + 1], streams(10 + i))
        assert all(torch.allclose(a, b) for a, b in zip(alone, own, strict=True))


@ALL
def test_no_images_at_all(kind):
    transform, x = strong(kind, 0.5), images()[:0]
    assert transform(x, *transform.sample(x, torch.Generator())).shape == x.shape


@ALL
def test_gradient_is_that_of_finite_differences(kind):
    # a small step of Poisson noise keeps it from ending at the clamp's kink, at exactly 0
    transform = strong(kind, 0.01 if kind is PoissonNoise else 0.2)
    x = 0.2 + 0.6 * images(1, 3, 5, 7, torch.float64, seed=4)
    params = transform.sample(x, streams(8))
    assert torch.autograd.gradcheck(lambda x: transform(x, *params), x.requires_grad_())


IDENTITY = {
    "GaussianNoise": 0,
    "UniformNoise": 0,
    "SpeckleNoise": 0,
    "Salt": 0,
    "Pepper": 0,
    "LAB": 1e-5,
    "YUV": 2e-3,  # the authors' matrices are rounded to three digits
    "GrayMix": 0,
    "ColorPrecision": 0.375 / 16 + 1e-6,  # half a step less its eighth
    "FFT": 0.021,  # its gain is up to 1.02
    "Affine": 1e-5,
    "Crop": 1e-5,
    "Swirl": 1e-5,
    "Gamma": 1e-6,
    "Sharpen": 1e-6,
}


@pytest.mark.parametrize("name", IDENTITY)
def test_no_strength_no_change(name):
    x = images(3, height=24, width=24)
    transform = catalogue()[name](0.0)
    y = transform(x, *transform.sample(x, streams(1, 2, 3)))
    assert (y - x).abs().max() <= IDENTITY[name]


@dataclasses.dataclass(frozen=True)
class Broken(Transform):
    """NaN, in value and gradient, where the image is above one half somewhere."""

    def apply(self, x, scale):
        return (0.5 - x).sqrt() * scale[:, None, None, None] + 0.25


def test_an_image_with_a_nan_is_returned_as_it_came():
    x = torch.tensor([0.25, 0.75, 0.16]).view(3, 1, 1, 1).repeat(1, 1, 2, 2).requires_grad_()
    y = Broken()(x, torch.tensor([1.0, 1.0, 2.0]))
    assert torch.equal(y[1], x[1])
    assert torch.allclose(y[0], torch.tensor(0.75))
    assert torch.allclose(y[2], torch.tensor(2 * 0.34**0.5 + 0.25).clamp(max=1))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(gradient[:2, 0, 0, 0], torch.tensor([-1.0, 1.0]))
    assert (gradient[2] == 0).all()  # clamped


def test_black_and_white_pixels_have_a_gradient():
    x = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(transforms.HorizontalFlip()(x).sum(), x)
    assert (gradient == 1).all()


def test_white_that_is_blurred_has_a_gradient():
    """Weights that sum to one but for rounding take it a little beyond white."""
    blur, x = pool()["filter_gaussian"], torch.ones(1, 3, 9, 9, dtype=torch.float64)
    x.requires_grad_()
    (gradient,) = torch.autograd.grad(blur(x).sum(), x)
    assert (gradient > 0).all()


@pytest.mark.parametrize("x", [torch.rand(3, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.uint8)])
def test_only_batches_of_floating_images(x):
    with pytest.raises(ValueError, match=r"VerticalFlip takes floating \[B, C, H, W\], got"):
        transforms.VerticalFlip()(x)


RANGES = [
    ("UniformNoise", 0, ..., -0.4, 0.4),
    ("GrayMix", 1, ..., 0, 0.4),
    ("HSV", 0, 0, -0.08, 0.08),
    ("HSV", 0, 1, -0.4, 0.4),
    ("HSV", 0, 2, -0.4, 0.4),
    ("LAB", 0, 0, -40, 40),
    ("LAB", 0, 1, -16, 16),
    ("LAB", 0, 2, -16, 16),
    ("XYZ", 0, ..., -0.4, 0.4),
    ("YUV", 0, 0, -0.4, 0.4),
    ("YUV", 0, 1, -0.16, 0.16),
    ("MotionBlur", 0, ..., -90, 90),
    ("MotionBlur", 1, ..., -1, 1),
    ("GrayTwoChannels", 1, ..., 0, 2),
    ("GrayOneChannel", 1, ..., 0, 2),
    ("JPEG", 0, ..., 5, 53),
    ("ColorPrecision", 0, ..., 10, 16),
    ("FFT", 0, ..., 0.98, 1.02),
    ("FFT", 1, ..., 0, 1),
    ("Erase", 0, 0, 0, 7),
    ("Erase", 0, 2, 1, 8),
    ("Crop", 0, 2, 7, 8),
    ("Crop", 0, 3, 7, 11),
    ("Swirl", 0, 0, 0, 11),
    ("Swirl", 0, 1, 0, 7),
    ("Swirl", 1, ..., 0, 6.4),
    ("Swirl", 2, ..., 0, 3.2),
    ("ColorJitter", 0, 0, -0.4, 0.4),
    ("ColorJitter", 0, 1, 0.6, 1.4),
    ("ColorJitter", 0, 2, 0.6, 1.4),
    ("ColorJitter", 0, 3, -0.4, 0.4),
    ("ColorJitter", 1, ..., 0, 3),
    ("Gamma", 0, ..., 0.6, 1.4),
    ("Solarize", 0, ..., 0.4, 0.6),
    ("Solarize", 1, ..., -0.1, 0.1),
]


@pytest.mark.parametrize(("name", "index", "column", "low", "high"), RANGES)
def test_ranges_of_the_parameters(name, index, column, low, high):
    """All within the documented range, which is filled, at alpha 0.4 on 3x8x12 images."""
    x = torch.full((3000, 3, 8, 12), 0.5)
    drawn = strong(catalogue()[name], 0.4).sample(x, torch.Generator().manual_seed(1))[index]
    drawn = drawn.double() if column is ... else drawn[:, column].double()
    slack = 0.01 * (high - low)
    assert low - 1e-6 <= drawn.min() <= low + slack
    assert high - slack <= drawn.max() <= high + 1e-6
