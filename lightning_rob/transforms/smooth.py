"""Rounding and remainder with a gradient (RT paper, eqs. 14 and 15; Shin and Song 2017)."""

import torch
from torch import Tensor


def smooth_round(t: Tensor) -> Tensor:
    """Round, but with a slope (eq. 14): round(t) + (t - round(t))^3, halves to even."""
    whole = t.round()
    return whole + (t - whole) ** 3


def smooth_modulo(t: Tensor, literal: bool = False) -> Tensor:
    """The remainder of division by one, with a slope (eq. 15): r = t - smooth_round(t), or r + 1.

    Args:
        t: any shape.
        literal: give 1 at integers, as eq. 15 does to the letter ("r if r > 0, otherwise r + 1");
            else 0 there, as every remainder and the authors' code.

    Returns:
        As t, in [0, 1); not the identity on [0, 1).
    """
    r = t - smooth_round(t)
    return torch.where(r > 0 if literal else r >= 0, r, r + 1)
