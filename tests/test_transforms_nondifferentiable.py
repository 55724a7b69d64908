import numpy as np
import pytest
import torch
from skimage import exposure, restoration

from lightning_rob.randomness import Streams
from lightning_rob.transforms import catalogue
from lightning_rob.transforms.nondifferentiable import (
    ALL,
    AdaptiveHistogram,
    ChambolleDenoise,
    ContrastStretch,
    EqualizeHistogram,
    HardPrecision,
)

KINDS = ALL
X = torch.rand(3, 3, 40, 48, generator=torch.Generator().manual_seed(0))


def streams(*indices):
    return Streams.from_index(torch.tensor(indices), 5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_is_refused(kind):
    transform = kind()
    params = transform.sample(X, streams(0, 1, 2))
    assert not transform.differentiable
    assert kind not in catalogue().values()
    x = X.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=f"{kind.__name__} has no gradient: call it under"):
        transform(x, *params)
    y = transform(x.detach(), *params)
    with torch.no_grad():
        assert torch.equal(transform(x, *params), y)


@pytest.mark.parametrize("kind", KINDS)
def test_as_the_others(kind):
    """Shape, range, one set of parameters per image, replay and no dependence on the batch."""
    transform = kind(regions=2) if kind is AdaptiveHistogram else kind()
    params = transform.sample(X, streams(0, 1, 2))
    y = transform(X, *params)
    assert (y.shape, y.dtype) == (X.shape, X.dtype)
    assert y.min() >= 0
    assert y.max() <= 1
    assert torch.equal(transform(X, *params), y)
    alone = [transform(X[i : i + 1], *transform.sample(X[i : i + 1], streams(i))) for i in range(3)]
    assert torch.allclose(torch.cat(alone), y, atol=1e-6)
    same = X[:1].expand(3, -1, -1, -1)
    y = transform(same, *transform.sample(same, streams(0, 1, 2)))
    assert not torch.equal(y[0], y[1])


def test_contrast_is_stretched():
    x = torch.linspace(0.2, 0.7, 101).view(1, 1, 1, 101)
    y = ContrastStretch()(x, torch.tensor([0.1]), torch.tensor([0.2]))
    expected = ((x - 0.25) / 0.35).clamp(0, 1)
    assert torch.allclose(y, expected, atol=1e-5)
    flat = torch.full((1, 3, 4, 4), 0.3)
    assert torch.equal(ContrastStretch()(flat, torch.zeros(1), torch.zeros(1)), flat)


def test_hard_precision():
    y = HardPrecision()(X, torch.full((3, 3), 4.0))
    assert set(y.unique().tolist()) == {0, 0.25, 0.5, 0.75, 1}
    assert (y - X).abs().max() <= 0.125 + 1e-6


def test_those_of_scikit_image():
    image = X[0].double().numpy()
    one = [torch.tensor([value]) for value in (0.03, 64, 0.8)]
    expected = [
        np.stack([exposure.equalize_adapthist(plane, clip_limit=0.03) for plane in image]),
        np.stack([exposure.equalize_hist(plane, nbins=64) for plane in image]),
        restoration.denoise_tv_chambolle(image, weight=0.8, channel_axis=0),
    ]
    for kind, number, result in zip(
        (AdaptiveHistogram, EqualizeHistogram, ChambolleDenoise), one, expected, strict=True
    ):
        y = kind()(X[:1], number)[0].numpy()
        assert np.allclose(y, result.clip(0, 1), atol=1e-5)
