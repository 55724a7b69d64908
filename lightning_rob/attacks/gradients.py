"""What an attack on a random defense has to go by."""

from contextlib import nullcontext

import torch
from torch import Tensor

from lightning_rob.attacks.base import Backward, attacking
from lightning_rob.defenses import Defense
from lightning_rob.objectives import Objective, check_logits, expected_ce
from lightning_rob.randomness import Generator


def draw_gradients(
    defense: Defense,
    x: Tensor,
    y: Tensor,
    draws: int,
    generator: Generator = None,
    objective: Objective = expected_ce,
    backward: Backward | None = None,
) -> Tensor:
    """The gradients of single draws of a random defense, made together as in a step of PGD.

    Args:
        defense: whose draws.
        x: [B, C, H, W] images.
        y: [B] their labels.
        draws: n, how many.
        generator: where they come from.
        objective: whose gradient.
        backward: how the attack looks at the defense, see `PGD`.

    Returns:
        [n, B, C, H, W].
    """
    found: list[Tensor] = []
    with attacking(defense), backward(defense) if backward else nullcontext():
        leaf, y = x.detach().clone().requires_grad_(), y.clone()
        logits, weights = defense.sample_logits(leaf, generator, draws)
        check_logits(logits, y)
        shares = (weights * draws).view(draws, -1)
        for draw, share in zip(logits.view(draws, -1, *logits.shape[1:]), shares, strict=True):
            climbed = objective(draw, share, y).sum()
            found += torch.autograd.grad(climbed, leaf, retain_graph=len(found) < draws - 1)
    return torch.stack(found)
