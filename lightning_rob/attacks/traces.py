"""Loss, margin and gradient norm of each step of an attack, image by image."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_rob.attacks.base import Attack
from lightning_rob.attacks.gradient import recorded
from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator, Streams


@dataclass(frozen=True)
class Trace:
    """The objective's values [B, T] in T gradient steps; NaN after an image has left."""

    x_adv: Tensor  # [B, C, H, W] the images that the attack returned
    loss: Tensor  # [B, T] the objective that it climbs
    margin: Tensor  # [B, T] the label's logit minus the largest other one, its mean over draws
    gradient_norm: Tensor  # [B, T] the l2 norm of the gradient by the image


def trace(
    attack: Attack, defense: Defense, x: Tensor, y: Tensor, generator: Generator = None
) -> Trace:
    """Attack images [B, C, H, W] one by one, and return what each step saw before it moved.

    The images are bit for bit those that the attack makes of each alone, with this source of noise.
    Restarts, targets and the attacks inside of others follow one another. `plots.trace` draws it.

    Raises:
        ValueError: no image, or an attack that asks for no gradient of an objective (Square, FAB).
    """
    found, steps = [], []
    for i in range(len(x)):
        row = torch.tensor([i], device=x.device)
        noise = generator[row] if isinstance(generator, Streams) else generator
        with recorded() as seen:
            found.append(attack(defense, x[row], y[row], noise))
        steps.append(torch.stack(seen) if seen else x.new_zeros(0, 3, dtype=torch.float32))
    if not sum(map(len, steps)):
        kind = type(attack).__name__
        raise ValueError(f"{kind} asked for no gradient of an objective on {len(x)} images")
    loss, margin, norm = pad_sequence(steps, True, torch.nan).unbind(2)
    return Trace(torch.cat(found), loss, margin, norm)
