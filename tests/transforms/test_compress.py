"""JPEG against Pillow and by hand, precision, the Fourier transform."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from scipy import fft
from skimage import data

from lightning_rob.transforms import FFT, JPEG, ColorPrecision
from lightning_rob.transforms.base import soft_round
from lightning_rob.transforms.compress import CHROMA, LUMA, table_factor
from tests.transforms.inputs import generator

X = torch.rand(3, 3, 16, 32, generator=generator(), dtype=torch.float64)


def photo(height, width):
    return data.astronaut()[40 : 40 + height, 150 : 150 + width].copy()


def tensor(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].double() / 255


def pillow(pixels, quality):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return tensor(np.array(Image.open(file)))


# JPEG
def test_quality_is_that_of_libjpeg():
    quality = torch.tensor([1.0, 5, 10, 30, 49, 50, 75, 95])
    expected = torch.tensor([50, 10, 5, 5 / 3, 50 / 49, 1, 0.5, 0.1])
    assert torch.allclose(table_factor(quality), expected)


def test_the_slip_below_quality_50():
    released = table_factor(torch.tensor([10.0, 30, 49, 50, 75]), released_code=True)
    assert torch.allclose(released, torch.tensor([-8, -4 / 3, -2 / 49, 1, 0.5]))
    x, quality = tensor(photo(32, 32)), torch.tensor([49.0])
    error = [(JPEG(released_code=slip)(x, quality) - x).abs().mean() for slip in (False, True)]
    assert error[1] < error[0] / 2


def coded(plane, table):
    """A plane [16, 32] from its blocks, one after the other."""
    result = np.empty_like(plane)
    for top in range(0, plane.shape[0], 8):
        for left in range(0, plane.shape[1], 8):
            waves = fft.dctn(plane[top : top + 8, left : left + 8], norm="ortho") / table
            waves = soft_round(torch.from_numpy(waves)).numpy() * table
            result[top : top + 8, left : left + 8] = fft.idctn(waves, norm="ortho")
    return result


def by_hand(image, factor, transposed):
    """JPEG of one image [3, H, W] in numpy, with the constants of the JFIF standard."""
    red, green, blue = 255 * image
    y = 0.299 * red + 0.587 * green + 0.114 * blue
    cb = -0.168736 * red - 0.331264 * green + 0.5 * blue
    cr = 0.5 * red - 0.418688 * green - 0.081312 * blue
    tables = [factor * np.array(t, float) for t in (LUMA, CHROMA)]
    luma, chroma = [t.T for t in tables] if transposed else tables
    y = coded(y - 128, luma) + 128
    height, width = y.shape
    halves = [c.reshape(height // 2, 2, width // 2, 2).mean((1, 3)) for c in (cb, cr)]
    cb, cr = (coded(c, chroma).repeat(2, 0).repeat(2, 1) for c in halves)
    rgb = [y + 1.402 * cr, y - 0.344136 * cb - 0.714136 * cr, y + 1.772 * cb]
    return (np.stack(rgb) / 255).clip(0, 1)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("quality", [10, 49, 75])
def test_jpeg_by_hand(quality, transposed):
    x = tensor(photo(16, 32))
    y = JPEG(transposed=transposed)(x, torch.tensor([float(quality)]))
    expected = by_hand(x[0].numpy(), float(table_factor(torch.tensor(1.0 * quality))), transposed)
    assert np.allclose(y[0].numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(("height", "width"), [(128, 160), (100, 147)])
def test_close_to_a_jpeg_file(height, width):
    """Off by a level or two of 255; hard rounding and Pillow's smoother chroma are the rest."""
    pixels = photo(height, width)
    for quality in (30, 75, 90):
        file = pillow(pixels, quality)
        lost = (tensor(pixels) - file).abs().mean()
        q = torch.tensor([float(quality)])
        error = (JPEG(transposed=False)(tensor(pixels), q) - file).abs().mean()
        assert error < 0.01
        assert error < 0.6 * lost
        assert error < (JPEG()(tensor(pixels), q) - file).abs().mean() < 0.02


def test_grey_images_are_luma():
    grey = X.mean(1, keepdim=True)
    quality = torch.tensor([20.0, 60, 80])
    color = JPEG()(grey.expand_as(X), quality)
    assert torch.allclose(JPEG()(grey, quality).expand_as(X), color, atol=1e-4)
    with pytest.raises(ValueError, match="JPEG takes images of 1 or 3 channels"):
        JPEG()(X[:, :2], quality)


def test_any_size_is_padded_by_its_edge():
    x = X[..., :11, :21]
    rows, columns = torch.arange(16).clamp(max=10), torch.arange(32).clamp(max=20)
    padded = x[:, :, rows][..., columns]
    quality = torch.tensor([20.0, 60, 80])
    assert torch.allclose(JPEG()(x, quality), JPEG()(padded, quality)[..., :11, :21])


# precision
def test_levels():
    x = torch.linspace(0, 1, 9).view(1, 1, 3, 3)
    y = ColorPrecision()(x, torch.tensor([[4.0]]))
    eighth = (1 / 2) ** 3 / 4
    up, down = [0, 0.5, 1], [0.25, 0.75]
    expected = [0, eighth, 0.25, 0.5 - eighth, 0.5, 0.5 + eighth, 0.75, 1 - eighth, 1]
    assert y.flatten().tolist() == pytest.approx(expected)
    assert set(up + down) < set(expected)


@pytest.mark.parametrize(
    ("alpha", "fewest"), [(0.0, 16), (0.05, 16), (0.1, 15), (0.5, 9), (0.99, 1), (1.0, 1)]
)
def test_how_many_levels(alpha, fewest):
    (steps,) = ColorPrecision(alpha).sample(torch.zeros(2000, 3, 1, 1))
    assert set(steps.unique().tolist()) == set(range(fewest, 17))


# FFT
@pytest.mark.parametrize("width", [32, 31])
def test_no_frequency_dropped(width):
    x = X[..., :width]
    kept = torch.ones(3, 3, 16, width // 2 + 1).double()
    assert torch.allclose(FFT()(x, torch.ones(3).double(), kept), x)
    half = FFT()(x, torch.tensor([0.5, 0.25, 1]).double(), kept)
    assert torch.allclose(half, x * torch.tensor([0.5, 0.25, 1]).double().view(3, 1, 1, 1))


def test_share_of_dropped_frequencies():
    _, kept = FFT(0.6).sample(torch.zeros(1500, 3, 24, 24), generator())
    dropped = 1 - kept[:, 0].flatten(1).mean(1)
    assert abs(dropped.mean() - 0.3) < 0.02
    assert abs(dropped.std() - 0.6 / 12**0.5) < 0.02
    grey = (kept == kept[:, :1]).flatten(1).all(1).double().mean()
    assert 0.45 < grey < 0.56
