"""A small network that stands in for a part of a defense, for its gradient (BPDA)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from lightning_rob.defenses import Defense
from lightning_rob.randomness import Generator, own_streams, seed_of
from lightning_rob.threat import Threat

WIDTH = 24
STEPS = 4  # of Adam for each pass of the defense
PART = 64  # images of a step


class StandIn(nn.Module):
    """Map images [B, C, H, W] to [B, D, I, J]: a mixture of the channels, and a correction."""

    def __init__(self, x: Tensor, z: Tensor) -> None:
        super().__init__()
        channels, wanted, self.size = x.shape[1], z.shape[1], z.shape[2:]
        self.mixture = nn.Conv2d(channels, wanted, 1)
        last = nn.Conv2d(WIDTH, wanted, 3, padding=1)
        self.correction = nn.Sequential(
            nn.Conv2d(channels, WIDTH, 5, padding=2),
            nn.SiLU(),
            nn.Conv2d(WIDTH, WIDTH, 5, padding=2),
            nn.SiLU(),
            last,
        )
        nn.init.zeros_(last.weight)  # so that it begins with the mixture alone

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.shape[2:] == self.size else interpolate(x, self.size, mode="bilinear")
        return self.mixture(x) + self.correction(x)


def inputs_of(defense: Defense, part: str, x: Tensor, generator: Generator) -> Tensor:
    """Return what a part of a defense is given for images x, in its last call of a prediction."""
    found: list[Tensor] = []

    def keep(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        found[:] = [inputs[0].detach().clone()]  # of the last call alone

    handle = defense.get_submodule(part).register_forward_pre_hook(keep)
    try:
        with torch.no_grad():
            defense.logits(x, generator)
    finally:
        handle.remove()
    if not found or found[0].dim() != 4 or len(found[0]) != len(x):
        shape = list(found[0].shape) if found else "nothing"
        raise ValueError(f"{part} must get a batch of {len(x)} images or maps, got {shape}")
    return found[0]


def train_stand_in(
    defense: Defense, part: str, x: Tensor, threat: Threat, passes: int, generator: Generator
) -> StandIn:
    """Train a network on what lies before a part of a defense; return it frozen.

    It learns from pairs of a point of each image's ball and what the defense makes of it (mean
    squared error, Adam), one pair of each image a pass.
    """
    seed = int(torch.randint(2**62, ())) if generator is None else seed_of(generator)
    with own_streams(seed, x.device), torch.enable_grad():
        noise = torch.Generator().manual_seed(seed)
        # Attacks end near the surface of the ball, and pass through all of it.
        draws = (threat.start, threat.corner)
        points = [draws[i % 2](x, noise) for i in range(passes)]
        targets = torch.cat([inputs_of(defense, part, at, noise) for at in points]).float()
        points_seen = torch.cat(points).float()
        net = StandIn(points_seen, targets).to(x.device)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        steps = STEPS * passes
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps + 1)
        for _ in range(steps):
            chosen = torch.randint(len(targets), (PART,), device=x.device)
            optimizer.zero_grad()
            torch.autograd.backward(mse_loss(net(points_seen[chosen]), targets[chosen]))
            optimizer.step()
            schedule.step()
    return net.eval().requires_grad_(False)
