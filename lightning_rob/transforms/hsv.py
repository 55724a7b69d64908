"""Hue, saturation and value with a gradient everywhere, as the RT paper's authors compute them."""

import math

import torch
from torch import Tensor

from lightning_rob.transforms.base import EPS, clip, over_pixels
from lightning_rob.transforms.smooth import smooth_modulo

TURN = 2 * math.pi


def rgb_to_hsv(x: Tensor) -> Tensor:
    """RGB in [0, 1] to hue in radians, saturation and value; [B, 3, H, W] both.

    The hue of the angle h is 2 pi mod~(h / 2 pi) with the smooth modulo of eq. 15.
    """
    value, largest = x.max(1)
    spread = value - x.amin(1)
    red, green, blue = x.unbind(1)
    ahead = torch.stack([green - blue, blue - red, red - green], 1)
    ahead = ahead.gather(1, largest[:, None])[:, 0]
    sextant = ahead / torch.where(spread == 0, 1, spread) + 2 * largest
    hue = TURN * smooth_modulo(sextant / 6)
    return torch.stack([hue, spread / value.clamp_min(EPS), value], 1)


def hsv_to_rgb(x: Tensor) -> Tensor:
    """Hue in radians, saturation and value to RGB; the round trip is close to, not, the identity.

    The sector is that of the true hue, the place in it that of the smooth modulo.
    """
    hue, saturation, value = x.unbind(1)
    turns = hue / TURN
    sector = (6 * turns.detach()).floor() % 6
    place = 6 * smooth_modulo(turns) - sector
    low = value * (1 - saturation)
    falling = value * (1 - place * saturation)
    rising = value * (1 - (1 - place) * saturation)
    reds = torch.stack([value, falling, low, low, rising, value])
    greens = torch.stack([rising, value, value, falling, low, low])
    blues = torch.stack([low, low, rising, value, value, falling])
    choice = sector.long()[None]
    return torch.stack([color.gather(0, choice)[0] for color in (reds, greens, blues)], 1)


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """RGB [B, 3, H, W] with hues turned by [B] radians."""
    hue, saturation, value = rgb_to_hsv(x).unbind(1)
    hue = TURN * smooth_modulo((hue + shift[:, None, None]) / TURN)
    return hsv_to_rgb(torch.stack([hue, saturation, value], 1))


def scale_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """RGB [B, 3, H, W] with saturations multiplied by [B], at most 1."""
    hsv = rgb_to_hsv(x)
    saturation = clip(hsv[:, 1:2] * over_pixels(factor), 0, 1)
    return hsv_to_rgb(torch.cat([hsv[:, :1], saturation, hsv[:, 2:]], 1))
