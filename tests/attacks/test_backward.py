"""SGM and LinBP against gradients by hand, block by block."""

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torchvision.models.resnet import Bottleneck

from lightning_rob.attacks import PGD, SGM, InsideBounds, LinBP, attacking
from lightning_rob.attacks.backward import residual_blocks
from lightning_rob.defenses import Ensemble, RandomTransforms, Single
from lightning_rob.nets import VGG16, ResNet, WideResNet
from lightning_rob.threat import Threat
from lightning_rob.transforms import HorizontalFlip
from tests.attacks.common import Noisy
from tests.tiny import TinyNet


class TwoBlocks(nn.Module):
    """Both blocks in one forward, with one ReLU for all, in place, and one as a function."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.convs = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x):
        z = self.stem(x)
        out = self.convs[1](self.relu(self.convs[0](z)))
        out += z
        z = self.relu(out)
        out = self.convs[3](F.relu(self.convs[2](z)))
        z = self.relu(out.add_(z))
        return self.last(z.mean((2, 3)))


def same(z):
    return z


def post(block, skip, *layers):
    """Convolutions with ReLUs between, an addition, a ReLU: before, branch, skip, after."""

    def branch(z, relu):
        for layer in layers[:-1]:
            z = relu(layer(z))
        return layers[-1](z)

    return same, branch, skip or same, torch.relu


def basic(block):
    skip = block.shortcut if hasattr(block, "shortcut") else block.downsample
    convs, norms = ["conv1", "conv2", "conv3"], ["bn1", "bn2", "bn3"]
    pairs = [(getattr(block, c), getattr(block, b)) for c, b in zip(convs, norms, strict=True)
             if hasattr(block, c)]  # fmt: skip
    return post(block, skip, *(nn.Sequential(*pair) for pair in pairs))


def pre(block):
    """Activations first; the shortcut of a block that changes shapes leaves after the first."""
    skip = block.shortcut if block.convShortcut is None else block.convShortcut

    def rest(z, relu):
        return block.conv2(relu(block.bn2(block.conv1(z))))

    if skip is None:
        return same, lambda z, relu: rest(relu(block.bn1(z)), relu), same, same
    return lambda z: torch.relu(block.bn1(z)), rest, skip, same


def two(net):
    pairs = (net.convs[:2], net.convs[2:])
    return (
        net.stem,
        [[post(net, None, *pair) for pair in pairs]],
        lambda z: net.last(z.mean((2, 3))),
    )


def staged(kind, *stages):
    return [list(map(kind, stage)) for stage in stages]


def small(net):
    stages = staged(basic, net.layer1, net.layer2, net.layer3)
    stem = nn.Sequential(net.normalize, net.conv1, net.bn1, nn.ReLU())
    return stem, stages, lambda z: net.linear(z.mean((2, 3)))


def wide(net):
    stages = staged(pre, net.block1.layer, net.block2.layer, net.block3.layer)
    stem = nn.Sequential(net.normalize, net.conv1)
    return stem, stages, lambda z: net.fc(net.bn1(z).relu().mean((2, 3)))


def vision(net):
    stages = staged(basic, net.layer1, net.layer2, net.layer3, net.layer4)
    stem = nn.Sequential(net.conv1, net.bn1, nn.ReLU(), net.maxpool)
    return stem, stages, lambda z: net.fc(z.mean((2, 3)))


# each as its stem, the blocks of each stage, and its head
NETS = {
    "two blocks": (TwoBlocks, two),
    "A": (lambda: ResNet(14, 4, (4, 8, 16)), small),
    "wide": (lambda: WideResNet(16, 1, 4), wide),
    "torchvision 18": (lambda: torchvision.models.resnet18(num_classes=4), vision),
    "bottlenecks": (lambda: torchvision.models.ResNet(Bottleneck, [2, 1, 1, 1], 4), vision),
}
all_nets = pytest.mark.parametrize("name", NETS)


@cache
def built(name, seed=0):
    """With statistics of BatchNorm that are not those of a net that has seen nothing."""
    torch.manual_seed(seed)
    net = NETS[name][0]().double().eval()
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.running_mean.normal_(0, 0.3)
            norm.running_var.uniform_(0.5, 2)
            norm.weight.data.uniform_(0.5, 1.5)
            norm.bias.data.normal_(0, 0.3)
    return net


def images(count=2, seed=1):
    return torch.rand((count, 3, 16, 16), generator=torch.Generator().manual_seed(seed)).double()


def climbed(logits):
    return logits[:, 0].exp().sum()


def gradient(net, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(climbed(net(x)), x)[0]


def vjp(function, z, g):
    z = z.detach().requires_grad_()
    return torch.autograd.grad(function(z), z, g)[0]


def reference(name, net, x, gamma=1.0, start=None, first_blocks=False):
    """Back through the blocks by hand."""
    stem, stages, head = NETS[name][1](net)
    blocks = [block for stage in stages for block in stage]
    in_stages = name != "two blocks"  # which are in one forward
    exact = {stage[0] for stage in stages if in_stages and not first_blocks}
    z, inputs = stem(x), []
    for before, branch, skip, after in blocks:
        inputs.append(z)
        entry = before(z)
        z = after(branch(entry, torch.relu) + skip(entry))
    z = z.detach().requires_grad_()
    (g,) = torch.autograd.grad(climbed(head(z)), z)
    first = len(blocks) if start is None else int(start * len(blocks))
    for i, (before, branch, skip, after) in reversed(list(enumerate(blocks))):
        entry = before(inputs[i])
        met = branch(entry, torch.relu) + skip(entry)
        g = vjp(after, met, g)
        through = vjp(lambda e, b=branch: b(e, torch.relu), entry, g)
        if i >= first:
            linear = vjp(lambda e, b=branch: b(e, lambda z: z + (z.relu() - z).detach()), entry, g)
            ratio = through.flatten(1).norm(dim=1) / linear.flatten(1).norm(dim=1)
            through = linear * ratio.view(-1, 1, 1, 1)
        identity = skip is same or isinstance(skip, nn.Identity)
        shrink = gamma if identity and blocks[i] not in exact else 1.0
        g = vjp(before, inputs[i], shrink * through + vjp(skip, entry, g))
    return vjp(stem, x, g)


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9 * b.abs().max().item())


@all_nets
@pytest.mark.parametrize("first_blocks", [False, True])
def test_sgm(name, first_blocks):
    net, x = built(name), images()
    with SGM(0.3, first_blocks)(net):
        ours = gradient(net, x)
    close(ours, reference(name, net, x, 0.3, first_blocks=first_blocks))
    assert not torch.allclose(ours, gradient(net, x), rtol=1e-2)


class Hooked(nn.Module):
    """A ResNet of two stages with three blocks each, whose ReLUs are modules of their own."""

    class Block(nn.Module):
        def __init__(self, inputs, width):
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, width, 3, padding=1)
            self.relu1 = nn.ReLU()
            self.conv2 = nn.Conv2d(width, width, 3, padding=1)
            self.relu2 = nn.ReLU()
            self.skip = nn.Conv2d(inputs, width, 1) if inputs != width else nn.Identity()

        def forward(self, x):
            return self.relu2(self.conv2(self.relu1(self.conv1(x))) + self.skip(x))

    def __init__(self, lists=nn.Sequential, names=("layer1", "layer2")):
        super().__init__()
        self.conv1, self.relu1 = nn.Conv2d(3, 4, 3), nn.ReLU()
        self.names = names
        for name, widths in zip(names, [(4, 4, 4, 4), (4, 6, 6, 6)], strict=True):
            setattr(self, name, lists(*map(self.Block, widths, widths[1:])))
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        z = self.relu1(self.conv1(x))
        for name in self.names:
            for block in getattr(self, name):
                z = block(z)
        return self.fc(z.mean((2, 3)))


def hooked_gradient(net, x, gamma):
    """By the hooks of Wu et al. and of the RT authors, on ReLUs chosen by their names."""
    handles = [
        part.register_full_backward_hook(lambda module, into, out: (gamma * into[0],))
        for name, part in net.named_modules()
        if name.startswith("layer") and "relu1" in name and "0.relu" not in name
    ]
    try:
        return gradient(net, x)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("lists", [nn.Sequential, lambda *blocks: nn.ModuleList(blocks)])
@pytest.mark.parametrize("names", [("layer1", "layer2"), ("early", "late")])
def test_sgm_is_that_of_the_released_hooks(lists, names):
    """The first block of a stage keeps its gradient though its skip is the identity."""
    torch.manual_seed(0)
    net, x = Hooked(lists, names).double(), images()
    twin = Hooked().double()
    twin.load_state_dict(dict(zip(twin.state_dict(), net.state_dict().values(), strict=True)))
    with SGM(0.3)(net):
        ours = gradient(net, x)
    released, exact = hooked_gradient(twin, x, 0.3), gradient(twin, x)
    close(ours, released)
    with SGM(0.3, first_blocks=True)(net):
        all_blocks = gradient(net, x)
    for other in (all_blocks, exact):
        assert torch.cosine_similarity(other.flatten(), released.flatten(), 0) < 0.999


@all_nets
@pytest.mark.parametrize("start", [0.0, 0.5])
def test_linbp(name, start):
    net, x = built(name), images()
    with LinBP(start)(net):
        ours = gradient(net, x)
    close(ours, reference(name, net, x, 1.0, start))
    assert not torch.allclose(ours, gradient(net, x), rtol=1e-2)


@pytest.mark.parametrize("name", ["two blocks", "wide", "torchvision 18"])
def test_both_in_either_order(name):
    net, x = built(name), images()
    expected = reference(name, net, x, 0.5, 0.5)
    with SGM(0.5)(net), LinBP(0.5)(net):
        close(gradient(net, x), expected)
    with LinBP(0.5)(net), SGM(0.5)(net):
        close(gradient(net, x), expected)
        with SGM(0.5)(net):
            close(gradient(net, x), reference(name, net, x, 0.25, 0.5))
        close(gradient(net, x), expected)
    close(gradient(net, x), reference(name, net, x))


@all_nets
def test_with_folded_batchnorm_logits_stay_bit_for_bit(name):
    """In single precision; and gradients are those by hand."""
    net, x = copy.deepcopy(built(name)).float(), images().float()
    for trick in (SGM(0.5), LinBP(0.0)):
        with attacking(Single(net)) as defense:
            expected = net(x)
            with trick(defense):
                assert torch.equal(net(x), expected)
                assert torch.equal(net(x.clone().requires_grad_()), expected)
                with torch.no_grad():
                    assert torch.equal(net(x), expected)
    net, x = built(name), images()
    with attacking(Single(net)), SGM(0.5)(net), LinBP(0.5)(net):
        ours = gradient(net, x)
    close(ours, reference(name, net, x, 0.5, 0.5))


def everything(net):
    return {
        name: (dict(vars(part)), list(part._forward_hooks), list(part._backward_hooks))
        for name, part in net.named_modules()
    }


@all_nets
@pytest.mark.parametrize("trick", [SGM(0.5), LinBP(0.0)], ids=["SGM", "LinBP"])
def test_leaves_nothing_behind(name, trick):
    net, x = built(name), images()
    before, expected = everything(net), gradient(net, x)
    torch.manual_seed(3)
    state = torch.get_rng_state()
    with trick(net):
        assert everything(net) != before
        assert [key for key, _ in net.named_modules()] == list(before)
    assert everything(net) == before
    with pytest.raises(RuntimeError, match="on the way"), trick(net):
        raise RuntimeError("on the way")
    assert everything(net) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(gradient(net, x), expected)


# which blocks are found
class Nested(nn.Module):
    """A skip connection within a branch of another one."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

    def forward(self, x, relu=torch.relu, weigh=same):
        inner = self.convs[0](x)
        inner = inner + weigh(self.convs[2](relu(self.convs[1](inner))))
        return (x + weigh(inner)).mean((2, 3))


