"""Blurs against scipy, kornia and formulas."""

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch.nn.functional import pad

from lightning_rob.transforms import (
    Bilateral,
    BoxBlur,
    GaussianBlur,
    Laplacian,
    MedianBlur,
    MotionBlur,
)
from tests.transforms.inputs import assert_same, generator, planes

X = torch.rand(3, 3, 11, 14, generator=generator(), dtype=torch.float64)
FLAT = torch.full((2, 3, 9, 9), 0.3, dtype=torch.float64)
ODD = [BoxBlur, MedianBlur, MotionBlur, Bilateral, Laplacian]
MANY = X[:1].expand(600, -1, -1, -1)


@pytest.mark.parametrize("size", [3, 5])
def test_box_is_the_mean(size):
    expected = planes(lambda plane: ndimage.uniform_filter(plane, size, mode="mirror"), X)
    assert torch.allclose(BoxBlur(size)(X), expected, atol=1e-12)
    assert torch.allclose(BoxBlur(size)(FLAT), FLAT)


def gaussian(plane, size, down, across):
    for axis, std in enumerate((down, across)):
        taps = np.exp(-((np.arange(size) - size // 2) ** 2) / (2 * std**2))
        plane = ndimage.correlate1d(plane, taps / taps.sum(), axis, mode="mirror")
    return plane


def test_gaussian_is_fixed_by_default():
    assert GaussianBlur().sample(X) == ()
    expected = planes(lambda plane: gaussian(plane, 3, 2.5, 2.5), X)
    assert torch.allclose(GaussianBlur()(X), expected, atol=1e-12)
    assert torch.allclose(GaussianBlur()(FLAT), FLAT)


def test_gaussian_of_random_size_and_deviation():
    blur = GaussianBlur(sizes=(3, 5, 7), std=(0.5, 2.0))
    size, std = blur.sample(X, generator(2))
    size = torch.tensor([3, 7, 5])
    y = blur(X, size, std)
    for i in range(3):
        k, (down, across) = int(size[i]), std[i].tolist()
        expected = planes(lambda p, k=k, d=down, a=across: gaussian(p, k, d, a), X[i : i + 1])
        assert torch.allclose(y[i : i + 1], expected, atol=1e-12)
    sizes, stds = blur.sample(MANY, generator())
    assert set(sizes.tolist()) == {3, 5, 7}
    assert 0.5 <= stds.min() < 0.52
    assert 1.98 < stds.max() <= 2


@pytest.mark.parametrize("size", [3, 5])
def test_median_with_black_around(size):
    expected = planes(lambda plane: ndimage.median_filter(plane, size, mode="constant", cval=0), X)
    assert torch.equal(MedianBlur(size)(X), expected)


def test_median_of_a_size_for_each_image():
    blur = MedianBlur([3, 5, 9])
    expected = [MedianBlur(k)(X[i : i + 1]) for i, k in enumerate((9, 3, 9))]
    assert torch.equal(blur(X, torch.tensor([9, 3, 9])), torch.cat(expected))
    (sizes,) = blur.sample(MANY[:300], generator())
    assert sizes.bincount()[[3, 5, 9]].min() > 70
    assert sizes.bincount().sum() == 300


def bilateral(image, size, space, color):
    """By the formula, pixel by pixel: [C, H, W]; a mirror at the border."""
    reach = size // 2
    padded = np.pad(image, ((0, 0), (reach, reach), (reach, reach)), mode="reflect")
    place = np.arange(-reach, reach + 1)
    near = np.exp(-(place[:, None] ** 2 + place**2) / (2 * space**2))
    result = np.zeros_like(image)
    for row, column in np.ndindex(image.shape[1:]):
        window = padded[:, row : row + size, column : column + size]
        distance = np.abs(window - image[:, row, column][:, None, None]).sum(0)
        weight = near * np.exp(-(distance**2) / (2 * color**2))
        result[:, row, column] = (weight * window).sum((1, 2)) / weight.sum()
    return torch.from_numpy(result)


def test_bilateral_by_the_formula_with_a_size_for_each_image():
    space, color, size = torch.tensor([[2.0, 5, 9], [0.3, 0.1, 0.05], [3, 7, 5]]).double()
    y = Bilateral(size=(3, 5, 7))(X, space, color, size.long())
    for i in range(3):
        numbers = int(size[i]), float(space[i]), float(color[i])
        assert torch.allclose(y[i], bilateral(X[i].numpy(), *numbers), atol=1e-12)


@pytest.mark.parametrize("direction", [-1.0, 0.0, 0.6, 1.0])
def test_motion_along_the_row_and_the_column(direction):
    """At angle 0 weights fall linearly from d to 1 - d along the row, d = (direction + 1) / 2."""
    share = (direction + 1) / 2
    taps = np.linspace(share, 1 - share, 3)
    taps = taps / taps.sum()
    x = X[:1]
    y = MotionBlur()(x, *torch.tensor([[0.0], [direction]]).double())
    expected = planes(lambda plane: ndimage.correlate1d(plane, taps, 1, mode="constant"), x)
    assert torch.allclose(y, expected, atol=1e-6)
    turned = MotionBlur()(x, *torch.tensor([[90.0], [direction]]).double())
    quarter = MotionBlur()(x.rot90(-1, (2, 3)), *torch.tensor([[0.0], [direction]]).double())
    assert torch.allclose(turned, quarter.rot90(1, (2, 3)), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        *((lambda kind=kind: kind(4), "size must be odd .*, got 4") for kind in ODD),
        (lambda: GaussianBlur((3, 2)), r"sizes must be odd and at least 3, got \(3, 2\)"),
        (lambda: GaussianBlur(std=(2.0, 1.0)), r"std must be a range within .*, got \(2.0, 1.0\)"),
        (lambda: MedianBlur(()), r"size must be odd and at least 3, got \(\)"),
    ],
)
def test_kernels_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SQUARES = torch.rand(6, 3, 9, 9, generator=generator(), dtype=torch.float64)


def test_median_by_minima_and_maxima_is_that_of_sorting():
    def plain(x):
        padded = pad(x, [1] * 4)
        return padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2).median(-1).values

    assert_same(MedianBlur().apply, plain, SQUARES + 0.1)  # no ties with the border


def test_one_of_equal_pixels_has_the_gradient():
    x = SQUARES.mul(4).round() / 4
    squares = pad(x, [1] * 4).unfold(2, 3, 1).unfold(3, 3, 1)
    assert torch.equal(MedianBlur().apply(x), squares.flatten(-2).median(-1).values)
    z = x.clone().requires_grad_()
    inner = MedianBlur().apply(z)[..., 1:-1, 1:-1]
    assert float(torch.autograd.grad(inner.sum(), z)[0].sum()) == pytest.approx(inner.numel())
