"""Attacks on random transformations see black pixels, and infinite gradients stop no others."""

import pytest
import torch
from torch import nn

from lightning_rob.attacks import PGD
from lightning_rob.defenses import RandomTransforms, Single
from lightning_rob.objectives import expected_margin, linear
from lightning_rob.threat import Threat
from lightning_rob.transforms import LAB, ColorJitter, Gamma
from tests.defenses.test_random_transforms import Flat, streams


@pytest.mark.parametrize("transform", [Gamma(0.5), LAB(0.3), ColorJitter(0.3)])
def test_attack_sees_black_pixels_through_a_transform(transform):
    """A step from black images must do better than the same step on noise of random signs."""
    net, x = Flat(classes=2), torch.zeros(16, 3, 8, 8)
    y = net(x).argmax(1)
    rt = RandomTransforms(net, [transform], 1, 20)
    threat = Threat("linf", 0.1)
    x_adv = PGD(threat, 5, 0.05, linear, draws=10, random_start=False)(rt, x, y, streams(16))
    delta = 0.1 * (torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) < 0.5)

    def objective(images):
        with torch.no_grad():
            return expected_margin(*rt.sample_logits(images, streams(16, 1), 100), y).mean()

    assert objective(x_adv) > objective(x) + 0.01
    assert objective(x_adv) > objective(delta)


class Steep(nn.Module):
    """A linear network whose logits have an infinite derivative at one black pixel."""

    def __init__(self):
        super().__init__()
        self.net = Flat(classes=2)

    def forward(self, x):
        z = self.net(x)
        bonus = 1e-3 * x[:, 0, 0, 0].sqrt()[:, None]
        return z + bonus * nn.functional.one_hot(z.argmax(1), 2)


def test_an_infinite_gradient_of_one_pixel_does_not_stop_the_others():
    x = 0.2 + 0.6 * torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    x[:, 0, 0, 0] = 0
    steep = Steep()
    y = steep(x).argmax(1)
    attack = PGD(Threat("l2", 0.5), 10, 0.1, linear, random_start=False)

    def objective(images):
        return linear(steep.net(images)[None], torch.ones(1), y).mean()

    best = objective(attack(Single(steep.net), x, y))
    assert objective(attack(Single(steep), x, y)) > objective(x) + 0.9 * (best - objective(x))
