"""Brightness against kornia's HSV and by hand; the corruptions of a package that may be missing."""

import sys
import types

import numpy as np
import pytest
import torch
from kornia.color import hsv_to_rgb, rgb_to_hsv
from PIL import Image

from lightning_rob.randomness import Streams
from lightning_rob.transforms.corruptions import LIGHTER, Brightness, Corruption

SEVERITIES = pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])


def colours(count=12, size=8):
    return torch.rand((count, 3, size, size), generator=torch.Generator().manual_seed(0)).double()


@SEVERITIES
def test_brightness_is_the_value_of_hsv(severity):
    x = colours()
    hue, saturation, value = rgb_to_hsv(x).unbind(1)
    lighter = (value + LIGHTER[severity - 1]).clamp(0, 1)
    expected = hsv_to_rgb(torch.stack([hue, saturation, lighter], 1))
    torch.testing.assert_close(Brightness(severity)(x), expected, atol=1e-6, rtol=0)


@SEVERITIES
@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_of_greys_is_added(severity, channels):
    x = torch.linspace(0, 1, 64).reshape(1, 1, 8, 8).expand(2, channels, 8, 8)
    added = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    torch.testing.assert_close(Brightness(severity)(x), (x + added).clamp_max(1))


def test_brightness_has_a_gradient():
    x = (0.1 + 0.6 * colours(2, 3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: Brightness(1)(x), x)
    black = torch.zeros(1, 3, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(Brightness(1)(black).sum(), black)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("severity", [0, 6, 1.5])
def test_severities_are_five(severity):
    for make in (Brightness, lambda severity: Corruption("fog", severity)):
        with pytest.raises(ValueError, match=rf"severity must be 1 … 5, got {severity}"):
            make(severity)


# the package


def darker(image, severity=1):
    """As a corruption of the package: PIL to [H, W, 3] in 0 … 255."""
    return np.asarray(image) * (1 - severity / 10)


def grainy(image, severity=1):
    return np.clip(np.asarray(image) + np.random.normal(size=np.asarray(image).shape), 0, 255)


def seeded(image, severity=1, seed=None):
    return np.asarray(image) * np.random.default_rng(seed).random()


@pytest.fixture
def package(monkeypatch):
    """A package of the same interface, of three corruptions whose results are known."""
    stand_in = types.ModuleType("imagecorruptions")
    stand_in.corruption_dict = {f.__name__: f for f in (darker, grainy, seeded)}
    monkeypatch.setitem(sys.modules, "imagecorruptions", stand_in)


def test_a_corruption_by_name(package):
    x = (255 * colours(3, 32)).round() / 255
    expected = ((255 * x).round() * (1 - 3 / 10)).floor() / 255
    torch.testing.assert_close(Corruption("darker", 3)(x, torch.zeros(3).long()), expected)
    grey = x[:, :1]
    torch.testing.assert_close(
        Corruption("darker", 3)(grey, torch.zeros(3).long()), expected[:, :1]
    )


@pytest.mark.parametrize("name", ["grainy", "seeded"])
def test_its_chance_is_the_images_own(package, name):
    x, index = colours(4, 32).float(), torch.arange(4)
    corrupt = Corruption(name)
    state = np.random.get_state()[1].copy()
    whole = corrupt(x, *corrupt.sample(x, Streams.from_index(index, 0)))
    parts = [
        corrupt(x[i], *corrupt.sample(x[i], Streams.from_index(i, 0))) for i in index.split([1, 3])
    ]
    assert torch.equal(whole, torch.cat(parts))
    assert not torch.equal(whole, corrupt(x, *corrupt.sample(x, Streams.from_index(index, 1))))
    assert np.array_equal(np.random.get_state()[1], state)


def test_what_a_corruption_refuses(package, monkeypatch):
    x, seed = colours(2, 32), torch.zeros(2).long()
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
    x, corrupt = colours(2, 32), Corruption(name, 2)
    first = corrupt(x, *corrupt.sample(x, Streams.from_index(torch.arange(2), 0)))
    again = corrupt(x, *corrupt.sample(x, Streams.from_index(torch.arange(2), 0)))
    assert torch.equal(first, again)
    assert not torch.equal(first, x)
    if name in ("contrast", "brightness"):
        image = Image.fromarray((255 * x[0]).round().byte().permute(1, 2, 0).numpy())
        expected = np.uint8(corruptions[name](image, 2))
        assert torch.equal((255 * first[0]).round().byte().permute(1, 2, 0), torch.tensor(expected))
