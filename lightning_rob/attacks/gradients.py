"""What an attack on a random defense has to go by."""

import torch
from torch import Tensor

from lightning_rob.attacks.base import attacking, height
from lightning_rob.defenses import Defense
from lightning_rob.objectives import Objective, expected_ce
from lightning_rob.randomness import Generator


def draw_gradients(
    defense: Defense,
    x: Tensor,
    y: Tensor,
    draws: int,
    generator: Generator = None,
    objective: Objective = expected_ce,
) -> Tensor:
    """The gradients of single draws of a random defense, as an attack meets them.

    Args:
        defense: whose draws.
        x: [B, C, H, W] images.
        y: [B] their labels.
        draws: n, how many.
        generator: where they come from.
        objective: whose gradient.

    Returns:
        [n, B, C, H, W].
    """
    found: list[Tensor] = []
    with attacking(defense):
        for _ in range(draws):
            leaf = x.detach().clone().requires_grad_()
            climbed = height(objective, 1, defense, leaf, y.clone(), generator, check=not found)
            found += torch.autograd.grad(climbed.sum(), leaf)
    return torch.stack(found)
