"""Folding BatchNorm changes nothing but the time."""

import copy

import pytest
import torch
from torch import nn

from lightning_rob.attacks import PGD, attacking, folding
from lightning_rob.attacks.folding import folded
from lightning_rob.defenses import Ensemble, Mixture, Single
from lightning_rob.nets import PreActResNet18, ResNet, ResNet20, SmallCNN
from lightning_rob.threat import Threat
from tests.attacks.common import Recording, images, seeded


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


class Untraceable(Recording):
    """Cannot be traced, and counts."""

    def forward(self, x):
        len(x)
        return super().forward(x)


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
    "untraceable": (lambda: Untraceable(SmallCNN(channels=3)), 3),
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


def test_layers_with_hooks_or_in_training_mode_are_left_alone():
    net, seen = settled(SmallCNN(channels=3)), []
    handle = net.layer2.register_forward_hook(lambda *_: seen.append("call"))
    with folded([net]):
        assert norms(net) == 3
    assert not seen
    handle.remove()
    net.layer1.train()
    with folded([net]):
        assert norms(net) == 1
    with folded([net.eval()]):
        assert norms(net) == 0
    with folded([net.bfloat16()]):  # its sums would round otherwise
        assert norms(net) == 3


def test_a_defense_that_copies_its_network_copies_it_whole():
    class Copying(Single):
        def adapt(self, x, generator=None):
            return Single(copy.deepcopy(self.net))

    defense = Copying(settled(SmallCNN(channels=3)))
    with attacking(defense) as attacked:
        copied = attacked.adapt(torch.rand(2, 3, 32, 32)).net
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


# networks as people write them
class Styled(nn.Module):
    """A convolution and batch norm with statistics that matter, called in one of many ways."""

    def __init__(self, style="plain"):
        super().__init__()
        self.style, self.use, self.settings = style, True, {"norm": True}
        generator = torch.Generator().manual_seed(1)
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.linear = nn.Linear(6 * 36, 4)
        for tensor in (self.conv.weight, self.norm.running_mean, self.norm.bias):
            tensor.data = 0.5 * torch.randn(tensor.shape, generator=generator)
        for tensor in (self.norm.running_var, self.norm.weight):
            tensor.data = 0.5 + torch.rand(tensor.shape, generator=generator)
        if style == "two names":
            self.stages = nn.ModuleList([self.conv])
        elif style == "plain list":
            self.stages = [self.conv]
        elif style == "reused":
            self.block = nn.Sequential(self.conv, self.norm)

    def forward(self, x):
        return self.linear(STYLES[self.style](self, x).relu().flatten(1))


def tied(net, x):
    """A weight used again beside its layer."""
    back = nn.functional.conv_transpose2d(net.norm(net.conv(x)).relu(), net.conv.weight, padding=1)
    return back.expand(-1, 6, -1, -1)


def reused(net, x):
    """A part of a block called alone, by a parent that looks at its input."""
    if x.shape[2] != 6:
        raise ValueError("wrong size")
    return net.block(x) + net.block[0](x)


def switched(net, x):
    """Batch norm can be switched off by a plain attribute, or by a dictionary of settings."""
    on = net.use and net.settings["norm"]
    return net.norm(net.conv(x)) if on else net.conv(x)


STYLES = {
    "plain": lambda net, x: net.norm(net.conv(x)),
    "viewing": lambda net, x: net.norm(net.conv(x)).view(x.size(0), 6, 6, 6),
    "two names": lambda net, x: net.norm(net.stages[0](x)),
    "plain list": lambda net, x: net.norm(net.stages[0](x)),
    "tied": tied,
    "reused": reused,
    "switched": switched,
}


