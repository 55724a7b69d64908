"""Geometric transforms against torchvision, scikit-image and closed forms."""

import math

import pytest
import torch
from skimage.transform import swirl
from torch.nn.functional import interpolate
from torchvision.transforms import RandomResizedCrop

from lightning_rob.transforms import Affine, Crop, HorizontalFlip, Swirl, VerticalFlip
from lightning_rob.transforms.geometric import _largest_box
from tests.transforms.inputs import generator

X = torch.rand(4, 3, 16, 20, generator=generator(), dtype=torch.float64)


def matrices(*rows):
    return torch.tensor(rows, dtype=torch.float64).view(-1, 2, 3)


def test_flips():
    columns, rows = torch.arange(19, -1, -1), torch.arange(15, -1, -1)
    assert torch.equal(HorizontalFlip()(X), X[..., columns])
    assert torch.equal(VerticalFlip()(X), X[..., rows, :])


def test_affine_by_hand():
    """The identity, a mirror, a shift by half the width and a zoom by two."""
    theta = matrices(
        [1, 0, 0, 0, 1, 0], [-1, 0, 0, 0, 1, 0], [1, 0, 1, 0, 1, 0], [2, 0, 0, 0, 2, 0]
    )
    y = Affine()(X, theta)
    assert torch.allclose(y[0], X[0])
    assert torch.allclose(y[1], X[1].flip(2))
    assert torch.allclose(y[2, ..., :10], X[2, ..., 10:])
    assert (y[2, ..., 10:] == 0).all()
    assert (y[3, :, :4] == 0).all()
    small = X[3].unflatten(1, (8, 2)).unflatten(3, (10, 2)).mean((2, 4))
    assert torch.allclose(y[3, :, 4:12, 5:15], small)


def test_affine_matrices_are_around_the_identity():
    (theta,) = Affine(0.3).sample(X[:1].expand(3000, -1, -1, -1), generator())
    off = theta - torch.eye(2, 3)
    assert off.abs().max() <= 0.3
    assert torch.allclose(off.std(0), torch.full((2, 3), 0.3 / math.sqrt(3)).double(), atol=0.008)


def test_crop_is_cut_and_resized():
    box = torch.tensor([[2, 3, 9, 11], [0, 0, 16, 20], [10, 5, 1, 4], [7, 13, 9, 7]])
    y = Crop()(X, box)
    for i, (top, left, height, width) in enumerate(box.tolist()):
        cut = X[i : i + 1, :, top : top + height, left : left + width]
        expected = interpolate(cut, (16, 20), mode="bilinear", align_corners=False)
        assert torch.allclose(y[i : i + 1], expected, atol=1e-9)


@pytest.mark.parametrize(
    ("height", "width", "alpha"), [(32, 32, 0.05), (16, 40, 0.4), (40, 16, 0.4), (32, 32, 1.0)]
)
def test_boxes_of_a_crop_are_those_of_torchvision(height, width, alpha):
    """In mean and spread of place and size."""
    x = torch.zeros(3000, 1, height, width)
    (box,) = Crop(alpha).sample(x, generator())
    scale, ratio = (max(1 - alpha, 1e-9), 1 + alpha), (3 / 4, 4 / 3)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        theirs = [RandomResizedCrop.get_params(x[0], scale, ratio) for _ in range(3000)]
    expected = torch.tensor(theirs, dtype=torch.float64)
    box = box.double()
    assert (box[:, 0] + box[:, 2]).max() <= height
    assert (box[:, 1] + box[:, 3]).max() <= width
    assert box.min() >= 0
    spread = expected.std(0) / math.sqrt(1500)
    assert ((box.mean(0) - expected.mean(0)).abs() <= 4.5 * spread + 1e-9).all()
    assert torch.allclose(box.std(0), expected.std(0), rtol=0.12, atol=0.1)


@pytest.mark.parametrize(
    ("image", "box"), [((16, 40), (16, 21)), ((40, 16), (21, 16)), ((30, 31), (30, 31))]
)
def test_largest_box_if_no_draw_fits(image, box):
    assert _largest_box(*image) == box


def swirled(x, center, radius, strength):
    """scikit-image's swirl of each plane."""
    return torch.stack(
        [
            torch.from_numpy(
                swirl(plane.numpy(), center, strength, radius, order=1, mode="constant")
            )
            for plane in x
        ]
    )


def test_swirl_is_that_of_scikit_image():
    center = torch.tensor([[9.0, 8], [3, 12], [0, 0], [19, 15]]).double()
    radius = torch.tensor([20.0, 9, 15, 30]).double()
    strength = torch.tensor([3.0, 1, -2, 0.5]).double()
    y = Swirl()(X, center, radius, strength)
    for i in range(4):
        expected = swirled(X[i], tuple(center[i].tolist()), float(radius[i]), float(strength[i]))
        assert torch.allclose(y[i][:, 2:-2, 2:-2], expected[:, 2:-2, 2:-2], atol=1e-9)
