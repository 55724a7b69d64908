"""Folding BatchNorm changes nothing but the time."""

import copy

import pytest
import torch
from torch import nn

from lightning_rob.attacks import PGD, attacking
from lightning_rob.attacks.folding import folded
from lightning_rob.defenses import Single
from lightning_rob.nets import PreActResNet18, ResNet, ResNet20, SmallCNN
from lightning_rob.threat import Threat


def settled(net):
    """Give BatchNorm statistics and weights that are not the initial ones."""
    torch.manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.bias.data):
                tensor.normal_(0, 0.3)
            for tensor in (module.running_var, module.weight.data):
                tensor.uniform_(0.5, 2)
    return net.eval()


def norms(net):
    """How many BatchNorm layers still do something."""
    return sum(type(m) is nn.BatchNorm2d and "forward" not in vars(m) for m in net.modules())


class Counting(nn.Module):
    """Cannot be traced, and counts."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.calls = self.images = 0

    def forward(self, x):
        self.calls += 1
        self.images += len(x)
        return self.net(x)


class Twice(nn.Module):
    """A convolution whose output is used beside its BatchNorm: must not be folded."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        y = self.conv(x)
        return (self.norm(y) + y).mean((2, 3))


NETS = {
    "small": (lambda: SmallCNN(channels=3), 0),
    "resnet20": (ResNet20, 0),
    "option B": (lambda: ResNet(shortcut="B"), 0),
    "preact": (lambda: PreActResNet18(), 9),
    "counting": (lambda: Counting(SmallCNN(channels=3)), 3),
    "twice": (Twice, 1),
}


@pytest.mark.parametrize("name", NETS)
def test_logits_and_gradients_are_the_same(name):
    make, left = NETS[name]
    net = settled(make())
    modules, state = list(net.modules()), {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.rand(3, 3, 32, 32, requires_grad=True)
    before = net(x)
    (slope,) = torch.autograd.grad(before.square().sum(), x)
    with folded([net]):
        assert norms(net) == left
        after = net(x)
        (other,) = torch.autograd.grad(after.square().sum(), x)
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(slope, other, rtol=1e-3, atol=1e-3 * float(slope.abs().max()))
    assert all(a is b for a, b in zip(modules, net.modules(), strict=True))
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())


def test_layers_in_training_mode_are_left_alone():
    net = settled(SmallCNN(channels=3))
    net.layer1.train()
    with folded([net]):
        assert norms(net) == 1
    with folded([net.eval()]):
        assert norms(net) == 0


def test_a_network_that_somebody_listens_to_is_left_alone():
    net, seen = settled(SmallCNN(channels=3)), []
    handle = net.layer2.register_forward_hook(lambda *_: seen.append("call"))
    with folded([net]):
        assert norms(net) == 3
    assert not seen
    handle.remove()
    with folded([net]):
        assert norms(net) == 0


class Switching(nn.Module):
    """Asks a buffer, and a function that it was given, which way to go."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("raw", torch.zeros(()))
        self.join = lambda a, b: a

    def forward(self, x):
        y = self.conv(x)
        return self.join(y if self.raw else self.norm(y), y).mean((2, 3))


def both_ways(x, y):
    return x + y


def same_inside(net):
    x = torch.rand(2, 3, 8, 8)
    before = net(x)
    with folded([net]):
        torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-4)


def test_what_a_forward_asks_is_asked_again():
    net = settled(Switching())
    same_inside(net)
    net.raw.fill_(1)
    same_inside(net)
    net.raw, net.join = torch.zeros(()), both_ways
    same_inside(net)


def test_a_forward_of_the_instance_is_its_forward():
    net = settled(Switching())
    net.forward = lambda x: (net.norm(net.conv(x)) + net.conv(x)).mean((2, 3))
    same_inside(net)


class Viewing(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return self.norm(self.conv(x)).view_as(x).mean((2, 3))


def test_networks_that_view_their_features():
    same_inside(settled(Viewing()))


def test_a_defense_that_copies_its_network_copies_it_whole():
    class Copying(Single):
        def adapt(self, x, generator=None):
            return Single(copy.deepcopy(self.net))

    defense = Copying(settled(SmallCNN(channels=3)))
    with attacking(defense):
        copied = defense.adapt(torch.rand(2, 3, 32, 32)).net
    assert norms(copied) == 3
    assert copied.state_dict().keys() == defense.net.state_dict().keys()


def test_weights_that_change_between_attacks_are_seen():
    net = settled(SmallCNN(channels=3))
    x = torch.rand(2, 3, 32, 32)
    with folded([net]):
        before = net(x)
    with torch.no_grad():
        net.layer1[0].weight.mul_(3)
    with folded([net]):
        after = net(x)
    torch.testing.assert_close(after, net(x), rtol=1e-4, atol=1e-4)
    assert (after - before).abs().max() > 0.01


def test_everything_is_restored_when_an_attack_fails():
    net = settled(SmallCNN(channels=3))
    modules = list(net.modules())
    attack = PGD(Threat(), steps=1, step_size=0.01)
    with pytest.raises(ValueError, match="labels must be"):
        attack(Single(net), torch.rand(2, 3, 32, 32), torch.tensor([1, 99]))
    assert all(a is b for a, b in zip(modules, net.modules(), strict=True))
    assert all(weight.requires_grad for weight in net.parameters())
    assert norms(net) == 3


def test_a_counting_wrapper_counts_exactly_the_steps():
    net = Counting(settled(SmallCNN(channels=3)))
    x, y = torch.rand(5, 3, 32, 32), torch.arange(5)
    PGD(Threat(), steps=4, step_size=0.01)(Single(net), x, y)
    assert (net.calls, net.images) == (4, 20)
