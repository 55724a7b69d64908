"""The kinds of the pool against scikit-image, scipy, numpy, Pillow and closed forms."""

import io
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import ndimage
from skimage import color, filters, restoration, transform, util
from skimage.morphology import disk

from lightning_rob.data.mnist import _digits
from lightning_rob.nets.normalize import USUAL
from lightning_rob.randomness import Streams
from lightning_rob.transforms.pool import normalise, pool
from lightning_rob.transforms.pool.affine import ThreePoints
from lightning_rob.transforms.pool.cartoon import Cartoon
from lightning_rob.transforms.pool.colours import Quantise
from lightning_rob.transforms.pool.compress import CompressJPEG, CompressPNG
from lightning_rob.transforms.pool.denoise import DenoiseVariation
from lightning_rob.transforms.pool.distort import Distort
from lightning_rob.transforms.pool.filters import Edges, Gaussian, Rank
from lightning_rob.transforms.pool.morphology import Morphology
from lightning_rob.transforms.pool.noise import Noise
from lightning_rob.transforms.pool.normalise import NormaliseFeature
from lightning_rob.transforms.pool.place import Rotate, Shift
from lightning_rob.transforms.pool.segment import Borders

POOL = pool()
DIGITS = _digits()[:, 3].float() / 255
X = torch.rand(2, 3, 20, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
INNER = (..., slice(5, -5), slice(5, -5))


def planes(function, x=X):
    """A function of numpy on every plane [H, W]."""
    return torch.from_numpy(np.stack([[function(p) for p in image.numpy()] for image in x]))


def streams(count, seed=0):
    return Streams.from_index(torch.arange(count), seed)


def close(y, expected, atol=1e-5):
    return torch.allclose(y.double(), expected.double(), rtol=0, atol=atol)


def drawn(name, x, seed=0):
    return POOL[name](x, *POOL[name].sample(x, streams(len(x), seed)))


def test_rotations_are_anticlockwise():
    x = torch.arange(4.0).view(1, 1, 2, 2) / 4
    assert (4 * POOL["rotate_90"](x)).flatten().tolist() == [1, 3, 0, 2]
    assert (4 * POOL["rotate_180"](x)).flatten().tolist() == [3, 2, 1, 0]
    assert (4 * POOL["rotate_270"](x)).flatten().tolist() == [2, 0, 3, 1]
    with pytest.raises(ValueError, match="quarters must be 1, 2 or 3, got 4"):
        Rotate(4)


def test_flips():
    x = torch.arange(4.0).view(1, 1, 2, 2) / 4
    assert (4 * POOL["flip_horizontal"](x)).flatten().tolist() == [1, 0, 3, 2]
    assert (4 * POOL["flip_vertical"](x)).flatten().tolist() == [2, 3, 0, 1]
    assert (4 * POOL["flip_both"](x)).flatten().tolist() == [3, 2, 1, 0]


def test_shifts_by_four_of_28_pixels():
    x = torch.rand(1, 1, 28, 28)
    places = {"up": (-4, 0), "down": (4, 0), "left": (0, -4), "right": (0, 4)}
    places |= {"top_left": (-4, -4), "top_right": (-4, 4)}
    places |= {"bottom_left": (4, -4), "bottom_right": (4, 4)}
    for name, (down, right) in places.items():
        shift = POOL[f"shift_{name}"]
        rolled = x.roll((down, right), (2, 3))
        inside = torch.zeros(28, 28, dtype=torch.bool)
        rows, columns = (
            slice(max(down, 0), 28 + min(down, 0)),
            slice(max(right, 0), 28 + min(right, 0)),
        )
        inside[rows, columns] = True
        assert torch.equal(shift(x), torch.where(inside, rolled, 0))
        assert torch.equal(shift.kept(x), inside.roll((-down, -right), (0, 1)))
        assert int(shift.kept(x).sum()) == (28 - abs(down)) * (28 - abs(right))
    with pytest.raises(ValueError, match=r"rows must be a share in \(-1, 1\), got 4"):
        Shift(rows=4)


@pytest.mark.parametrize("name", [name for name in POOL if name.startswith("affine")])
@pytest.mark.parametrize("side", [28, 40])
def test_three_points_land_where_they_should(name, side):
    """By hand: bright blobs at the three points are found, by their centres of mass, at the others.

    Only blobs wide beside the interpolation, and points that stay in the image, show it well.
    """
    one = POOL[name]
    place = torch.arange(side, dtype=torch.float64)
    for before, after in zip(
        ((0.25, 0.25), (0.25, 0.5), (0.5, 0.25)), (one.corner, one.below, one.right), strict=True
    ):
        column, row = before[0] * side, before[1] * side
        x = torch.exp(-((place[:, None] - row) ** 2 + (place - column) ** 2) / 8)[None, None]
        y = one(x)[0, 0]
        found = [(y.sum(1 - dim) * place).sum() / y.sum() for dim in (1, 0)]
        assert math.isclose(found[0], after[0] * side, abs_tol=0.25)
        assert math.isclose(found[1], after[1] * side, abs_tol=0.25)


def test_affine_of_a_picture_with_three_points_as_they_are():
    assert close(ThreePoints()(X), X, 1e-9)


def test_affine_is_that_of_scikit_image():
    matrix = POOL["affine_both_stretch"].matrix(20, 24)
    inverse = np.linalg.inv(np.vstack([matrix.numpy(), [0, 0, 1]]))
    expected = planes(lambda p: transform.warp(p, inverse, order=1))
    assert close(POOL["affine_both_stretch"](X)[INNER], expected[INNER])


@pytest.mark.parametrize("size", [2, 3])
def test_morphology_is_that_of_scipy(size):
    square = (size, size)
    functions = {
        "erosion": ndimage.grey_erosion,
        "dilation": ndimage.grey_dilation,
        "opening": ndimage.grey_opening,
        "closing": ndimage.grey_closing,
        "gradient": ndimage.morphological_gradient,
    }
    for name, function in functions.items():
        y = Morphology(name, size)(X)
        assert close(y[INNER], planes(lambda p, f=function: f(p, square))[INNER], 1e-12)
    with pytest.raises(ValueError, match=r"operation must be of .*, got 'thinning'"):
        Morphology("thinning")


def test_opening_and_closing_stay_in_place():
    opened, closed = (POOL[f"morph_{name}"] for name in ("opening", "closing"))
    assert (opened(X) <= X).all()
    assert (closed(X) >= X).all()
    assert torch.equal(opened(opened(X)), opened(X))
    assert torch.equal(closed(closed(X)), closed(X))


def test_normalised_by_the_image():
    y = POOL["augment_samplewise_std_norm"](X)
    for image, result in zip(X.numpy(), y.numpy(), strict=True):
        expected = (image - image.mean()) / (image.std() + 1e-6)
        assert np.allclose(result, expected.clip(0, 1))


def test_normalised_by_fixed_numbers():
    grey = POOL["augment_featurewise_std_norm"](X[:, :1])
    assert close(grey, ((X[:, :1] - 0.1307) / 0.3081).clamp(0, 1))
    y = NormaliseFeature([0.5, 0.4, 0.3], [0.2, 0.2, 0.1])(X)
    expected = torch.stack([(X[:, 0] - 0.5) / 0.2, (X[:, 1] - 0.4) / 0.2, (X[:, 2] - 0.3) / 0.1], 1)
    assert close(y, expected.clamp(0, 1))
    assert normalise.USUAL == USUAL
    with pytest.raises(ValueError, match="images of 2 channels need as many in mean and std"):
        NormaliseFeature()(X[:, :2])
    with pytest.raises(ValueError, match=r"std must be positive, got \[0.0\]"):
        NormaliseFeature([0.5], [0.0])


def test_cartoon_of_a_flat_image_is_the_image():
    x = torch.full((1, 3, 16, 16), 0.4)
    for name in (name for name in POOL if name.startswith("cartoon")):
        assert close(POOL[name](x), x, 1e-6)


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


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("count", [4, 8])
def test_quantised_to_so_many_colours(channels, count):
    x = X[:, :channels]
    y = drawn(f"quantize_{count}_colors", x)
    for image, result in zip(x, y, strict=True):
        palette = result.flatten(1).T.unique(dim=0)
        assert len(palette) == count
        least = (image.flatten(1).T[:, None] - palette).norm(dim=-1).amin(1).mean()
        assert least > 0.8 * (image - result).norm(dim=0).mean()  # nearest, but in another space


def test_quantised_as_well_as_by_many_starts():
    """Error in L*a*b*, beside the least of k-means with ten starts on all pixels."""
    from sklearn.cluster import KMeans

    lab = color.rgb2lab(X[0].permute(1, 2, 0).numpy()).reshape(-1, 3)
    best = KMeans(8, n_init=10, random_state=0).fit(lab).inertia_
    result = color.rgb2lab(drawn("quantize_8_colors", X)[0].permute(1, 2, 0).numpy())
    assert ((result.reshape(-1, 3) - lab) ** 2).sum() < 1.25 * best


def test_few_colours_are_kept():
    x = torch.tensor([0.0, 0.25, 0.5, 1.0])[torch.randint(4, (1, 1, 8, 8))]
    assert close(drawn("quantize_4_colors", x), x, 1e-4)
    assert close(drawn("quantize_8_colors", x), x, 1e-4)
    with pytest.raises(ValueError, match="colours must be at least 1, got 0"):
        Quantise(0)
    with pytest.raises(ValueError, match="one or three channels"):
        drawn("quantize_4_colors", torch.rand(1, 2, 8, 8))


def test_distorted_as_by_rolling():
    for side in (28, 32):
        x = torch.rand(2, 3, side, side)
        down, right = x.numpy().copy(), x.numpy().copy()
        for i in range(side):
            shift = int(side / 5 * np.sin(np.pi * i * 2 / side))
            down[:, :, :, i] = np.roll(down[:, :, :, i], shift, axis=2)
            right[:, :, i] = np.roll(right[:, :, i], shift, axis=2)
        assert torch.equal(POOL["distort_x"](x), torch.from_numpy(down))
        assert torch.equal(POOL["distort_y"](x), torch.from_numpy(right))
    with pytest.raises(ValueError, match="axis must be 'x' or 'y', got 'z'"):
        Distort("z")


MODES = {
    "gaussian": "gaussian",
    "localvar": "localvar",
    "poisson": "poisson",
    "salt": "salt",
    "pepper": "pepper",
    "salt_pepper": "s&p",
    "speckle": "speckle",
}


@pytest.mark.parametrize("kind", MODES)
def test_noise_is_that_of_scikit_image(kind):
    """Its mean and deviation on each of nine greys, over many pixels."""
    x = torch.linspace(0.1, 0.9, 9).repeat_interleave(40).expand(1, 1, 500, 360)
    chance = np.random.default_rng(1)
    theirs = util.random_noise(x[0, 0].double().numpy(), MODES[kind], rng=chance)
    ours = drawn(f"noise_{kind}", x)
    for function in (torch.mean, torch.std):
        expected, found = (
            function(y.double().view(500, 9, 40), (0, 2))
            for y in (torch.from_numpy(theirs), ours[0, 0])
        )
        assert close(found, expected, 0.01)


def test_poisson_noise_goes_by_the_distinct_values():
    """Two values: one photon in two for a grey of one half, so that all become 0, 0.5 or 1."""
    x = torch.full((1, 1, 100, 100), 0.5)
    x[..., :50] = 0
    y = drawn("noise_poisson", x)
    assert set(y.unique().tolist()) == {0, 0.5, 1}
    assert not y[..., :50].any()
    assert math.isclose((y[..., 50:] == 0).double().mean(), math.exp(-1), abs_tol=0.02)


def test_poisson_noise_has_the_slope_of_the_image():
    x = torch.full((1, 1, 8, 8), 0.5, requires_grad=True)
    noise = POOL["noise_gaussian"].sample(x.detach(), streams(1))
    y = POOL["noise_gaussian"](x, *noise)
    inside = (y > 0) & (y < 1)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(gradient, inside.to(x))
    with pytest.raises(ValueError, match=r"kind must be of .*, got 's&p'"):
        Noise("s&p")


def test_edges_are_those_of_scikit_image():
    for kind in ("sobel", "scharr", "prewitt", "roberts"):
        function = getattr(filters, kind)
        assert close(POOL[f"filter_{kind}"](X), planes(function))
    assert close(POOL["filter_sobel"](DIGITS), planes(filters.sobel, DIGITS))
    with pytest.raises(ValueError, match=r"kind must be of .*, got 'canny'"):
        Edges("canny")


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
    larger = planes(lambda p: ndimage.rank_filter(p, 20, 5))
    assert torch.equal(Rank(20, 5)(X)[INNER], larger[INNER])
    for arguments, message in (((9,), "place must be 0 … 8, got 9"), ((0, 2), "size must be odd")):
        with pytest.raises(ValueError, match=message):
            Rank(*arguments)


@pytest.mark.parametrize("std", [1.0, 4.0])  # of 4.0, it reaches across half of the image and more
def test_gaussian_is_that_of_scipy_up_to_the_border(std):
    expected = planes(lambda p: ndimage.gaussian_filter(p, std))
    assert close(Gaussian(std)(X), expected)
    assert close(expected, planes(lambda p: filters.gaussian(p, std, mode="reflect")))
    assert POOL["filter_gaussian"] == Gaussian(1.0)


def test_gaussian_has_the_slope_of_finite_differences_at_the_border():
    x = X[:1, :1, :5, :6].clone().requires_grad_()
    assert torch.autograd.gradcheck(POOL["filter_gaussian"], x)


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


def by_pillow(x, quality):
    pictures = []
    for image in (255 * x).round().byte():
        file = io.BytesIO()
        pixels = image.permute(1, 2, 0).numpy()
        Image.fromarray(pixels.squeeze()).save(file, "JPEG", quality=quality)
        pictures.append(np.asarray(Image.open(file)).reshape(pixels.shape))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255


def test_jpeg_is_nearly_that_of_pillow():
    """Within 2 / 255 on average, though it rounds smoothly; the worse, the farther away."""
    losses = []
    for quality in (80, 50, 30, 10):
        y, true = POOL[f"compress_jpeg_quality_{quality}"](DIGITS), by_pillow(DIGITS, quality)
        assert 255 * (y - true).abs().mean() < 2
        assert (y - true).norm() < 0.6 * (true - DIGITS).norm()
        losses.append((y - DIGITS).square().mean())
    assert losses == sorted(losses)
    with pytest.raises(ValueError, match=r"quality must be 1 … 100, got 0"):
        CompressJPEG(0)


def test_png_rounds_to_eight_bits_whatever_the_level():
    y = POOL["compress_png_compression_1"](X)
    assert torch.equal((255 * y).round(), (255 * X).round())
    assert (y - X).abs().max() <= 0.5 / 255 + 1e-12
    for level in (5, 8):
        assert torch.equal(POOL[f"compress_png_compression_{level}"](X), y)
    with pytest.raises(ValueError, match="level must be 0 … 9, got 10"):
        CompressPNG(10)


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


def test_denoising_leaves_a_digit_upright():
    """The library turns some grey images that are given with a channel."""
    for name in (name for name in POOL if name.startswith("denoise")):
        y = POOL[name](DIGITS)
        across = (y * DIGITS.mT).sum((1, 2, 3))
        assert ((y * DIGITS).sum((1, 2, 3)) > across).sum() >= 9
    with pytest.raises(ValueError, match=r"method must be of .*, got 'wiener'"):
        DenoiseVariation("wiener", 1.0)


def test_swirl_is_that_of_scikit_image():
    for x in (DIGITS, X, torch.rand(1, 1, 8, 8)):
        expected = planes(lambda p: transform.swirl(p, strength=3, radius=65), x)
        assert close(POOL["geometric_swirl"](x), expected)


def test_projections_bring_an_image_back():
    place = torch.arange(28.0) - 14
    inside = place[:, None] ** 2 + place**2 < 13**2
    for name in ("geometric_iradon", "geometric_iradon_sart"):
        y = POOL[name](DIGITS)
        for digit, result in zip(DIGITS, y, strict=True):
            both = torch.stack([digit[0][inside], result[0][inside]])
            assert torch.corrcoef(both)[0, 1] > 0.8
        assert close(y[..., [0, 0, -1, -1], [0, -1, 0, -1]], torch.full((10, 1, 4), 0.5))


def test_projections_are_those_of_scikit_image():
    inside = np.hypot(*(np.mgrid[:28, :28] - 14)) <= 14
    angles = np.linspace(-100, 128, 28, endpoint=False)

    def again(p):
        shadow = transform.radon((2 * p - 1) * inside, angles)
        return transform.iradon(shadow, angles) / 2 + 0.5

    assert close(POOL["geometric_iradon"](DIGITS), planes(again, DIGITS).clamp(0, 1))


def test_borders_are_those_of_scipy():
    eight = (255 * X).round()
    calm = planes(lambda p: ndimage.median_filter(p, footprint=disk(2)), eight)
    expected = planes(lambda p: ndimage.morphological_gradient(p, footprint=disk(1)), calm) / 255
    y = POOL["seg_gradient"](X)
    assert close(y[INNER], expected[INNER])
    assert len(y.unique()) > 10
    assert Borders() == POOL["seg_gradient"]
