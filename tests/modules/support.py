"""Images, networks and attacks that several tests of training methods need."""

import torch
from torch import nn

from lightning_rob.attacks import Attack
from lightning_rob.defenses.copies import original
from lightning_rob.threat import Threat

FOLDER = "run/version_0/checkpoints"


def saving(steps):
    """Return options that save all epochs, and the last of every few steps."""
    save = "--trainer.callbacks+={class_path: ModelCheckpoint, init_args: {save_top_k: -1, "
    every = f"every_n_train_steps: {steps}, save_last: true"
    return [save + f"filename: 'at-{{step}}', {every}}}}}", save + "filename: 'end-{epoch}'}}"]


def batch(n=8):
    chance = torch.Generator().manual_seed(3)
    return torch.rand(n, 3, 8, 8, generator=chance), torch.randint(0, 4, (n,), generator=chance)


class Spy(Attack):
    """Return white images and record the defense and the number of images."""

    def __init__(self):
        self.threat = Threat("linf", 16 / 255)
        self.calls = []

    def perturb(self, defense, x, y, generator):
        self.calls.append((original(defense), len(x)))
        return torch.ones_like(x)


class ConvNet(nn.Sequential):
    """Layers that a double backward has to pass: convolution, BatchNorm, activation, pooling."""

    def __init__(self, activation=nn.LeakyReLU):
        super().__init__(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            activation(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(96, 4),
        )


class WithoutNorm(nn.Sequential):
    """A network in which no image of a batch changes another's logits."""

    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 4))


def directional_derivatives(module, x, y, seed=0, width=1e-6):
    """The loss's derivative along random weights: by backward, and by central differences."""
    generator = torch.Generator().manual_seed(seed)
    weights = list(module.defense.parameters())
    directions = [torch.randn(w.shape, generator=generator).to(w) for w in weights]
    gradients = torch.autograd.grad(module.loss(x, y), weights)
    by_backward = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True)).item()

    def shift(length):
        with torch.no_grad():
            for w, d in zip(weights, directions, strict=True):
                w.add_(d, alpha=length)

    ends = []
    for sign in (1, -1):
        shift(sign * width)
        ends.append(module.loss(x, y).item())
        shift(-sign * width)
    return by_backward, (ends[0] - ends[1]) / (2 * width)
