"""Transforms without a gradient against scikit-image and closed forms."""

import numpy as np
import torch
from skimage import exposure, restoration

from lightning_rob.transforms.nondifferentiable import (
    AdaptiveHistogram,
    ChambolleDenoise,
    ContrastStretch,
    EqualizeHistogram,
    HardPrecision,
)
from tests.transforms.inputs import generator

X = torch.rand(3, 3, 40, 48, generator=generator())


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


def test_denoising_and_histograms_are_those_of_scikit_image():
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
