"""Images, random streams and reference functions that the tests of the transforms share."""

import numpy as np
import torch

from lightning_rob.data.embedded import _digits
from lightning_rob.randomness import Streams
from lightning_rob.transforms.color import jitter_hsv

X = torch.rand(2, 3, 20, 24, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
INNER = (..., slice(5, -5), slice(5, -5))


def digits():
    return _digits()[:, 3].float() / 255


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count=3, channels=3, height=16, width=21, dtype=torch.float32, seed=0):
    """Smooth enough that most denoisers and edges have something to do."""
    draws = generator(seed)
    coarse = torch.rand(count, channels, 5, 5, generator=draws, dtype=torch.float64)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    noise = 0.1 * torch.rand(smooth.shape, generator=draws, dtype=torch.float64)
    return (0.8 * smooth + noise).clamp(0, 1).to(dtype)


def streams(*indices, seed=5):
    return Streams.from_index(torch.tensor(indices), seed)


def planes(function, x=X):
    """A numpy function applied to every plane [H, W]."""
    return torch.from_numpy(np.stack([[function(p) for p in image.numpy()] for image in x]))


def close(y, expected, atol=1e-5):
    return torch.allclose(y.double(), expected.double(), rtol=0, atol=atol)


def gradient_of(function, x):
    """The gradient of a sum in which each pixel has another weight."""
    z = x.clone().requires_grad_()
    y = function(z)
    weights = torch.rand(y.shape, generator=generator(1), dtype=y.dtype)
    return torch.autograd.grad((y * weights).sum(), z)[0]


def assert_same(fast, plain, x):
    """Equal values and equal gradients of two functions."""
    torch.testing.assert_close(fast(x), plain(x), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient_of(fast, x), gradient_of(plain, x), rtol=1e-7, atol=1e-9)


def shift_hue(x, shift):
    return jitter_hsv(x, torch.ones_like(shift), shift, torch.ones_like(shift, dtype=torch.bool))


def scale_saturation(x, factor):
    zero = torch.zeros_like(factor)
    return jitter_hsv(x, factor, zero, zero.bool())
