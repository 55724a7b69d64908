"""Equal changes of few pixels, on a network of which the best change is known."""

import pytest
import torch
from torch import nn

from lightning_rob.attacks import APGD, Budgeted, FewPixels, SurrogateGradient
from lightning_rob.defenses import Single
from lightning_rob.objectives import expected_margin
from lightning_rob.threat import Threat
from tests.attacks.common import seeded


class Rounded(nn.Module):
    """A linear network of two classes on pixels rounded to halves."""

    def __init__(self, weights):
        super().__init__()
        self.weights = weights

    def forward(self, x):
        margin = ((2 * x).round() / 2).flatten(1) @ self.weights
        return torch.stack([torch.zeros_like(margin), margin - 100], 1)  # never fooled


@pytest.mark.parametrize("threat", [Threat("l2", 0.81), Threat("l1", 2.6)], ids=["l2", "l1"])
def test_best_pixels_are_found(threat):
    """The radius takes ten pixels at most across a threshold that is 0.25 away."""
    weights = torch.randn(100, generator=seeded())
    x, y, net = torch.zeros(3, 1, 10, 10), torch.zeros(3).long(), Rounded(weights)
    largest = float(weights.topk(10).values.sum()) / 2

    def reached(attack):
        through = SurrogateGradient(attack, ("rounding",))
        x_adv = Budgeted(through, 300)(Single(net), x, y, seeded())
        assert float(threat.size(x_adv - x).max()) <= threat.eps * 1.0001
        return float(net(x_adv)[:, 1].min() + 100)

    few = reached(FewPixels(threat))
    assert 0.9 * largest <= few <= largest + 1e-4
    assert reached(APGD(threat, objective=expected_margin)) < few
