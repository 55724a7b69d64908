"""Tone against Pillow and closed forms; the color jitter in every order."""

from itertools import permutations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance

from lightning_rob.transforms import ColorJitter, Gamma, Sharpen, Solarize
from lightning_rob.transforms.base import EPS, clip, raised
from lightning_rob.transforms.color import hsv_to_rgb, rgb_to_hsv
from tests.transforms.inputs import assert_same, generator, shift_hue, streams

X = torch.rand(4, 3, 9, 10, generator=generator(), dtype=torch.float64)
AMOUNT = torch.tensor([[0.1, 1.2, 0.8, 0.3]], dtype=torch.float64)


def scale_saturation_plainly(x, factor):
    hsv = rgb_to_hsv(x)
    saturation = clip(hsv[:, 1:2] * factor.view(-1, 1, 1, 1), 0, 1)
    return hsv_to_rgb(torch.cat([hsv[:, :1], saturation, hsv[:, 2:]], 1))


def test_jitter_in_one_round_trip_is_the_one_step_by_step():
    steps = (
        lambda x, shift: x + shift.view(-1, 1, 1, 1),
        lambda x, factor: x * factor.view(-1, 1, 1, 1),
        scale_saturation_plainly,
        shift_hue,
    )
    x = torch.rand(24, 3, 9, 9, generator=generator(), dtype=torch.float64)
    transform = ColorJitter(0.4)
    amount, order = transform.sample(x, streams(*range(24), seed=2))

    def plain(x):
        done = []
        for image, own, kinds in zip(raised(x, EPS), amount, order.tolist(), strict=True):
            z = image[None]
            for kind in kinds:
                z = raised(clip(steps[kind](z, own[kind : kind + 1]), 0, 1), EPS)
            done.append(z)
        return torch.cat(done)

    assert_same(lambda x: transform.apply(x, amount, order), plain, x)


def test_every_image_has_its_own_order():
    x = X[:1].expand(600, -1, -1, -1)
    _, order = ColorJitter().sample(x, generator())
    found, counts = order.unique(dim=0, return_counts=True)
    assert {tuple(row) for row in found.tolist()} == set(permutations(range(4)))
    assert counts.max() < 45
    y = ColorJitter()(x[:24], AMOUNT.expand(24, -1), torch.tensor(list(permutations(range(4)))))
    assert (y[1:] - y[:1]).abs().amax((1, 2, 3)).max() > 0.02


def test_gamma():
    gamma = torch.tensor([0.5, 1, 2, 3]).double()
    y = Gamma()(X, gamma)
    assert torch.allclose(y, torch.stack([X[0].sqrt(), X[1], X[2] ** 2, X[3] ** 3]))


def test_gamma_at_black_and_white():
    x = torch.tensor([0.0, 1.0]).view(1, 1, 1, 2).requires_grad_()
    (gradient,) = torch.autograd.grad(Gamma()(x, torch.tensor([0.5])).sum(), x)
    assert gradient.flatten().tolist() == pytest.approx([0.5 * 255**0.5, 0.5])


def test_sharpness_is_pillows():
    pixels = (255 * X[0].permute(1, 2, 0).numpy()).round().astype(np.uint8)
    x = torch.from_numpy(pixels).permute(2, 0, 1)[None].double() / 255
    for factor in (0.0, 0.4, 1.0, 1.7):
        pillow = ImageEnhance.Sharpness(Image.fromarray(pixels)).enhance(factor)
        expected = torch.from_numpy(np.array(pillow)).permute(2, 0, 1)[None].double() / 255
        y = Sharpen()(x, torch.tensor([factor]).double())
        assert (y - expected).abs().max() <= 2.1 / 255  # Pillow rounds twice


def test_solarize():
    x = torch.tensor([0.1, 0.44, 0.46, 0.9, 0.98]).view(1, 1, 1, 5)
    y = Solarize()(x, torch.tensor([0.5]), torch.tensor([0.05]))
    assert y.flatten().tolist() == pytest.approx([0.15, 0.49, 0.49, 0.05, 0.0], abs=1e-6)
