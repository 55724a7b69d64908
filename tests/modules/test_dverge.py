"""DVERGE: its distillation, its loss by hand, and why one optimizer is enough."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob.attacks import PGD
from lightning_rob.modules import DVERGE
from lightning_rob.modules.dverge import distil, features
from lightning_rob.nets import ResNet20
from lightning_rob.threat import Threat
from tests.modules.support import ConvNet, Spy, batch
from tests.tiny import TinyNet


def test_distillation_takes_steps_of_its_gradients_sign():
    torch.manual_seed(0)
    net = TinyNet().eval()
    x, target = batch(4)[0], torch.rand(4, 3, 8, 8)
    z = x.clone()
    for _ in range(3):
        z.requires_grad_()
        gap = (net.first(z.flatten(1)) - net.first(target.flatten(1))).square().sum()
        z = z.detach() - 0.03 * torch.autograd.grad(gap, z)[0].sign()
        z = torch.min(torch.max(z, x - 0.07), x + 0.07).clamp(0, 1)
    torch.testing.assert_close(distil(net, "first", x, target, 0.07, 3, 0.03), z)


def test_features_of_an_activation_are_its_input():
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 5), nn.ReLU(inplace=True))
    x, _ = batch()
    torch.testing.assert_close(features(net, "2", x), net[1](x.flatten(1)))
    assert (features(net, "2", x) < 0).any()
    assert not net[2]._forward_pre_hooks


def test_each_epoch_has_its_layer(monkeypatch):
    module = DVERGE(lambda: ConvNet(), layers=["0", "1", ""])
    drawn = []
    for epoch in range(30):
        monkeypatch.setattr(DVERGE, "current_epoch", epoch)
        drawn.append((module.layer(), module.layer()))
    assert all(a == b for a, b in drawn)
    assert {a for a, _ in drawn} == {"0", "1", ""}


def by_hand(members, x, y, target, layer):
    """Each member's own loss on what is distilled from the others."""
    distilled = [distil(member, layer, x, target) for member in members]
    for i, member in enumerate(members):
        yield sum(F.cross_entropy(member(z), y) for j, z in enumerate(distilled) if j != i)


def test_one_optimizer_on_the_sum_is_an_optimizer_for_each_member():
    torch.manual_seed(0)
    module = DVERGE(ConvNet, members=3, layers=["1"]).double().train()
    members = [copy.deepcopy(member) for member in module.members]
    together = torch.optim.Adam(module.trainable_network().parameters(), 0.01, weight_decay=1e-4)
    each = [torch.optim.Adam(m.parameters(), 0.01, weight_decay=1e-4) for m in members]
    x, y = batch()[0].double(), batch()[1]
    for step in range(3):
        torch.manual_seed(step)
        loss = module.loss(x, y)
        together.zero_grad()
        loss.backward()
        together.step()
        torch.manual_seed(step)
        target = x[torch.randperm(len(x))]
        losses = list(by_hand(members, x, y, target, "1"))
        assert loss.item() == pytest.approx(sum(losses).item(), abs=1e-9)
        for optimizer, own in zip(each, losses, strict=True):
            optimizer.zero_grad()
            own.backward()
            optimizer.step()
    for a, b in zip(module.members, members, strict=True):
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=1e-6)


def test_adversarial_training_beside_it_attacks_each_member_alone():
    spy = Spy()
    module = DVERGE(TinyNet, members=2, layers=["first"], attack=spy)
    module.eval()
    x, y = batch()
    torch.manual_seed(1)
    loss = module.loss(x, y)
    assert [d.classifiers for d, _ in spy.calls] == [[m] for m in module.members]
    torch.manual_seed(1)
    target = x[torch.randperm(len(x))]
    diversity = sum(by_hand(module.members, x, y, target, "first"))
    adversarial = sum(F.cross_entropy(m(torch.ones_like(x)), y) for m in module.members)
    torch.testing.assert_close(loss, diversity + adversarial)


def test_warming_up_is_clean_training():
    attack = PGD(Threat("linf", 0.1), 1, 0.1)
    module = DVERGE(TinyNet, members=2, warmup_epochs=1, attack=attack).eval()
    x, y = batch()
    clean = sum(F.cross_entropy(m(x), y) for m in module.members)
    torch.testing.assert_close(module.loss(x, y), clean)


@pytest.mark.parametrize("layer", ["", "relu1", "layer1.0.conv1"])
def test_folding_does_not_change_distillation(layer, monkeypatch):
    torch.manual_seed(0)
    net = ResNet20().double().eval()
    x, target = torch.rand(2, 3, 3, 32, 32, dtype=torch.float64)
    fast = distil(net, layer, x, target, steps=3)
    monkeypatch.setattr("lightning_rob.modules.dverge._Features.foldable_networks", [])
    torch.testing.assert_close(distil(net, layer, x, target, steps=3), fast, rtol=0, atol=1e-9)


def test_a_convolution_before_batch_norm_is_not_folded():
    torch.manual_seed(0)
    net = ConvNet()
    for _ in range(3):
        net(torch.rand(8, 3, 8, 8))  # statistics that folding would move into the convolution
    net[1].weight.data.mul_(4)
    source, target = torch.rand(2, 4, 3, 8, 8)
    found = distil(net, "0", source, target, eps=1.0, steps=30, step_size=0.05)
    net.eval()
    far, near = (
        (features(net, "0", z) - features(net, "0", target)).norm() for z in (source, found)
    )
    assert near < 0.2 * far
