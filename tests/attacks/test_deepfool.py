"""Linear networks take one step to the nearest boundary; others a few."""

import pytest
import torch

from lightning_rob.attacks import DeepFool
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.threat import Threat
from tests.attacks.common import Affine, assert_inside
from tests.attacks.test_cw import affine, distances

FREE = {"linf": Threat("linf", 1), "l2": Threat("l2", 100)}
both_norms = pytest.mark.parametrize("threat", FREE.values(), ids=FREE.keys())


def order_of_dual(threat):
    return 1 if threat.norm == "linf" else 2


# closed forms
@both_norms
@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize(("gain", "overshoot"), [(0.3, 0.02), (30.0, 1e-6)])
def test_smallest_perturbation_of_a_linear_net(threat, classes, gain, overshoot):
    net, x, y = affine(classes, gain=gain)
    x_adv = DeepFool(threat, overshoot=overshoot)(Single(net), x, y)
    assert (net(x_adv).argmax(1) != y).all()
    expected = (1 + overshoot) * (distances(net, x, y, order_of_dual(threat)) + 1e-4)
    torch.testing.assert_close(threat.size(x_adv - x), expected, rtol=1e-7, atol=0)


@both_norms
def test_bounds_in_the_way(threat):
    """A step that a bound cuts short is followed by others."""
    net, x, y = affine(3, gain=5.0)
    x = x.round()
    y = net(x).argmax(1)
    x_adv = DeepFool(threat)(Single(net), x, y)
    assert (net(x_adv).argmax(1) != y).all()
    assert_inside(threat, x_adv, x)
    assert (threat.size(x_adv - x) >= distances(net, x, y, order_of_dual(threat))).all()


def test_candidates_are_the_largest_logits():
    """The runner-up's boundary is at 0.2 here, that of the class behind it at 0.1."""
    net = Affine(4, 3).double().requires_grad_(False)
    net.weight.copy_(torch.tensor([[0, 0, 0, 0], [0.5, 0, 0, 0], [0, 10.0, 0, 0]]))
    net.bias.copy_(torch.tensor([0.0, -0.35, -6.0]))
    x = torch.full((1, 1, 2, 2), 0.5).double()
    y = torch.tensor([0])
    one = DeepFool(FREE["l2"], candidates=1, overshoot=0)(Single(net), x, y)
    both = DeepFool(FREE["l2"], overshoot=1e-6)(Single(net), x, y)
    assert (one - x).flatten().tolist() == pytest.approx([0.2, 0, 0, 0], abs=2e-4)
    assert (both - x).flatten().tolist() == pytest.approx([0, 0.1, 0, 0], abs=2e-4)


# distributions
@both_norms
def test_ensemble_is_its_mean_logits(threat):
    parts = [affine(3, seed=seed)[0] for seed in (0, 1)]
    mean, x, _ = affine(3)
    for a, b, value in zip(*(net.parameters() for net in (*parts, mean)), strict=True):
        value.copy_(0.7 * a + 0.3 * b)
    y = mean(x).argmax(1)
    expected = DeepFool(threat)(Single(mean), x, y)
    x_adv = DeepFool(threat)(Ensemble(parts, [0.7, 0.3]), x, y)
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-6)
