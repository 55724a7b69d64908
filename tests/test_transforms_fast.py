"""Transforms that were made fast give what their plain forms give, and so do their gradients."""

import pytest
import torch
from kornia.filters import sobel as kornia_sobel

from lightning_rob.randomness import Streams
from lightning_rob.transforms import ColorJitter, MedianBlur
from lightning_rob.transforms.base import EPS, ROUNDING, clip, raised
from lightning_rob.transforms.edge import sobel
from lightning_rob.transforms.hsv import hsv_to_rgb, rgb_to_hsv, scale_saturation, shift_hue
from lightning_rob.transforms.noise import few_counts, poisson_quantile


def images(count=12, size=9, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, size, size, generator=chance, dtype=torch.float64)


def slope(function, x):
    """The gradient of a sum in which each pixel weighs otherwise."""
    z = x.clone().requires_grad_()
    y = function(z)
    weights = torch.rand(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return torch.autograd.grad((y * weights).sum(), z)[0]


def same(fast, plain, x):
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(slope(fast, x), slope(plain, x), rtol=1e-7, atol=1e-9)


def test_sobel():
    same(sobel, lambda x: kornia_sobel(x, normalized=True, eps=1e-6), images())


def test_median():
    def plain(x):
        padded = torch.nn.functional.pad(x, [1] * 4)
        return padded.unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2).median(-1).values

    same(MedianBlur().apply, plain, images() + 0.1)  # no ties with the border


def test_median_of_equals():
    """Of equal pixels one has the gradient, whichever."""
    x = images().mul(4).round() / 4
    squares = torch.nn.functional.pad(x, [1] * 4).unfold(2, 3, 1).unfold(3, 3, 1)
    assert torch.equal(MedianBlur().apply(x), squares.flatten(-2).median(-1).values)
    z = x.clone().requires_grad_()
    inner = MedianBlur().apply(z)[..., 1:-1, 1:-1]
    assert float(torch.autograd.grad(inner.sum(), z)[0].sum()) == pytest.approx(inner.numel())


def test_median_keeps_what_is_no_number():
    x = images()
    x[3, 1, 4, 4] = torch.nan
    assert MedianBlur().apply(x)[3].isnan().any()
    assert not MedianBlur().apply(x)[:3].isnan().any()


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.2, 0.7)])
def test_clip(bounds):
    low, high = bounds

    def plain(x):
        slack = ROUNDING * torch.finfo(x.dtype).eps * high
        inside = (x.double() > low - slack) & (x.double() < high + slack)
        bounded = x.detach().clamp(low, high)
        return torch.where(inside, x + (bounded - x).detach(), bounded)

    x = 3 * images() - 1
    step = torch.finfo(x.dtype).eps
    x[0, 0, 0, :4] = torch.tensor([low, high, low - step * high, high + step * high])
    for z in (x, x.float(), x.half()):
        fast, slow = slope(lambda v: clip(v, low, high), z), slope(plain, z)
        assert torch.equal(clip(z, low, high), plain(z))
        assert torch.equal(fast, slow)
    assert (slope(lambda z: clip(z, low, high), x)[0, 0, 0, :4] > 0).all()


@pytest.mark.parametrize("most", [0.5, 1.0, 2.0, 4.0])
def test_few_counts(most):
    chance = torch.Generator().manual_seed(0)
    u, rate = torch.rand(2, 200_000, generator=chance, dtype=torch.float64)
    u[:4] = torch.tensor([0.0, 1.0, 2.0**-24, 1 - 2.0**-24])
    rate = most * rate
    rate[:8:2], rate[1:9:2] = most, 0.0
    assert torch.equal(few_counts(u, rate, most), poisson_quantile(u, rate))


def test_color_jitter():
    """In one way there and back, as step by step."""
    steps = (
        lambda x, shift: x + shift.view(-1, 1, 1, 1),
        lambda x, factor: x * factor.view(-1, 1, 1, 1),
        lambda x, factor: hsv_to_rgb(_scaled(rgb_to_hsv(x), factor)),
        shift_hue,
    )

    def _scaled(hsv, factor):
        saturation = clip(hsv[:, 1:2] * factor.view(-1, 1, 1, 1), 0, 1)
        return torch.cat([hsv[:, :1], saturation, hsv[:, 2:]], 1)

    x, transform = images(40), ColorJitter(0.4)
    amount, order = transform.sample(x, Streams.from_index(torch.arange(40), 2))

    def plain(x):
        done = []
        for image, own, turns in zip(raised(x, EPS), amount, order.tolist(), strict=True):
            z = image[None]
            for kind in turns:
                z = raised(clip(steps[kind](z, own[kind : kind + 1]), 0, 1), EPS)
            done.append(z)
        return torch.cat(done)

    same(lambda x: transform.apply(x, amount, order), plain, x)
    torch.testing.assert_close(scale_saturation(x, amount[:, 2]), steps[2](x, amount[:, 2]))


def test_few_counts_in_single_precision():
    """Up to the largest number below one, as in double precision."""
    u = 1 - 2.0 ** -torch.arange(1.0, 25.0)
    rate = torch.full_like(u, 4.0)
    assert torch.equal(
        few_counts(u, rate, 4.0).double(), few_counts(u.double(), rate.double(), 4.0)
    )
    assert float(few_counts(u, rate, 4.0)[-1]) < 20
