"""Properties of every transform: the 33, BaRT's, one or two of each class of the pool, corruptions.

The closed forms and reference formulas of a class are in the file of its module.
"""

import random

import numpy as np
import pytest
import torch

from lightning_rob import transforms
from lightning_rob.transforms import Bilateral, catalogue
from lightning_rob.transforms.corruptions import Brightness, Corruption
from lightning_rob.transforms.nondifferentiable import ALL, AdaptiveHistogram
from lightning_rob.transforms.pool import chosen, pool
from tests.transforms.inputs import generator, images, streams

pytestmark = pytest.mark.usefixtures("package")  # `Corruption` needs it

OF_POOL = [
    *("clean", "rotate_90", "flip_both", "shift_top_right", "affine_both_stretch", "morph_opening"),
    *("morph_gradient", "augment_samplewise_std_norm", "augment_featurewise_std_norm"),
    *("cartoon_mean_type1", "cartoon_gaussian_type3", "quantize_4_colors", "distort_x"),
    *("distort_y", "noise_poisson", "noise_salt_pepper", "filter_sobel", "filter_roberts"),
    *("filter_gaussian", "filter_rank", "filter_entropy", "compress_jpeg_quality_30"),
    *("compress_png_compression_1", "denoise_tv_chambolle", "denoise_tv_bregman"),
    *("denoise_wavelet", "denoise_nl_means", "denoise_nl_means_fast", "geometric_swirl"),
    *("geometric_iradon", "geometric_iradon_sart", "seg_gradient"),
]
CASES = {
    **{name: kind() for name, kind in catalogue().items()},
    "Bilateral": Bilateral(size=(3, 5)),
    **{kind.__name__: kind(**{"regions": 2} if kind is AdaptiveHistogram else {}) for kind in ALL},
    **chosen(OF_POOL),
    "Brightness": Brightness(3),
    "Corruption": Corruption("grainy"),
}
RGB_ONLY = {
    *("HSV", "LAB", "XYZ", "YUV", "Gray", "GrayMix", "GrayTwoChannels", "GrayOneChannel"),
    "ColorJitter",
}
FIXED = {
    *("BoxBlur", "GaussianBlur", "MedianBlur", "Laplacian", "Sobel"),
    *("HorizontalFlip", "VerticalFlip", "Brightness", *OF_POOL),
} - {"quantize_4_colors", "noise_poisson", "noise_salt_pepper"}
EVERY = pytest.mark.parametrize("name", CASES)
SIDES = {"rotate_90": (16, 16), "Corruption": (32, 33), "AdaptiveHistogram": (40, 48)}


def inputs(name, count=3, **options):
    height, width = SIDES.get(name, (16, 21))
    return images(count, height=height, width=width, **options)


def transformed(transform, x):
    return transform(x, *transform.sample(x, streams(*range(len(x)))))


def test_the_list_has_every_class():
    assert {type(one) for one in CASES.values()} >= {*catalogue().values(), *map(type, POOL)}
    assert len({type(one) for one in chosen(OF_POOL).values()}) == 24
    assert [len(group) for group in transforms.GROUPS.values()] == [7, 4, 8, 2, 3, 5, 4]
    others = {"Bilateral", "FromKornia", "Transform"}
    offered = [kind for kind in vars(transforms).values() if isinstance(kind, type)]
    assert set(catalogue()) | others == {
        kind.__name__ for kind in offered if issubclass(kind, transforms.Transform)
    }
    assert all(kind.differentiable for kind in catalogue().values())


POOL = pool().values()


@EVERY
def test_shape_type_and_range(name):
    transform = CASES[name]
    for dtype in (torch.float32, torch.float64):
        x = inputs(name, dtype=dtype)
        y = transformed(transform, x)
        assert (y.shape, y.dtype) == (x.shape, dtype)
        assert y.min() >= 0
        assert y.max() <= 1
    assert transform(x[:0], *transform.sample(x[:0], torch.Generator())).shape == x[:0].shape
    grey = inputs(name, channels=1)
    if name in RGB_ONLY:
        with pytest.raises(ValueError, match=f"{name} takes images of 3 channels"):
            transformed(transform, grey)
    else:
        assert transformed(transform, grey).shape == grey.shape


