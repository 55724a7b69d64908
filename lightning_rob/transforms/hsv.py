"""Hue, saturation and value with a gradient everywhere, as the RT paper's authors compute them."""

import math

import torch
from torch import Tensor

from lightning_rob.transforms.base import EPS, clip
from lightning_rob.transforms.smooth import smooth_modulo

TURN = 2 * math.pi
# Which of value, falling, low and rising is red, green and blue in each of the six sectors.
PLANES = ((0, 1, 2, 2, 3, 0), (3, 0, 0, 1, 2, 2), (2, 2, 3, 0, 0, 1))


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
    planes = torch.stack([value, falling, low, rising], 1)
    choice = torch.tensor(PLANES, device=x.device)[:, sector.long()].transpose(0, 1)
    return planes.gather(1, choice)


def jittered(x: Tensor, factor: Tensor, shift: Tensor, turned: Tensor) -> Tensor:
    """RGB [B, 3, H, W] with saturations multiplied and hues turned, by one way there and back.

    Args:
        x: [B, 3, H, W].
        factor: [B] of the saturations, which end at 1.
        shift: [B] radians.
        turned: [B] whose hues are turned at all: through the smooth modulo, even by 0.

    Returns:
        [B, 3, H, W].
    """
    hue, saturation, value = rgb_to_hsv(x).unbind(1)
    shift, turned, factor = (each[:, None, None] for each in (shift, turned, factor))
    hue = torch.where(turned, TURN * smooth_modulo((hue + shift) / TURN), hue)
    return hsv_to_rgb(torch.stack([hue, clip(saturation * factor, 0, 1), value], 1))


def shift_hue(x: Tensor, shift: Tensor) -> Tensor:
    """RGB [B, 3, H, W] with hues turned by [B] radians."""
    return jittered(x, torch.ones_like(shift), shift, torch.ones_like(shift, dtype=torch.bool))


def scale_saturation(x: Tensor, factor: Tensor) -> Tensor:
    """RGB [B, 3, H, W] with saturations multiplied by [B], at most 1."""
    none = torch.zeros_like(factor)
    return jittered(x, factor, none, torch.zeros_like(factor, dtype=torch.bool))
