"""Changes of few pixels, on networks of which the best change is known."""

import pytest
import torch
from torch import nn

from lightning_rob.attacks import APGD, Budgeted, FewPixels, SurrogateGradient
from lightning_rob.defenses import Single
from lightning_rob.objectives import expected_margin
from lightning_rob.threat import Threat
from tests.attacks.common import seeded

THREATS = [Threat("l2", 0.81), Threat("l1", 2.6)]
SIDE = 10


class Margin(nn.Module):
    """Two classes by weights of the pixels; no image of these tests fools it."""

    def __init__(self, weights, size=1.0):
        super().__init__()
        self.weights, self.size = weights, size

    def forward(self, z):
        margin = self.size * (z.flatten(1)[:, : SIDE**2] @ self.weights - 100)
        return torch.stack([torch.zeros_like(margin), margin], 1)


class Rounded(nn.Module):
    """Rounds pixels to halves, after noise of its own or a blur."""

    def __init__(self, net, before=lambda x: x):
        super().__init__()
        self.net, self.before = net, before

    def forward(self, x):
        return self.net((2 * self.before(x)).round() / 2)


def weights():
    return torch.randn(SIDE**2, generator=seeded())


def attacked(attack, net, x, passes=300, **surrogate):
    y = torch.zeros(len(x)).long()
    through = SurrogateGradient(attack, ("rounding",), **surrogate)
    x_adv = Budgeted(through, passes)(Single(net), x, y, seeded())
    assert float(attack.threat.size(x_adv - x).max()) <= attack.threat.eps * 1.0001
    return x_adv


@pytest.mark.parametrize("threat", THREATS, ids=["l2", "l1"])
def test_best_pixels_are_found(threat):
    """The radius takes ten pixels at most across a threshold that is 0.25 away."""
    x, net = torch.zeros(3, 1, SIDE, SIDE), Rounded(Margin(weights()))
    largest = float(weights().topk(10).values.sum()) / 2

    def reached(attack, **surrogate):
        return float(net(attacked(attack, net, x, **surrogate))[:, 1].min() + 100)

    few = reached(FewPixels(threat))
    assert 0.9 * largest <= few <= largest + 1e-4
    assert reached(APGD(threat, objective=expected_margin)) < few
    measured = reached(FewPixels(threat, bisections=9), enter=("net.net",))
    assert 0.98 * largest <= measured <= largest + 1e-4


@pytest.mark.parametrize("threat", THREATS, ids=["l2", "l1"])
def test_pixels_near_to_a_threshold_come_first(threat):
    """At most the last pixel that fits is missing to the best fractions of pixels."""
    x, net = torch.rand(3, 1, SIDE, SIDE, generator=seeded()), Rounded(Margin(weights()))
    measured = attacked(FewPixels(threat, bisections=9), net, x, enter=("net.net",))
    gained = (net(measured) - net(x))[:, 1]
    level, up = (2 * x).round() / 2, weights().view(SIDE, SIDE) > 0
    length = torch.where(up, level + 0.25 - x, x - (level - 0.25)).flatten(1)
    possible = torch.where(up, level < 1, level > 0).flatten(1)
    gain = 0.5 * weights().abs() * possible
    order = (gain / length**threat.p).argsort(dim=1, descending=True)
    spent = (length**threat.p).gather(1, order).cumsum(1) / threat.eps**threat.p
    best = (gain.gather(1, order) * (spent <= 1)).sum(1)
    assert bool((gained >= 0.95 * best).all())
    equal = attacked(FewPixels(threat), net, x)
    assert float(gained.mean()) > 1.1 * float((net(equal) - net(x))[:, 1].mean())


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (nn.AvgPool2d(3, 1, 1), "given each pixel by itself"),
        (nn.Upsample(scale_factor=2), r"a part that gets \[3, 1, 10, 10\], got \[3, 1, 20, 20\]"),
    ],
)
def test_thresholds_of_pixels_that_are_mixed(before, message):
    attack, net = FewPixels(THREATS[0], bisections=9), Rounded(Margin(weights()), before)
    x = torch.rand(3, 1, SIDE, SIDE, generator=seeded())
    with pytest.raises(ValueError, match=message):
        attacked(attack, net, x, enter=("net.net",))
    with pytest.raises(ValueError, match="name a part of the network that is entered"):
        attacked(attack, net, x)
    with pytest.raises(ValueError, match="bisections need a SurrogateGradient"):
        attack(Single(net), x, torch.zeros(3).long())


@pytest.mark.parametrize("options", [{}, {"bisections": 9}])
def test_infinite_squares_and_a_ball_of_all_images(options):
    x, huge = torch.full((3, 1, SIDE, SIDE), 0.5), Threat("l2", 1000)
    for threat, size in ((THREATS[0], 1e20), (huge, 1.0)):
        net = Rounded(Margin(weights(), size))
        x_adv = attacked(FewPixels(threat, **options), net, x, enter=("net.net",))
        assert bool((net(x_adv)[:, 1] > net(x)[:, 1]).all())


def test_draws_of_a_common_offset():
    """One offset of all thresholds for each prediction: the luckiest draw says little."""
    generator = torch.Generator().manual_seed(1)

    def moved(x):
        return x + 0.3 * torch.rand(len(x), 1, 1, 1, generator=generator) - 0.15

    x, net = torch.zeros(8, 1, SIDE, SIDE), Rounded(Margin(weights()), moved)

    def reached(draws):
        attack = FewPixels(THREATS[0], draws=draws)
        x_adv = attacked(attack, net, x, passes=600, draws_anew=True)
        return float(torch.stack([net(x_adv)[:, 1] for _ in range(50)]).mean()) + 100

    assert reached(6) > reached(None) + 0.1
    with pytest.raises(ValueError, match="give draws or bisections"):
        FewPixels(THREATS[0], draws=2, bisections=9)