@EVERY
def test_gradient_or_refusal(name):
    transform, x = CASES[name], inputs(name).requires_grad_()
    flat = [torch.full_like(x, value, requires_grad=True) for value in (0.0, 0.5, 1.0)]
    if transform.differentiable:
        y = transformed(transform, x)
        (gradient,) = torch.autograd.grad((y * inputs(name, seed=1)).sum(), x)
        assert gradient.isfinite().all()
        assert gradient.any()
    else:
        with pytest.raises(RuntimeError, match=r"has no gradient: call it under torch\.no_grad"):
            transformed(transform, x)
        with torch.no_grad():
            assert torch.equal(transformed(transform, x), transformed(transform, x.detach()))
        flat = [image.detach() for image in flat]
    for image in flat:
        y = transformed(transform, image)
        assert y.isfinite().all()
        if transform.differentiable:
            assert torch.autograd.grad(y.sum(), image)[0].isfinite().all()


@EVERY
def test_deterministic_given_a_generator(name):
    """All randomness is in the parameters, of which each image has its own."""
    transform, x = CASES[name], inputs(name, 1).expand(4, -1, -1, -1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    for source in (lambda: generator(3), lambda: streams(0, 1, 2, 3)):
        params, again = transform.sample(x, source()), transform.sample(x, source())
        assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
        y = transform(x, *params)
        assert torch.equal(transform(x, *params), y)
        assert (params == ()) == (name in FIXED)
        assert all(len(param) == 4 and param.dtype in (x.dtype, torch.int64) for param in params)
        assert any(not torch.equal(y[0], other) for other in y[1:]) == (params != ())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1] == before[1]).all()
    assert random.getstate() == before[2]


@EVERY
def test_alone_as_in_a_batch(name):
    transform, x = CASES[name], inputs(name, dtype=torch.float64)
    params = transform.sample(x, streams(10, 11, 12))
    y = transform(x, *params)
    for i in range(3):
        own = [param[i : i + 1] for param in params]
        assert torch.allclose(transform(x[i : i + 1], *own), y[i : i + 1], rtol=0, atol=1e-9)
        alone = transform.sample(x[i : i + 1], streams(10 + i))
        assert all(torch.allclose(a, b) for a, b in zip(alone, own, strict=True))


