"""Brightness against kornia's HSV and by hand; the corruptions of a package that may be missing."""

import sys

import numpy as np
import pytest
import torch
from kornia.color import hsv_to_rgb, rgb_to_hsv
from PIL import Image

from lightning_rob.transforms.corruptions import OFFSETS, Brightness, Corruption
from tests.transforms.inputs import generator, streams


def colors(count=12, size=8):
    return torch.rand((count, 3, size, size), generator=generator()).double()


def test_brightness_is_the_value_of_hsv():
    x = colors()
    hue, saturation, value = rgb_to_hsv(x).unbind(1)
    for severity in range(1, 6):
        lighter = (value + OFFSETS[severity - 1]).clamp(0, 1)
        expected = hsv_to_rgb(torch.stack([hue, saturation, lighter], 1))
        torch.testing.assert_close(Brightness(severity)(x), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_of_greys_is_added(channels):
    x = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8).expand(2, channels, 8, 8)
    for severity, added in enumerate((0.05, 0.1, 0.15, 0.2, 0.3), start=1):
        torch.testing.assert_close(Brightness(severity)(x), (x + added).clamp_max(1))


def test_a_corruption_by_name(package):
    x = (255 * colors(3, 32)).round() / 255
    expected = ((255 * x).round() * (1 - 3 / 10)).floor() / 255
    torch.testing.assert_close(Corruption("darker", 3)(x, torch.zeros(3).long()), expected)
    grey = x[:, :1]
    torch.testing.assert_close(
        Corruption("darker", 3)(grey, torch.zeros(3).long()), expected[:, :1]
    )


@pytest.mark.parametrize("name", ["grainy", "seeded"])
def test_randomness_depends_on_the_image_alone(package, name):
    x, corrupt = colors(4, 32).float(), Corruption(name)
    state = np.random.get_state()[1].copy()
    batch = corrupt(x, *corrupt.sample(x, streams(0, 1, 2, 3)))
    parts = [
        corrupt(x[index], *corrupt.sample(x[index], streams(*index))) for index in ([0], [1, 2, 3])
    ]
    assert torch.equal(batch, torch.cat(parts))  # of 8-bit values
    assert not torch.equal(batch, corrupt(x, *corrupt.sample(x, streams(0, 1, 2, 3, seed=6))))
    assert np.array_equal(np.random.get_state()[1], state)


def test_what_a_corruption_refuses(package, monkeypatch):
    x, seed = colors(2, 32), torch.zeros(2).long()
    with pytest.raises(ValueError, match="no corruption 'rust', there are darker, grainy, seeded"):
        Corruption("rust")(x, seed)
    with pytest.raises(ValueError, match=r"from 32x32, got \[2, 3, 28, 28\]"):
        Corruption("darker")(x[..., :28, :28], seed)
    with pytest.raises(RuntimeError, match="no gradient"):
        Corruption("darker")(x.clone().requires_grad_(), seed)
    monkeypatch.setitem(sys.modules, "imagecorruptions", None)
    with pytest.raises(ImportError, match="imagecorruptions-imaug"):
        Corruption("darker")(x, seed)


@pytest.mark.parametrize("name", ["gaussian_noise", "impulse_noise", "contrast", "brightness"])
def test_the_package_itself(name):
    corruptions = pytest.importorskip("imagecorruptions").corruption_dict
    x, corrupt = colors(2, 32), Corruption(name, 2)
    first = corrupt(x, *corrupt.sample(x, streams(0, 1)))
    again = corrupt(x, *corrupt.sample(x, streams(0, 1)))
    assert torch.equal(first, again)
    assert not torch.equal(first, x)
    if name in ("contrast", "brightness"):
        image = Image.fromarray((255 * x[0]).round().byte().permute(1, 2, 0).numpy())
        expected = np.uint8(corruptions[name](image, 2))
        assert torch.equal((255 * first[0]).round().byte().permute(1, 2, 0), torch.tensor(expected))