class Plain(Nested):
    def forward(self, x):
        return super().forward(x)


def test_branches_within_branches():
    torch.manual_seed(0)
    net, x = Plain().double(), images()
    with SGM(0.3)(net):
        ours = gradient(net, x)

    def shrunk(z):
        return 0.3 * z + 0.7 * z.detach()

    close(ours, gradient(lambda z: Nested.forward(net, z, weigh=shrunk), x))
    with LinBP(0.0)(net):
        assert torch.equal(net(x), Nested.forward(net, x))
        assert not torch.allclose(gradient(net, x), ours)
    (block,) = residual_blocks(net)[0]
    assert len(block.branches) == 2


@pytest.mark.parametrize(("net", "trick"), [(TinyNet, SGM(0.5)), (VGG16, LinBP(0.0))])
def test_needs_a_residual_network(net, trick):
    defense = Ensemble([net(), net()])
    with pytest.raises(TypeError, match=f"no skip connections in {net.__name__}: leave"):
        PGD(Threat(), 1, 0.1, backward=trick)(defense, torch.rand(1, 3, 32, 32), torch.tensor([0]))


# in attacks
def defenses():
    first, second = copy.deepcopy(built("A")).float(), copy.deepcopy(built("A", 5)).float()
    flips = RandomTransforms(second, [HorizontalFlip(p=0.5)], size=1, draws=2)
    return {
        "single": Single(first),
        "ensemble": Ensemble([first, second, first]),
        "noisy": Noisy(first, 0.05),
        "transformed": flips,
    }


