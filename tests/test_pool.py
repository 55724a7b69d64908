"""What holds for all 72 transformations; each kind's own truths are in test_pool_kinds.py."""

import dataclasses
import random
from itertools import pairwise

import numpy as np
import pytest
import torch

from lightning_rob.randomness import Streams
from lightning_rob.transforms.pool import GROUPS, IRREVERSIBLE, REVERSIBLE, chosen, pool
from lightning_rob.transforms.pool.place import Identity, Rotate, Shift

POOL = pool()
ALL = pytest.mark.parametrize("name", POOL)


def mode(one):
    """The class and the arguments that are no numbers: what takes another way through the code."""
    values = (getattr(one, field.name) for field in dataclasses.fields(one))
    return type(one), *(value for value in values if isinstance(value, str | bool))


MODES = list({mode(one): name for name, one in reversed(POOL.items())}.values())
EVERY_MODE = pytest.mark.parametrize("name", MODES)
SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 11, 15)]
UNDONE = pytest.mark.parametrize("name", ["clean", *REVERSIBLE])
SLOPED = pytest.mark.parametrize("name", [n for n, one in POOL.items() if one.differentiable])
FLAT = pytest.mark.parametrize("name", [n for n, one in POOL.items() if not one.differentiable])
RANDOM = {
    "quantize_4_colors",
    "quantize_8_colors",
    "noise_gaussian",
    "noise_localvar",
    "noise_poisson",
    "noise_salt",
    "noise_pepper",
    "noise_salt_pepper",
    "noise_speckle",
}


def images(count=3, channels=1, height=12, width=12, dtype=torch.float32, seed=0):
    """Smooth enough that most denoisers and edges have something to do."""
    chance = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, 5, 5, generator=chance, dtype=torch.float64)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic")
    noise = 0.1 * torch.rand(smooth.shape, generator=chance, dtype=torch.float64)
    return (0.8 * smooth + noise).clamp(0, 1).to(dtype)


def streams(*indices, seed=5):
    return Streams.from_index(torch.tensor(indices), seed)


def transformed(name, x, generator=None):
    transform = chosen(name)[name]
    return transform(x, *transform.sample(x, generator or streams(*range(len(x)))))


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


def test_modes():
    assert len(set(map(type, POOL.values()))) <= len(MODES) < 45


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in POOL for shape in SHAPES if name in MODES or shape == (1, 28, 28)],
)
def test_shape_type_and_range(name, shape):
    if name in ("rotate_90", "rotate_270") and shape[1] != shape[2]:
        with pytest.raises(ValueError, match=r"a quarter turn needs square images, got \[2, 3, 11"):
            transformed(name, images(2, *shape))
        return
    for dtype in (torch.float32, torch.float64):
        y = transformed(name, images(2, *shape, dtype=dtype))
        assert (y.shape, y.dtype) == ((2, *shape), dtype)
        assert y.min() >= 0
        assert y.max() <= 1
        assert y.std() > 0.01


@EVERY_MODE
@pytest.mark.parametrize("channels", [1, 3])
def test_flat_images_do_no_harm(name, channels):
    for value in (0.0, 0.3, 1.0):
        y = transformed(name, torch.full((2, channels, 8, 8), value))
        assert y.isfinite().all()
        if name in ("denoise_wavelet", "denoise_nl_means", "denoise_nl_means_fast"):
            assert torch.allclose(y, torch.full_like(y, value))


