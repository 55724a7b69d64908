"""The pool of 72: its order, and how some of it are chosen."""

from itertools import pairwise

import pytest

from lightning_rob.transforms.pool import GROUPS, IRREVERSIBLE, REVERSIBLE, chosen, pool
from lightning_rob.transforms.pool.spatial import Identity
from tests.transforms.inputs import images, streams

POOL = pool()


def test_there_are_72_in_the_order_of_the_paper():
    assert (len(POOL), len(REVERSIBLE), len(IRREVERSIBLE)) == (72, 14, 58)
    counts = [len(group) for group in GROUPS.values()]
    assert counts == [3, 8, 3, 6, 5, 2, 8, 2, 2, 7, 10, 7, 5, 3, 1]
    assert tuple(POOL) == REVERSIBLE + IRREVERSIBLE
    numbers = {"rotate_90": 1, "shift_bottom_right": 11, "flip_both": 14, "morph_erosion": 21}
    numbers |= {"cartoon_mean_type1": 28, "noise_gaussian": 40, "filter_rank": 49}
    numbers |= {"compress_jpeg_quality_10": 60, "denoise_wavelet": 66, "seg_gradient": 72}
    assert {name: list(POOL).index(name) + 1 for name in numbers} == numbers
    assert len(set(POOL.values())) == 72  # no two have the same parameters
    assert sum(one.differentiable for one in POOL.values()) == 50


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("group", GROUPS)
def test_every_one_on_the_smallest_images(group, channels):
    x = images(2, channels, 8, 8)
    for transform in GROUPS[group].values():
        y = transform(x, *transform.sample(x, streams(0, 1)))
        assert (y.shape, y.dtype) == (x.shape, x.dtype)
        assert 0 <= y.min() <= y.max() <= 1
        assert y.std() > 0.01


def test_chosen_by_name_and_by_word():
    assert chosen("all") == POOL
    assert tuple(chosen("reversible")) == REVERSIBLE
    assert tuple(chosen("irreversible")) == IRREVERSIBLE
    assert chosen("clean") == {"clean": Identity()}
    assert list(chosen("filter_sobel").items()) == [("filter_sobel", POOL["filter_sobel"])]
    several = ["clean", "noise_salt", "reversible", "flip_both"]
    assert list(chosen(several)) == ["clean", "noise_salt", *REVERSIBLE]


def test_chosen_by_draw():
    for seed in range(5):
        drawn = [set(chosen(f"{m}i", seed)) for m in (0, 14, 28, 42, 56, 58)]
        assert [len(names) for names in drawn] == [0, 14, 28, 42, 56, 58]
        assert all(small < large for small, large in pairwise(drawn))
        both = chosen("14r+28i", seed)
        assert tuple(both)[:14] == REVERSIBLE
        assert set(both) == set(REVERSIBLE) | drawn[2]
        assert list(both) == [name for name in POOL if name in both]
        assert chosen("14r + 28i", seed) == both
        assert set(chosen("3r", seed)) < set(chosen("5r+1i", seed))
    assert chosen("14i", 0) == chosen("14i", 0) != chosen("14i", 1)
    drawn_often = [name for seed in range(200) for name in chosen("1i", seed)]
    assert len(set(drawn_often)) > 50


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("rotate_91", "no transformation 'rotate_91', did you mean rotate_90"),
        ("15r", "there are 14 reversible ones to draw from, got 15"),
        ("14r+59i", "there are 58 irreversible ones to draw from, got 59"),
        ("28i+14r", "no transformation '28i\\+14r'"),
        (["rotate_90", "+"], "no transformation '\\+'"),
        ([], "no transformations asked for"),
    ],
)
def test_unknown_names(names, message):
    with pytest.raises(ValueError, match=message):
        chosen(names)
