"""Edges against scipy and kornia."""

import numpy as np
import pytest
import torch
from kornia.filters import sobel as kornia_sobel
from scipy import ndimage

from lightning_rob.transforms import Laplacian, Sobel
from lightning_rob.transforms.edge import sobel
from tests.transforms.inputs import X, assert_same


def stretched(z):
    """The formula of the paper's code, for all channels together."""
    return (z - z.min() + 0.5e-6) / (z.max() - z.min() + 1e-6)


@pytest.mark.parametrize("size", [3, 5])
def test_laplacian_by_hand(size):
    kernel = np.ones((size, size))
    kernel[size // 2, size // 2] = 1 - size**2
    kernel /= np.abs(kernel).sum()
    y = Laplacian(size)(X)
    for image, result in zip(X.numpy(), y.numpy(), strict=True):
        z = np.stack([ndimage.correlate(plane, kernel, mode="mirror") for plane in image])
        assert np.allclose(result, stretched(z), atol=1e-9)


def test_sobel_by_hand():
    for image, result in zip(X.numpy(), Sobel()(X).numpy(), strict=True):
        down, across = (
            np.stack([ndimage.sobel(plane, axis, mode="nearest") / 8 for plane in image])
            for axis in (0, 1)
        )
        assert np.allclose(result, stretched(np.sqrt(down**2 + across**2 + 1e-6)), atol=1e-9)


@pytest.mark.parametrize("kind", [Laplacian, Sobel])
def test_each_image_fills_the_range(kind):
    y = kind()(X)
    assert torch.allclose(y.amin((1, 2, 3)), torch.zeros(2).double(), atol=1e-4)
    assert torch.allclose(y.amax((1, 2, 3)), torch.ones(2).double(), atol=1e-4)
    # an exact power of two, so that nothing is left of a flat image
    assert torch.allclose(kind()(torch.full((1, 3, 6, 6), 0.5)), torch.tensor(0.5), atol=1e-6)


def test_sobel_is_that_of_kornia():
    assert_same(sobel, lambda x: kornia_sobel(x, normalized=True, eps=1e-6), X)
