"""Color spaces against the standard library, scikit-image and closed forms."""

import colorsys
import math

import pytest
import torch
from skimage import color

from lightning_rob.transforms import (
    HSV,
    LAB,
    XYZ,
    YUV,
    Gray,
    GrayMix,
    GrayOneChannel,
    GrayTwoChannels,
)
from lightning_rob.transforms.base import soft_modulo
from lightning_rob.transforms.color import hsv_to_rgb, rgb_to_hsv
from tests.transforms.inputs import assert_same, generator

X = torch.rand(4, 3, 9, 10, generator=generator(), dtype=torch.float64)
NONE = torch.zeros(4, 3, dtype=torch.float64)


def scikit(convert, x):
    return torch.from_numpy(convert(x.permute(0, 2, 3, 1).numpy())).permute(0, 3, 1, 2)


def test_hsv_is_that_of_the_standard_library():
    """Saturation and value exactly, the hue after the soft modulo of eq. 15."""
    hsv = rgb_to_hsv(X).permute(0, 2, 3, 1).reshape(-1, 3)
    for (hue, saturation, value), rgb in zip(
        hsv.tolist(), X.permute(0, 2, 3, 1).reshape(-1, 3).tolist(), strict=True
    ):
        h, s, v = colorsys.rgb_to_hsv(*rgb)
        smooth = 2 * math.pi * float(soft_modulo(torch.tensor(h, dtype=torch.float64)))
        assert (hue, saturation, value) == pytest.approx((smooth, s, v), abs=1e-9)


def plain_rgb_to_hsv(x):
    """The definition, whose gradient is autograd's: of equal channels the first is the largest."""
    value, largest = x.max(1)
    spread = value - x.amin(1)
    red, green, blue = x.unbind(1)
    difference = torch.stack([green - blue, blue - red, red - green], 1)
    difference = difference.gather(1, largest[:, None])[:, 0]
    sextant = difference / torch.where(spread == 0, 1, spread) + 2 * largest
    hue = 2 * math.pi * soft_modulo(sextant / 6)
    saturation = spread / value.clamp_min(1e-9)
    level = saturation.detach() + 255 * (spread - spread.detach())  # the slope below one level
    return torch.stack([hue, torch.where(value < 1 / 255, level, saturation), value], 1)


def plain_hsv_to_rgb(x):
    """The definition: in each sector of the hue, a channel is value, falling, low or rising."""
    hue, saturation, value = x.unbind(1)
    turns = hue / (2 * math.pi)
    sector = (6 * turns.detach()).floor() % 6
    position = 6 * soft_modulo(turns) - sector
    falling, rising = value * (1 - position * saturation), value * (1 - (1 - position) * saturation)
    planes = torch.stack([value, falling, value * (1 - saturation), rising], 1)
    sectors = torch.tensor([[0, 1, 2, 2, 3, 0], [3, 0, 0, 1, 2, 2], [2, 2, 3, 0, 0, 1]])
    return planes.gather(1, sectors[:, sector.long()].transpose(0, 1))


@pytest.mark.parametrize("levels", [1, 2, 255, None])
def test_gradients_of_hsv_are_those_of_the_definition(levels):
    """Also where channels are equal, black or white."""
    x = X if levels is None else (levels * X).round() / levels
    assert_same(rgb_to_hsv, plain_rgb_to_hsv, x)
    turned = rgb_to_hsv(x) + torch.tensor([7.0, 0.1, -0.1]).view(3, 1, 1)
    assert_same(hsv_to_rgb, plain_hsv_to_rgb, turned)


def test_hsv_shifts_of_grey():
    """A grey pixel has neither hue nor saturation: only its value shifts."""
    x = torch.rand(2, 1, 5, 5, generator=generator(1)).expand(-1, 3, -1, -1)
    y = HSV()(x, torch.tensor([[0.1, -0.2, 0.1], [0.05, -0.5, -0.2]]))
    expected = x + torch.tensor([0.1, -0.2]).view(2, 1, 1, 1)
    assert torch.allclose(y, expected.clamp(0, 1), atol=1e-6)


