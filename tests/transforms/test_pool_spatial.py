"""The pool's transformations of place against scikit-image, numpy and closed forms."""

import math

import numpy as np
import pytest
import torch
from skimage import transform

from lightning_rob.transforms.pool import pool
from lightning_rob.transforms.pool.spatial import Rotate, Shift
from tests.transforms.inputs import X, close, digits, planes

POOL = pool()
DIGITS = digits()


TURNED = {"rotate_90": [1, 3, 0, 2], "rotate_180": [3, 2, 1, 0], "rotate_270": [2, 0, 3, 1]}
TURNED |= {
    "flip_horizontal": [1, 0, 3, 2],
    "flip_vertical": [2, 3, 0, 1],
    "flip_both": [3, 2, 1, 0],
}


def test_flips_and_rotations_which_are_anticlockwise():
    x = torch.arange(4.0).view(1, 1, 2, 2) / 4
    for name, places in TURNED.items():
        assert (4 * POOL[name](x)).flatten().tolist() == places
    with pytest.raises(ValueError, match=r"quarters must be of \(1, 2, 3\), got 4"):
        Rotate(4)
    with pytest.raises(ValueError, match=r"a quarter turn needs square images, got \[1, 1, 2, 1\]"):
        Rotate(1)(x[..., :1])


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
    with pytest.raises(ValueError, match=r"rows must be in \[-1, 1\], got 4"):
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


def test_swirl_is_that_of_scikit_image():
    for x in (DIGITS, X, torch.rand(1, 1, 8, 8)):
        expected = planes(lambda p: transform.swirl(p, strength=3, radius=65), x)
        assert close(POOL["geometric_swirl"](x), expected)


def test_projections_are_those_of_scikit_image():
    """At the angles of both; and an image is the same picture afterwards, in a grey frame."""
    inside = np.hypot(*(np.mgrid[:28, :28] - 14)) <= 14
    for name, first, last, invert in (
        ("geometric_iradon", -100, 128, transform.iradon),
        ("geometric_iradon_sart", -150, 150, transform.iradon_sart),
    ):
        angles = np.linspace(first, last, 28, endpoint=False)
        y = POOL[name](DIGITS[:4])
        expected = planes(
            lambda p, a=angles, invert=invert: invert(transform.radon((2 * p - 1) * inside, a), a),
            DIGITS[:4],
        )
        assert close(y, (expected / 2 + 0.5).clamp(0, 1))
        kept = torch.stack([DIGITS[:4].flatten(), y.flatten()])[
            :, torch.tensor(inside).repeat(4, 1, 1, 1).flatten()
        ]
        assert torch.corrcoef(kept)[0, 1] > 0.8
