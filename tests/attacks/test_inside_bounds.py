"""InsideBounds: pixels that are exactly black or white, of a network that clamps its input."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob.attacks import ARC, CW, PGD, AutoAttack, DeepFool, InsideBounds, WithBackward
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.objectives import linear
from lightning_rob.threat import Threat
from tests.attacks.common import Affine, assert_inside
from tests.attacks.test_cw import sizes, trained
from tests.audit.planted import Through, clamped
from tests.tiny import TinyNet

EDGES = {
    "hardtanh": clamped,
    "relu": lambda x: 1 - (1 - x.relu()).relu(),
    "relu6": lambda x: F.relu6(6 * x) / 6,
    "clamp": lambda x: x.clamp(0, 1),  # slope 0 at its bounds from torch 2.14 on
}
FREE = {"linf": Threat("linf", 1), "l2": Threat("l2", 100)}


def affine(edge=lambda x: x, classes=2):
    """A linear net of images that are black, white and grey in parts, by such a clamp or bare."""
    generator = torch.Generator().manual_seed(0)
    net = Affine(48, classes).double().requires_grad_(False)
    net.weight.copy_(torch.randn(classes, 48, generator=generator))
    net.bias.copy_(-0.5 * net.weight.sum(1))
    x = (2 * torch.rand(12, 3, 4, 4, generator=generator).double() - 0.5).clamp(0, 1)
    x[0], x[1] = 0, 1
    return Single(Through(net, edge)), x, net(x).argmax(1)


@pytest.mark.parametrize("edge", EDGES.values(), ids=EDGES)
def test_all_pixels_of_a_clamping_network_are_attacked(edge):
    defense, x, y = affine(edge)
    attack = PGD(Threat("linf", 0.1), 1, 0.1, linear, random_start=False)
    if edge is not EDGES["clamp"]:
        stuck = attack(defense, x, y)
        at_bound = (x == 0) | (x == 1)
        assert torch.equal(stuck[at_bound], x[at_bound])
        assert torch.equal(stuck[:2], x[:2])
    weight = defense.net.net.weight
    normal = (weight[1 - y] - weight[y]).view_as(x)
    worst = (x + 0.1 * normal.sign()).clamp(0, 1)
    assert ((worst != x)[:2].flatten(1).sum(1) > 10).all()
    for seeing in (replace(attack, backward=InsideBounds()), WithBackward(attack, InsideBounds())):
        torch.testing.assert_close(seeing(defense, x, y), worst, rtol=0, atol=1e-12)


@pytest.mark.parametrize("threat", FREE.values(), ids=FREE)
@pytest.mark.parametrize("kind", ["linear", "trained"])
def test_deepfool_of_a_clamping_network_is_as_small_as_without_the_clamp(threat, kind):
    if kind == "linear":
        (bare, x, y), hiding = affine(classes=4), affine(clamped, classes=4)[0]
    else:
        bare, x, y = trained()
        bare, x = copy.deepcopy(bare).double(), (3 * x.double() - 1).clamp(0, 1)
        hiding = Single(Through(bare.net, clamped))
    assert ((x == 0) | (x == 1)).double().mean() > 0.1
    attack = DeepFool(threat)
    expected = sizes(attack, bare, x, y)
    assert sizes(attack, hiding, x, y).mean() > 1.1 * expected.mean()
    seeing = WithBackward(attack, InsideBounds())
    torch.testing.assert_close(sizes(seeing, hiding, x, y), expected, rtol=1e-4, atol=0)


OTHERS = {
    "arc": ARC(Threat("linf", 0.2), 3, 0.2),
    "cw": CW(FREE["l2"], 20, 0.05, 3, 1.0),
    "apgd": AutoAttack(Threat("linf", 0.2), "custom", ("apgd-ce",)),
}


@pytest.mark.parametrize("attack", OTHERS.values(), ids=OTHERS)
def test_other_attacks_through_a_clamp(attack):
    """They find the same images as without the clamp, within the threat."""
    bare, x, y = affine()
    seeing = WithBackward(attack, InsideBounds())
    assert seeing.threat == attack.threat

    def found(attack, defense):
        return attack(defense, x, y, torch.Generator().manual_seed(0))

    expected = found(attack, bare)
    assert not torch.allclose(found(attack, affine(clamped)[0]), expected, atol=1e-3)
    x_adv = found(seeing, affine(clamped)[0])
    torch.testing.assert_close(x_adv, expected, rtol=0, atol=1e-5)
    assert_inside(attack.threat, x_adv, x)


def test_logits_stay_what_they_are_to_the_last_bit():
    net = Through(TinyNet().eval(), clamped)
    x = torch.rand(5, 3, 8, 8).mul(2).sub(0.5).clamp(0, 1)
    with InsideBounds(0.2)(Single(net)):
        seen = net(x.clone().requires_grad_())
        assert seen.requires_grad
        assert torch.equal(seen.detach(), net(x))
    assert torch.equal(seen.detach(), net(x))
    assert "forward" not in vars(net)
    with pytest.raises(ArithmeticError), InsideBounds()(Single(net)):
        raise ArithmeticError
    assert "forward" not in vars(net)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_hair_is_at_least_a_step_of_rounding(dtype):
    x = torch.tensor([[0.0, 1.0]], dtype=dtype).requires_grad_()
    net = Through(nn.Identity(), clamped)
    with InsideBounds(1e-9)(Single(net)):
        (gradient,) = torch.autograd.grad(net(x).sum(), x)
    assert gradient.tolist() == [[1, 1]]


def test_every_member_has_gradients_inside():
    net, x = Through(TinyNet().double().eval(), clamped), torch.zeros(2, 3, 8, 8).double()
    defense = Ensemble([TinyNet().double().eval(), net], [0.0, 1.0])
    attack = PGD(Threat("linf", 0.1), 1, 0.1, random_start=False, backward=InsideBounds())
    assert (attack(defense, x, net(x).argmax(1)) > 0).double().mean() > 0.2