# strengths whose finite differences do not reach a kink; straight-through gradients differ
WEAK = {name: kind(0.2) for name, kind in catalogue().items() if hasattr(kind, "alpha")}
WEAK["PoissonNoise"] = catalogue()["PoissonNoise"](0.01)
SMOOTH = {
    name: WEAK.get(name, one)
    for name, one in CASES.items()
    if one.differentiable and not name.startswith("augment")
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_is_that_of_finite_differences(name):
    x = 0.2 + 0.6 * torch.rand(1, 3, 6, 6, dtype=torch.float64, generator=generator(4))
    params = SMOOTH[name].sample(x, streams(8))
    x.requires_grad_()
    # In a random direction: all 108 one by one find no more, and take a hundred times as long.
    assert torch.autograd.gradcheck(lambda x: SMOOTH[name](x, *params), x, fast_mode=True)


@pytest.mark.parametrize("name", [name for name, one in CASES.items() if one.reversible])
def test_undo(name):
    """Exact on images and on perturbations, but for the pixels that a shift has lost."""
    transform = CASES[name]
    for channels in (1, 3):
        x = inputs(name, channels=channels)
        kept = transform.kept(x) if hasattr(transform, "kept") else torch.tensor(True)
        assert torch.equal(transform.undo(transform(x)), torch.where(kept, x, 0))
        shifted = x - 0.5
        undone = transform.undo(transform.apply(shifted))
        assert torch.equal(undone, torch.where(kept, shifted, 0))


IDENTITY = {
    **dict.fromkeys(("GaussianNoise", "UniformNoise", "SpeckleNoise", "Salt", "Pepper"), 0),
    "LAB": 1e-5,
    "YUV": 2e-3,  # the authors' matrices are rounded to three digits
    "GrayMix": 0,
    "ColorPrecision": 0.375 / 16 + 1e-6,  # half a step less its eighth
    "FFT": 0.021,  # its gain is up to 1.02
    **dict.fromkeys(("Affine", "Crop", "Swirl"), 1e-5),
    **dict.fromkeys(("Gamma", "Sharpen"), 1e-6),
}


@pytest.mark.parametrize("name", IDENTITY)
def test_no_strength_no_change(name):
    x = images(3, height=24, width=24)
    assert (transformed(catalogue()[name](0.0), x) - x).abs().max() <= IDENTITY[name]


@pytest.mark.parametrize("name", [n for n, kind in catalogue().items() if hasattr(kind, "alpha")])
def test_extreme_strengths(name):
    x = images().requires_grad_()
    for alpha in (0.0, 1.0):
        y = transformed(catalogue()[name](alpha), x)
        (gradient,) = torch.autograd.grad((y * images(seed=1)).sum(), x)
        assert y.isfinite().all()
        assert gradient.isfinite().all()
        assert gradient.any()


RANGES = {  # of parameter number, column (... for all of them): lowest, highest
    "UniformNoise": {(0, ...): (-0.4, 0.4)},
    "GrayMix": {(1, ...): (0, 0.4)},
    "HSV": {(0, 0): (-0.08, 0.08), (0, 1): (-0.4, 0.4), (0, 2): (-0.4, 0.4)},
    "LAB": {(0, 0): (-40, 40), (0, 1): (-16, 16), (0, 2): (-16, 16)},
    "XYZ": {(0, ...): (-0.4, 0.4)},
    "YUV": {(0, 0): (-0.4, 0.4), (0, 1): (-0.16, 0.16)},
    "MotionBlur": {(0, ...): (-90, 90), (1, ...): (-1, 1)},
    "GrayTwoChannels": {(1, ...): (0, 2)},
    "GrayOneChannel": {(1, ...): (0, 2)},
    "JPEG": {(0, ...): (5, 53)},
    "ColorPrecision": {(0, ...): (10, 16)},
    "FFT": {(0, ...): (0.98, 1.02), (1, ...): (0, 1)},
    "Erase": {(0, 0): (0, 7), (0, 2): (1, 8)},
    "Crop": {(0, 2): (7, 8), (0, 3): (7, 11)},
    "Swirl": {(0, 0): (0, 11), (0, 1): (0, 7), (1, ...): (0, 6.4), (2, ...): (0, 3.2)},
    "ColorJitter": {
        **{(0, 0): (-0.4, 0.4), (0, 1): (0.6, 1.4), (0, 2): (0.6, 1.4), (0, 3): (-0.4, 0.4)},
        (1, ...): (0, 3),
    },
    "Gamma": {(0, ...): (0.6, 1.4)},
    "Solarize": {(0, ...): (0.4, 0.6), (1, ...): (-0.1, 0.1)},
}


IN_PLACE_OF_ALPHA = [
    (transforms.JPEG(quality=(55, 95)), {(0, ...): (55, 95)}),
    (transforms.ColorPrecision(steps=(8, 200)), {(0, ...): (8, 200)}),
    (
        transforms.Swirl(radius=(10, 200), strength=(0.01, 2)),
        {(1, ...): (10, 200), (2, ...): (0.01, 2)},
    ),
    (transforms.Crop(sides=(0.5, 1.0)), {(0, 0): (0, 4), (0, 2): (4, 8), (0, 3): (6, 12)}),
    (Bilateral((3, 5)), {(0, ...): (5, 20), (1, ...): (5 / 255, 20 / 255), (2, ...): (3, 5)}),
]


@pytest.mark.parametrize("name", [*RANGES, *range(len(IN_PLACE_OF_ALPHA))])
def test_ranges_of_the_parameters(name):
    """All within the documented range, which is filled, at alpha 0.4 on 3x8x12 images."""
    if name in RANGES:
        kind, ranges = catalogue()[name], RANGES[name]
        transform = kind(alpha=0.4) if hasattr(kind, "alpha") else kind()
    else:
        transform, ranges = IN_PLACE_OF_ALPHA[name]
    params = transform.sample(torch.full((3000, 3, 8, 12), 0.5), generator(1))
    for (index, column), (low, high) in ranges.items():
        drawn = (params[index] if column is ... else params[index][:, column]).double()
        slack = 0.01 * (high - low)
        assert low - 1e-6 <= drawn.min() <= low + slack
        assert high - slack <= drawn.max() <= high + 1e-6