def test_released_code_loses_hues_and_negative_chroma():
    blue = torch.tensor([0.1, 0.2, 0.9]).view(1, 3, 1, 1)
    none = torch.zeros(1, 3)
    assert HSV()(blue, none).argmax(1) == 2
    assert HSV(released_code=True)(blue, none)[:, 2] < 0.2
    green = torch.tensor([0.1, 0.8, 0.2]).view(1, 3, 1, 1)
    for kind in (LAB, YUV):
        assert torch.allclose(kind()(green, none), green, atol=2e-3)
        assert (kind(released_code=True)(green, none) - green).abs().max() > 0.3


def test_lightness_stays_in_range():
    white = LAB()(X, torch.tensor([[200.0, 0, 0]] * 4).double())
    only_chroma = scikit(color.rgb2lab, X)
    only_chroma[:, 0] = 100
    assert torch.allclose(white, scikit(color.lab2rgb, only_chroma).clamp(0, 1), atol=2e-3)


def test_xyz_shift_is_linear():
    shift = torch.tensor([[0.05, -0.03, 0.02]] * 4).double()
    x = 0.3 + 0.3 * X
    inverse = torch.tensor(color.colorconv.rgb_from_xyz)
    expected = x + torch.einsum("ij,bj->bi", inverse, shift)[:, :, None, None]
    assert torch.allclose(XYZ()(x, shift), expected.clamp(0, 1), atol=1e-4)


def test_xyz_dims_white():
    """Z of white is 1.0888, clamped to 1: the rest of the blue's coefficient is lost."""
    white = torch.ones(1, 3, 1, 1, dtype=torch.float64)
    z = 0.019334 + 0.119193 + 0.950227
    assert float(XYZ()(white, NONE[:1])[0, 2]) == pytest.approx(1 - 1.05731 * (z - 1), abs=1e-4)


SHARES = torch.tensor([[0.2, 0.3, 0.5]] * 4).double()
GREY = 0.2 * X[:, :1] + 0.3 * X[:, 1:2] + 0.5 * X[:, 2:]


def test_greys():
    assert torch.allclose(Gray()(X, SHARES), GREY.expand_as(X))
    weight = torch.tensor([[0.0, 0.5, 1.0]] * 4).double()
    expected = torch.cat([X[:, :1], (X[:, 1:2] + GREY) / 2, GREY], 1)
    assert torch.allclose(GrayMix()(X, SHARES, weight), expected)
    chosen = torch.tensor([0, 1, 2, 0])
    two, one = GrayTwoChannels()(X, SHARES, chosen), GrayOneChannel()(X, SHARES, chosen)
    for i, k in enumerate(chosen.tolist()):
        for c in range(3):
            grey, own = GREY[i, 0], X[i, c]
            assert torch.allclose(two[i, c], own if c == k else grey)
            assert torch.allclose(one[i, c], grey if c == k else own)


@pytest.mark.parametrize(
    ("kind", "zeros"), [(Gray(), 0), (GrayOneChannel(), 1), (GrayOneChannel(mixed=3), 0)]
)
def test_shares_sum_to_one(kind, zeros):
    shares = kind.sample(torch.zeros(500, 3, 1, 1), generator())[0]
    assert torch.allclose(shares.sum(1), torch.ones(500))
    assert ((shares == 0).sum(1) == zeros).all()
    assert ((shares > 0).double().mean(0) > (3 - zeros) / 3 - 0.1).all()


def test_lab_shift_is_one_of_scikit_image():
    shift = torch.tensor([[5.0, -3.0, 4.0]] * 4).double()
    x = 0.3 + 0.4 * X
    expected = scikit(color.lab2rgb, scikit(color.rgb2lab, x) + shift[:, :, None, None])
    assert torch.allclose(LAB()(x, shift), expected, atol=2e-3)


def test_yuv_shift_of_luma():
    x = 0.3 + 0.4 * X
    shift = torch.tensor([[0.1, 0, 0]] * 4).double()
    assert torch.allclose(YUV()(x, shift), x + 0.1, atol=2e-3)
