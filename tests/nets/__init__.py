"""Images, statistics and a small network that the tests of networks share."""

import torch
from torch import nn

MEAN, STD = (0.2, 0.4, 0.6), (0.5, 0.25, 0.125)
TINY = {"depth": 8, "widths": (4, 8, 16)}


def images(channels=3, size=32, batch=2):
    generator = torch.Generator().manual_seed(channels * size)
    return torch.rand((batch, channels, size, size), generator=generator)


def with_statistics(net, x):
    """Move BatchNorm's statistics away from 0 and 1, which would hide mistakes."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0  # less, and the signal is lost on its way through 27 layers
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    with torch.no_grad():
        net.train()(x)
    return net.eval()