BOTH = (SGM(0.2), LinBP(0.5))


@pytest.mark.parametrize(
    ("name", "trick"),
    [("single", SGM(0.2)), ("noisy", LinBP(0.0)), ("ensemble", BOTH), ("transformed", BOTH)],
)
def test_attacks_with_modified_gradients(name, trick):
    defense, x = defenses()[name], images().float()
    threat = Threat("linf", 0.05)
    y = torch.tensor([0, 1])

    def attacked(backward):
        generator = torch.Generator().manual_seed(0)
        return PGD(threat, 3, 0.02, draws=2, backward=backward)(defense, x, y, generator)

    tricked = attacked(trick)
    assert threat.size(tricked - x).max() <= 0.05 + 1e-6
    assert not torch.equal(tricked, attacked(None))
    torch.testing.assert_close(attacked(SGM(1.0)), attacked(None), rtol=0, atol=0)
    assert torch.equal(attacked([trick] if callable(trick) else trick), tricked)


def test_tricks_go_together():
    """SGM and LinBP look into the network, whose forward is another one meanwhile."""
    net, x, y = built("A"), images().round(), torch.tensor([0, 1])
    hiding = Single(nn.Sequential(nn.Hardtanh(0, 1), net))
    attack = PGD(Threat("linf", 0.05), 1, 0.05, random_start=False, backward=SGM(0.2))
    expected = attack(Single(net), x, y)
    assert torch.equal(attack(hiding, x, y), x)
    for order in ([SGM(0.2), InsideBounds(1e-9)], [InsideBounds(1e-9), SGM(0.2)]):
        moved = replace(attack, backward=order)(hiding, x, y)
        assert (moved - expected).abs().gt(1e-9).double().mean() < 1e-3


def test_linbp_of_a_dead_branch_is_zero():
    """A branch that passes no gradient back gets none."""
    net, x = copy.deepcopy(built("two blocks")), images()
    nn.init.constant_(net.convs[0].bias, -100.0)
    with LinBP(0.0)(net):
        ours = gradient(net, x)
    assert ours.isfinite().all()
    with LinBP(0.5)(net):
        close(ours, gradient(net, x))