def assert_predicts_alike_when_attacked(defense, x):
    with torch.no_grad():
        expected = defense.eval().logits(x)
    with attacking(defense) as defense, torch.no_grad():
        inside = defense.logits(x)
    torch.testing.assert_close(inside, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("style", STYLES)
def test_network_is_the_same_when_attacked(style):
    assert_predicts_alike_when_attacked(Single(Styled(style)), images(6, seed=28)[0])


@pytest.mark.parametrize("setting", [{"use": False}, {"settings": {"norm": False}}])
def test_network_may_change_between_attacks(setting):
    (x, y), net = images(6, seed=28), Styled("switched")
    attack = PGD(Threat("linf", 0.1), 3, 0.05, random_start=False)
    attack(Single(net), x, y)
    vars(net).update(setting)
    found = attack(Single(net), x, y)
    net.conv.register_forward_hook(lambda *_: None)  # a network with hooks is never folded
    assert torch.equal(found, attack(Single(net), x, y))


class Exit(nn.Module):
    """A second member on the first one's convolution, without its batch norm or with another."""

    def __init__(self, trunk, norm):
        super().__init__()
        self.conv, self.norm, self.linear = trunk.conv, norm, nn.Linear(6 * 36, 4)

    def forward(self, x):
        return self.linear(self.norm(self.conv(x)).relu().flatten(1))


@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm2d(6)], ids=["none", "other"])
@pytest.mark.parametrize("first", [0, 1])
def test_members_may_share_a_layer(norm, first):
    x, _ = images(6, seed=28)
    trunk = Styled()
    members = [trunk, Exit(trunk, norm())]
    assert_predicts_alike_when_attacked(Ensemble([members[first], members[1 - first]]), x)


def test_a_member_may_be_there_twice():
    x, _ = images(6, seed=28)
    one, other = Styled(), Styled()
    defense = Mixture([Ensemble([one, other]), Single(one)])
    assert_predicts_alike_when_attacked(defense, x)
    with attacking(defense) as defense:
        assert_predicts_alike_when_attacked(Single(one), x)


class RandomNorms(nn.Module):
    """A shared convolution, and one of several BatchNorms drawn in each forward."""

    def __init__(self, draw):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.draw = nn.Conv2d(3, 4, 3), draw
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        for i, norm in enumerate(self.norms):
            nn.init.constant_(norm.weight, (-1.0) ** i * (1 + i))
        self.linear = nn.Linear(4 * 36, 4)

    def forward(self, x):
        return self.linear(self.norms[self.draw()](self.conv(x)).relu().flatten(1))


@pytest.mark.parametrize("period", [1, 2, 3])
def test_a_forward_that_takes_other_branches_is_attacked_as_it_is(period):
    """The branch depends on something that no setting of the network shows."""

    def attacked(hooked):
        calls = iter(range(10**6))
        net = RandomNorms(lambda: next(calls) // period % 3).eval()
        if hooked:  # a network with hooks is never folded
            net.conv.register_forward_hook(lambda *_: None)
        x, y = torch.rand(6, 3, 8, 8, generator=seeded()), torch.arange(6) % 4
        attack = PGD(Threat("linf", 0.1), 5, 0.03, random_start=False)
        if not hooked:
            attack(Single(net), x, y)  # finds out that the network cannot be folded
            assert net in folding._unfoldable
            calls = iter(range(10**6))
        return attack(Single(net), x, y)

    assert torch.equal(attacked(False), attacked(True))


class Switching(nn.Module):
    """Its path depends on a buffer and on a function."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("raw", torch.zeros(()))
        self.join = lambda a, b: a

    def forward(self, x):
        y = self.conv(x)
        return self.join(y if self.raw else self.norm(y), y).mean((2, 3))


def same_inside(net):
    x = torch.rand(2, 3, 8, 8)
    before = net(x)
    with folded([net]):
        torch.testing.assert_close(net(x), before, rtol=1e-4, atol=1e-4)


def test_another_use_of_a_convolution_is_noticed():
    """Its folded output, which BatchNorm takes too, would be that of another network."""
    net = settled(Switching())
    same_inside(net)
    net.join = lambda a, b: a + b
    same_inside(net)
    other = settled(Switching())
    other.forward = lambda x: (other.norm(other.conv(x)) + other.conv(x)).mean((2, 3))
    same_inside(other)
