"""The base class, the clamps with a slope, soft rounding."""

import dataclasses

import pytest
import torch

from lightning_rob.transforms import (
    JPEG,
    ColorPrecision,
    Gamma,
    GrayOneChannel,
    HorizontalFlip,
    Swirl,
    VerticalFlip,
)
from lightning_rob.transforms.base import ROUNDING, Transform, clip, soft_modulo, soft_round
from lightning_rob.transforms.nondifferentiable import (
    AdaptiveHistogram,
    ContrastStretch,
    HardPrecision,
)
from lightning_rob.transforms.pool import pool
from tests.transforms.inputs import generator, images

T = torch.linspace(-3.2, 3.2, 1281, dtype=torch.float64)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gamma(p=1.5), r"p must be in \[0, 1\], got 1.5"),
        (lambda: Gamma((0.1, 0.2)), r"alpha must be in \[0, 1\], got \(0.1, 0.2\)"),
        (lambda: JPEG(quality=50), r"quality must be a range within \[1, 100\], got 50"),
        (lambda: GrayOneChannel(mixed=1), r"mixed must be of \(2, 3\), got 1"),
        (lambda: ColorPrecision(steps=[9, 8]), r"steps must be a range within \[1, 255\]"),
        (lambda: Swirl(radius=(1,)), r"radius must be a range within \[0, inf\], got \(1,\)"),
        (lambda: Swirl(strength=(2, 1)), r"strength must be a range within"),
        (lambda: ContrastStretch(tail=4.0), r"tail must be in \[0, 0.5\], got 4"),
        (lambda: HardPrecision(steps=(0, 0)), r"steps must be a range within \[1, inf\]"),
        (lambda: AdaptiveHistogram(regions=0), r"regions must be in \[1, inf\], got 0"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@dataclasses.dataclass(frozen=True)
class Broken(Transform):
    """NaN, in value and gradient, where the image is above one half somewhere."""

    def apply(self, x, scale):
        return (0.5 - x).sqrt() * scale[:, None, None, None] + 0.25


def test_an_image_with_a_nan_is_returned_unchanged():
    x = torch.tensor([0.25, 0.75, 0.16]).view(3, 1, 1, 1).repeat(1, 1, 2, 2).requires_grad_()
    y = Broken()(x, torch.tensor([1.0, 1.0, 2.0]))
    assert torch.equal(y[1], x[1])
    assert torch.allclose(y[0], torch.tensor(0.75))
    assert torch.allclose(y[2], torch.tensor(2 * 0.34**0.5 + 0.25).clamp(max=1))
    (gradient,) = torch.autograd.grad(y.sum(), x)
    assert torch.allclose(gradient[:2, 0, 0, 0], torch.tensor([-1.0, 1.0]))
    assert (gradient[2] == 0).all()  # clamped


def test_an_argument_must_not_hide_a_name_of_the_class():
    @dataclasses.dataclass(frozen=True)
    class Mine(Broken):
        channels: int = 3

    with pytest.raises(TypeError, match="Mine has an argument 'channels', which every transform"):
        Mine()


@pytest.mark.parametrize("x", [torch.rand(3, 8, 8), torch.zeros(1, 3, 8, 8, dtype=torch.uint8)])
def test_only_batches_of_floating_images(x):
    with pytest.raises(ValueError, match=r"VerticalFlip takes floating \[B, C, H, W\], got"):
        VerticalFlip()(x)


def test_autocast_changes_nothing():
    x = images(2, 1, 28, 28)
    for name in ("affine_both_compress", "compress_jpeg_quality_80", "filter_gaussian"):
        with torch.autocast("cpu", torch.bfloat16):
            mixed = pool()[name](x)
        assert torch.equal(mixed, pool()[name](x))


def test_black_and_white_pixels_have_a_gradient():
    """Also white that is blurred: weights sum to one but for rounding, a little beyond white."""
    x = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(HorizontalFlip()(x).sum(), x)
    assert (gradient == 1).all()
    white = torch.ones(1, 3, 9, 9, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(pool()["filter_gaussian"](white).sum(), white)
    assert (gradient > 0).all()


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.2, 0.7)])
def test_clip(bounds):
    low, high = bounds

    def plain(x):
        slack = ROUNDING * torch.finfo(x.dtype).eps * high
        inside = (x.double() > low - slack) & (x.double() < high + slack)
        bounded = x.detach().clamp(low, high)
        return torch.where(inside, x + (bounded - x).detach(), bounded)

    def slope(function, x):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(function(x).sum(), x)[0]

    x = 3 * torch.rand(1000, generator=generator(), dtype=torch.float64) - 1
    step = torch.finfo(x.dtype).eps
    x[:4] = torch.tensor([low, high, low - step * high, high + step * high])
    for z in (x, x.float(), x.half()):
        assert torch.equal(clip(z, low, high), plain(z))
        assert torch.equal(slope(lambda v: clip(v, low, high), z), slope(plain, z))
    assert (slope(lambda z: clip(z, low, high), x)[:4] > 0).all()


def test_rounding_and_modulo_by_hand():
    """At integers the modulo is 0, as in the authors' code; eq. 15 to the letter has 1."""
    t = torch.tensor([-0.4, 0.5, 1.5, 2.5, 1.25, -7.0], dtype=torch.float64)
    expected = [-0.064, 0.125, 1.875, 2.125, 1.015625, -7.0]
    assert soft_round(t).tolist() == pytest.approx(expected, abs=1e-12)
    t = torch.tensor([0.25, 0.75, -0.25, 1.5, 0.5, -3, 0, 2], dtype=torch.float64)
    expected = [0.234375, 0.765625, 0.765625, 0.625, 0.375, 0, 0, 0]
    assert soft_modulo(t).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("function", [soft_round, soft_modulo])
def test_slopes(function):
    """d/dt = 3 u^2 of rounding and 1 - 3 u^2 of the remainder, u the distance to an integer."""
    t = (T + 1e-3).requires_grad_()
    (slope,) = torch.autograd.grad(function(t).sum(), t)
    u = t.detach() - t.detach().round()
    expected = 3 * u**2 if function is soft_round else 1 - 3 * u**2
    assert torch.allclose(slope, expected, atol=1e-12)
