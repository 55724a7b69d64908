"""The pool's transformations of pixel values against scikit-image, Pillow and closed forms."""

import io
import math

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import color, util

from lightning_rob.transforms.pool import pool
from tests.transforms.inputs import X, close, digits, generator, images, streams

POOL = pool()
DIGITS = digits()


def drawn(name, x, seed=0):
    return POOL[name](x, *POOL[name].sample(x, streams(*range(len(x)), seed=seed)))


def test_normalized_by_the_image():
    y = POOL["augment_samplewise_std_norm"](X)
    for image, result in zip(X.numpy(), y.numpy(), strict=True):
        expected = (image - image.mean()) / (image.std() + 1e-6)
        assert np.allclose(result, expected.clip(0, 1))


def test_normalized_by_fixed_numbers():
    grey = POOL["augment_featurewise_std_norm"](X[:, :1])
    assert close(grey, ((X[:, :1] - 0.1307) / 0.3081).clamp(0, 1))
    color = POOL["augment_featurewise_std_norm"](X)
    mean, std = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2471, 0.2435, 0.2616]])[..., None, None]
    assert close(color, ((X - mean) / std).clamp(0, 1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("count", [4, 8])
def test_quantized_to_a_number_of_colors(channels, count):
    x = X[:, :channels]
    y = drawn(f"quantize_{count}_colors", x)
    assert all(len(result.flatten(1).T.unique(dim=0)) == count for result in y)


def test_quantized_as_well_as_by_many_starts():
    """Error in L*a*b*, beside the smallest of k-means with ten starts on all pixels."""
    from sklearn.cluster import KMeans

    lab = color.rgb2lab(X[0].permute(1, 2, 0).numpy()).reshape(-1, 3)
    best = KMeans(8, n_init=10, random_state=0).fit(lab).inertia_
    result = color.rgb2lab(drawn("quantize_8_colors", X)[0].permute(1, 2, 0).numpy())
    assert ((result.reshape(-1, 3) - lab) ** 2).sum() < 1.25 * best


def test_few_colors_are_kept():
    x = torch.tensor([0.0, 0.25, 0.5, 1.0])[torch.randint(4, (1, 1, 8, 8))]
    assert close(drawn("quantize_4_colors", x), x, 1e-4)
    assert close(drawn("quantize_8_colors", x), x, 1e-4)
    with pytest.raises(ValueError, match="1 or 3 channels"):
        drawn("quantize_4_colors", torch.rand(1, 2, 8, 8))


MODES = {
    "gaussian": "gaussian",
    "localvar": "localvar",
    "poisson": "poisson",
    "salt": "salt",
    "pepper": "pepper",
    "salt_pepper": "s&p",
    "speckle": "speckle",
}


@pytest.mark.parametrize("kind", MODES)
def test_noise_is_that_of_scikit_image(kind):
    """Its mean and deviation on each of nine greys, over many pixels."""
    x = torch.linspace(0.1, 0.9, 9).repeat_interleave(40).expand(1, 1, 500, 360)
    numpy_generator = np.random.default_rng(1)
    theirs = util.random_noise(x[0, 0].double().numpy(), MODES[kind], rng=numpy_generator)
    found_image = drawn(f"noise_{kind}", x)
    for function in (torch.mean, torch.std):
        expected, found = (
            function(y.double().view(500, 9, 40), (0, 2))
            for y in (torch.from_numpy(theirs), found_image[0, 0])
        )
        assert close(found, expected, 0.01)


def test_poisson_noise_depends_on_the_distinct_values():
    """Two values: one photon in two for a grey of one half, so that all become 0, 0.5 or 1."""
    x = torch.full((1, 1, 100, 100), 0.5)
    x[..., :50] = 0
    y = drawn("noise_poisson", x)
    assert set(y.unique().tolist()) == {0, 0.5, 1}
    assert not y[..., :50].any()
    assert math.isclose((y[..., 50:] == 0).double().mean(), math.exp(-1), abs_tol=0.02)


def by_pillow(x, quality):
    pictures = []
    for image in (255 * x).round().byte():
        file = io.BytesIO()
        pixels = image.permute(1, 2, 0).numpy()
        Image.fromarray(pixels.squeeze()).save(file, "JPEG", quality=quality)
        pictures.append(np.asarray(Image.open(file)).reshape(pixels.shape))
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 255


def test_jpeg_is_nearly_that_of_pillow():
    """Within 2 / 255 on average, though it rounds softly; the worse, the farther away."""
    losses = []
    for quality in (80, 50, 30, 10):
        y, true = POOL[f"compress_jpeg_quality_{quality}"](DIGITS), by_pillow(DIGITS, quality)
        assert 255 * (y - true).abs().mean() < 2
        assert (y - true).norm() < 0.6 * (true - DIGITS).norm()
        losses.append((y - DIGITS).square().mean())
    assert losses == sorted(losses)


def test_png_rounds_to_eight_bits_at_any_level():
    y = POOL["compress_png_compression_1"](X)
    assert torch.equal((255 * y).round(), (255 * X).round())
    assert (y - X).abs().max() <= 0.5 / 255 + 1e-12
    for level in (5, 8):
        assert torch.equal(POOL[f"compress_png_compression_{level}"](X), y)


@pytest.mark.parametrize("name", ["augment_samplewise_std_norm", "augment_featurewise_std_norm"])
def test_an_attack_sees_the_pixels_that_normalization_makes_black(name):
    x = (images(2, 1, 28, 28, seed=5) ** 4).requires_grad_()
    seen = POOL[name](x)
    weights = torch.rand(seen.shape, generator=generator())
    (gradient,) = torch.autograd.grad((weights * seen).sum(), x)
    assert (seen == 0).float().mean() > 0.1
    assert (gradient != 0).all()
