"""The pool's filters against scikit-image, scipy and closed forms."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import ndimage
from skimage import filters, restoration, util
from skimage.morphology import disk

from lightning_rob.transforms.pool import pool
from lightning_rob.transforms.pool.filters import Cartoon
from tests.transforms.inputs import INNER, X, close, digits, planes

POOL = pool()
DIGITS = digits()


def test_morphology_is_that_of_scipy():
    functions = {
        "erosion": ndimage.grey_erosion,
        "dilation": ndimage.grey_dilation,
        "opening": ndimage.grey_opening,
        "closing": ndimage.grey_closing,
        "gradient": ndimage.morphological_gradient,
    }
    for name, function in functions.items():
        y = POOL[f"morph_{name}"](X)
        assert close(y[INNER], planes(lambda p, f=function: f(p, (2, 2)))[INNER], 1e-12)


def test_edges_are_those_of_scikit_image():
    for kind in ("sobel", "scharr", "prewitt", "roberts"):
        function = getattr(filters, kind)
        assert close(POOL[f"filter_{kind}"](X), planes(function))
    assert close(POOL["filter_sobel"](DIGITS), planes(filters.sobel, DIGITS))


def test_ranks_are_those_of_scipy():
    """Also at the border, and of Athena's cube through the one channel of a grey image."""
    functions = {
        "median": lambda p: ndimage.median_filter(p, 3),
        "minimum": lambda p: ndimage.minimum_filter(p, 3),
        "maximum": lambda p: ndimage.maximum_filter(p, 3),
        "rank": lambda p: ndimage.rank_filter(p[..., None], rank=15, size=3)[..., 0],
    }
    for name, function in functions.items():
        assert torch.equal(POOL[f"filter_{name}"](X), planes(function))


@pytest.mark.parametrize("side", [20, 3])  # across the whole image and more
def test_gaussian_is_that_of_scipy_up_to_the_border(side):
    x = X[:, :, :side, :side]
    expected = planes(lambda p: ndimage.gaussian_filter(p, 1.0), x)
    assert close(POOL["filter_gaussian"](x), expected)
    assert close(expected, planes(lambda p: filters.gaussian(p, 1.0, mode="reflect"), x))


def test_entropy_by_counting():
    x = X[:, :1]
    eight = (255 * x[0, 0]).round().long()
    y = POOL["filter_entropy"](x)[0, 0]
    window = torch.from_numpy(disk(2)).bool()
    for row, column in ((2, 2), (7, 11), (17, 21)):
        values = eight[row - 2 : row + 3, column - 2 : column + 3][window]
        share = values.unique(return_counts=True)[1] / 13
        assert math.isclose(
            y[row, column], -(share * share.log2()).sum() / math.log2(13), abs_tol=1e-6
        )
    distinct = torch.arange(400.0).view(1, 1, 20, 20) % 200 / 255
    assert close(POOL["filter_entropy"](distinct)[INNER], torch.ones(10, 10))


def test_borders_are_those_of_scipy():
    eight = (255 * X).round()
    calm = planes(lambda p: ndimage.median_filter(p, footprint=disk(2)), eight)
    expected = planes(lambda p: ndimage.morphological_gradient(p, footprint=disk(1)), calm) / 255
    y = POOL["seg_gradient"](X)
    assert close(y[INNER], expected[INNER])
    assert len(y.unique()) > 10


@pytest.mark.parametrize("channels", [1, 3])
def test_denoised_by_scikit_image(channels):
    x = X[:, :channels]
    axis = {"channel_axis": -1} if channels == 3 else {}
    patches = {"patch_size": 5, "patch_distance": 6}

    def sigma(image):
        return np.mean(restoration.estimate_sigma(image, **axis))

    def means(image, strength, fast):
        noise = sigma(image)
        options = {"h": strength * noise, "sigma": noise, "fast_mode": fast}
        return restoration.denoise_nl_means(image, **options, **patches, **axis)

    functions = {
        "tv_chambolle": lambda p: restoration.denoise_tv_chambolle(p, weight=0.4, **axis),
        "tv_bregman": lambda p: restoration.denoise_tv_bregman(
            p, weight=2, max_num_iter=50, eps=1e-6, **axis
        ),
        "wavelet": lambda p: restoration.denoise_wavelet(
            p, sigma(p), "db1", "soft", method="VisuShrink", **axis
        ),
        "nl_means": lambda p: means(p, 0.8, fast=False),
        "nl_means_fast": lambda p: means(p, 0.6, fast=True),
    }
    for name, function in functions.items():
        y = POOL[f"denoise_{name}"](x)
        for image, result in zip(x, y, strict=True):
            picture = image.permute(1, 2, 0).numpy().squeeze()
            expected = torch.from_numpy(function(picture)).view(20, 24, -1).permute(2, 0, 1)
            assert close(result, expected.clamp(0, 1), 1e-9)
            assert result.std() < image.std()


def test_without_noise_there_is_nothing_to_remove():
    x = torch.full((2, 3, 8, 8), 0.3)
    for name in ("wavelet", "nl_means", "nl_means_fast"):
        assert torch.allclose(POOL[f"denoise_{name}"](x), x)


def test_cartoon_draws_black_lines_on_the_dark_side_of_edges():
    x = torch.full((1, 1, 32, 32), 0.2)
    x[..., 16:] = 0.9
    y = Cartoon(0, 0, 9, 9)(x)[0, 0, 16]
    assert torch.equal(y == 0, torch.tensor([12 <= column < 16 for column in range(32)]))
    assert close(y[y > 0], x[0, 0, 16][y > 0], 1 / 255)


def test_cartoon_smooths_until_nothing_changes():
    """As many filters as are asked for, though those that change nothing are left out."""
    x = DIGITS[3:6]
    smooth = [Cartoon(1, count, 3, 255)(x).flatten(1).std(1) for count in (0, 3, 10, 100)]
    assert all((a > b).all() for a, b in pairwise(smooth))
    assert torch.equal(Cartoon(1, 100, 3, 9)(x), Cartoon(1, 1000, 3, 9)(x))


def test_cartoon_outlines_are_those_of_scikit_image():
    blurred = planes(lambda p: filters.rank.median(util.img_as_ubyte(p), np.ones((3, 3))), X[:, :1])
    local = planes(lambda p: filters.threshold_local(p.astype(float), 9, "mean"), blurred)
    expected = blurred <= local.round() - 9
    y = Cartoon(0, 0, 9, 9)(X[:, :1].clamp_min(0.01))
    assert (y == 0)[INNER].eq(expected[INNER]).double().mean() > 0.99