@ALL
def test_chance_is_given(name):
    """Deterministic, or a function of what `sample` draws for each image."""
    transform, x = POOL[name], images(1).expand(4, -1, -1, -1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    params = transform.sample(x, streams(0, 1, 2, 3))
    y = transform(x, *params)
    assert (params != ()) == (name in RANDOM)
    assert all(len(param) == 4 and param.dtype in (x.dtype, torch.int64) for param in params)
    assert torch.equal(transform(x, *params), y)
    assert torch.equal(transformed(name, x, streams(0, 1, 2, 3)), y)
    others = [y[1], transformed(name, x, streams(0, 1, 2, 3, seed=6))[0]]
    others += [transformed(name, x, torch.Generator().manual_seed(2))[0]]
    # k-means may end at the same means from several starts
    assert any(not torch.equal(y[0], other) for other in others) == (params != ())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@EVERY_MODE
@pytest.mark.parametrize("channels", [1, 3])
def test_an_image_alone_is_the_image_in_a_batch(name, channels):
    x = images(5, channels)
    y = transformed(name, x, streams(10, 11, 12, 13, 14))
    for i in range(5):
        alone = transformed(name, x[i : i + 1], streams(10 + i))
        assert torch.allclose(alone, y[i : i + 1], rtol=0, atol=1e-6)


@ALL
def test_no_images_at_all(name):
    assert transformed(name, images()[:0]).shape == (0, 1, 12, 12)


@FLAT
def test_a_gradient_is_refused(name):
    x = images().requires_grad_()
    with pytest.raises(RuntimeError, match=f"{type(POOL[name]).__name__} has no gradient"):
        transformed(name, x)
    with torch.no_grad():
        assert torch.equal(transformed(name, x), transformed(name, x.detach()))


def test_which_have_no_gradient():
    kinds = {type(POOL[name]).__name__ for name in POOL if not POOL[name].differentiable}
    assert kinds == {
        *("Borders", "Cartoon", "CompressPNG", "DenoiseMeans", "DenoiseVariation"),
        *("DenoiseWavelet", "Entropy", "Projections", "Quantise"),
    }
    assert sum(one.differentiable for one in POOL.values()) == 50


@SLOPED
@pytest.mark.parametrize("channels", [1, 3])
def test_there_is_a_gradient(name, channels):
    x = images(channels=channels).requires_grad_()
    weights = images(channels=channels, seed=1)
    (gradient,) = torch.autograd.grad((transformed(name, x) * weights).sum(), x)
    assert gradient.isfinite().all()
    assert (gradient != 0).float().mean() > 0.1
    for value in (0.0, 0.5, 1.0):
        flat = torch.full_like(x, value, requires_grad=True)
        (gradient,) = torch.autograd.grad(transformed(name, flat).sum(), flat)
        assert gradient.isfinite().all()


@SLOPED
def test_the_gradient_is_that_of_finite_differences(name):
    if name.startswith("augment"):
        pytest.skip("passes straight through the clip")
    x = (0.2 + 0.6 * images(1, 1, 8, 8, torch.float64, seed=4)).requires_grad_()
    transform = POOL[name]
    params = transform.sample(x.detach(), streams(8))
    assert torch.autograd.gradcheck(lambda x: transform(x, *params), x)


@UNDONE
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 9, 14)])
def test_undone_exactly(name, shape):
    transform, x = chosen(name)[name], images(2, *shape)
    if isinstance(transform, Rotate) and transform.quarters != 2:
        x = images(2, shape[0], shape[1], shape[1])
    kept = transform.kept(x) if isinstance(transform, Shift) else torch.tensor(True)
    y = transform.undo(transform(x))
    assert transform.reversible
    assert torch.equal(y, torch.where(kept, x, 0))
    perturbation = images(2, *shape[:1], *x.shape[2:]) - 0.5
    assert torch.equal(
        transform.undo(transform.apply(perturbation)), torch.where(kept, perturbation, 0)
    )


@pytest.mark.parametrize("name", IRREVERSIBLE)
def test_the_others_cannot_be_undone(name):
    assert not POOL[name].reversible
    with pytest.raises(TypeError, match=f"{type(POOL[name]).__name__} cannot be undone"):
        POOL[name].undo(images())


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        POOL["rotate_90"].quarters = 2
    assert POOL["noise_salt"] == pool()["noise_salt"]


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
        ("sobel", "did you mean .*filter_sobel"),
        ("15r", "there are 14 reversible ones to draw from, got 15"),
        ("14r+59i", "there are 58 irreversible ones to draw from, got 59"),
        ("28i+14r", "no transformation '28i\\+14r'"),
        ("14x", "no transformation '14x'"),
        ("", "no transformation ''"),
        (["rotate_90", "+"], "no transformation '\\+'"),
        ("14r+", "no transformation '14r\\+'"),
        ([], "no transformations asked for"),
    ],
)
def test_what_is_not_there(names, message):
    with pytest.raises(ValueError, match=message):
        chosen(names)


@pytest.mark.parametrize("name", ["augment_samplewise_std_norm", "augment_featurewise_std_norm"])
def test_an_attack_sees_the_pixels_that_normalisation_makes_black(name):
    x = (images(2, 1, 28, 28, seed=5) ** 4).requires_grad_()
    seen = transformed(name, x)
    weights = torch.rand(seen.shape, generator=torch.Generator().manual_seed(0))
    (gradient,) = torch.autograd.grad((weights * seen).sum(), x)
    assert (seen == 0).float().mean() > 0.1
    assert (gradient != 0).all()


def test_mixed_precision_around_it_changes_nothing():
    x = images(2, 1, 28, 28, seed=6)
    for name in ("affine_both_compress", "compress_jpeg_quality_80", "filter_gaussian"):
        with torch.autocast("cpu", torch.bfloat16):
            mixed = transformed(name, x)
        assert torch.equal(mixed, transformed(name, x))
