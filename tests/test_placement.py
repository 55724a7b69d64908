"""Everything stays on its device: transformations, games and losses, on an emulated accelerator."""

from functools import partial

import pytest
import torch
from torch import nn

import lightning_rob as rob
from lightning_rob import ARC, PGD, Ensemble, RandomTransforms, Single, Threat, TransformEnsemble
from lightning_rob.defenses import Mixture
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.modules import ADP, BAT, DVERGE, GAL, TRS, AdversarialTraining, FreeTraining
from lightning_rob.nets import AthenaCNN, DANNNet, MNISTNet, ResNet20, SmallCNN
from lightning_rob.objectives import worst_ce
from lightning_rob.randomness import Streams
from lightning_rob.rules import majority
from lightning_rob.transforms import catalogue
from lightning_rob.transforms.blur import GaussianBlur
from lightning_rob.transforms.corruptions import Brightness
from lightning_rob.transforms.noise import GaussianNoise
from lightning_rob.transforms.pool import pool
from tests.fakedev import DEVICE, Misplaced, emulated

LINF, L2 = Threat("linf", 0.1), Threat("l2", 10.0)
PLAIN = PGD(LINF, 2, 0.05, keep_best=True)
LEAST = PGD(LINF, 2, 0.05, keep_best=True, objective=worst_ce)
PLACES = ["clean", "rotate_90", "flip_both", "shift_left"]
NAMES = [*PLACES, "filter_median", "denoise_wavelet", "noise_gaussian"]


def images(count=6, channels=1, size=28):
    x = torch.rand(count, channels, size, size, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(count) % 10


def source(there):
    return tuple(t.to(DEVICE) if there else t for t in images(24))


@pytest.fixture
def device():
    torch.manual_seed(0)
    with emulated() as there:
        yield there


def placed(transform, x):
    """Check where a transform's parameters, result and gradient are."""
    drawn = transform.sample(x, Streams.from_index(torch.arange(len(x)).to(DEVICE)))
    assert all(part.device == DEVICE for part in drawn)
    changed = transform(x, *drawn)
    assert changed.device == DEVICE and torch.isfinite(changed).all()
    if transform.reversible:
        assert transform.undo(changed).device == DEVICE
    if transform.differentiable:
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(transform(leaf, *drawn).sum(), leaf)
        assert gradient.device == DEVICE


POOL = pool()
KINDS = {type(transform): name for name, transform in reversed(POOL.items())}


@pytest.mark.parametrize("name", KINDS.values())
def test_transformations_of_the_pool(device, name):
    placed(POOL[name], images(2)[0].to(device))


@pytest.mark.parametrize("name", catalogue())
def test_differentiable_transforms(device, name):
    placed(catalogue()[name](), images(2, channels=3, size=16)[0].to(device))


def ensemble(names, rule=majority):
    return TransformEnsemble([AthenaCNN(hidden=8) for _ in names], names, rule)


def paa(aggregate, **options):
    inner = PGD(Threat("linf", 0.05), 2, 0.02)
    return rob.PAA(inner, aggregate=aggregate, rounds=2, **options)


def dann(there=False):
    return rob.DANN(DANNNet(width=4), source=source(there), epochs=1, batch_size=8)


def tadv(there=False, **options):
    net = MNISTNet(width=4)
    return rob.TADV(net, source=source(there), attack=PLAIN, epochs=1, batch_size=8, **options)


def rmc(there=False):
    return rob.RMC(MNISTNet(width=4), source=source(there), attack=PLAIN, neighbours=10, epochs=2)


def urejectron(there=False):
    return rob.URejectron(SmallCNN(10, 1), source=source(there), epochs=1, batch_size=8)


def single():
    return Single(SmallCNN(10, 1))


def members():
    return Ensemble([SmallCNN(10, 1), SmallCNN(10, 1)], probs=[0.9, 0.1])


def members_there():
    """An ensemble of networks that are on the device already."""
    return Ensemble([SmallCNN(10, 1).to(DEVICE), SmallCNN(10, 1).to(DEVICE)], probs=[0.9, 0.1])


def random_transforms():
    drawn = [GaussianNoise(alpha=0.1), GaussianBlur()]
    return RandomTransforms(SmallCNN(10, 1), drawn, size=2, draws=2)


RELATIVE = rob.OnDifferentiable(PGD(Threat("l2", 0.3, relative=True), 2, 0.1))
GAMES = {
    "DANN, GMSA": (dann, rob.GMSA(PLAIN, rounds=1)),
    "TADV, transferred": (tadv, rob.TransferFromStatic(PLAIN)),
    "TADV, source there": (partial(tadv, True), rob.GMSA(LEAST, rounds=2)),
    "RMC, source there, GMSA": (partial(rmc, True), rob.GMSA(PLAIN, rounds=1)),
    "URejectron, part of the images": (partial(urejectron, True), rob.PartialBatchAttack(PLAIN)),
    "DENT, confident": (
        lambda: rob.DENT(SmallCNN(10, 1)),
        rob.GMSA(rob.HighConfidence(PLAIN, 1, 1), rounds=1),
    ),
    "DENT, through adaptation": (lambda: rob.DENT(SmallCNN(10, 1)), rob.ThroughAdaptation(PLAIN)),
    "ensemble of transformations, TAA": (partial(ensemble, NAMES), rob.TAA(PLAIN)),
    "ensemble of transformations, PAA": (partial(ensemble, PLACES), paa("AvgP")),
    **{f"PAA, {a}": (partial(ensemble, PLACES), paa(a)) for a in ("MVoteP", "WSumP")},
    "ensemble of transformations, a relative radius": (partial(ensemble, NAMES), RELATIVE),
    "CW": (single, rob.CW(L2, steps=3, binary_steps=2)),
    "DeepFool": (single, rob.DeepFool(L2, steps=3)),
    "ARC": (members, ARC(LINF, steps=2, step_size=0.1)),
    "ARC in l2": (members, ARC(Threat("l2", 1.0), steps=2, step_size=0.1)),
    "climb": (members_there, rob.LatticeClimber(LINF, steps=2)),
    "climb on one network": (single, rob.LatticeClimber(LINF, steps=2)),
    "climb on a mixture": (
        lambda: Mixture([single(), members()]),
        rob.LatticeClimber(LINF, steps=2),
    ),
    "random member": (members, rob.RandomMember(PLAIN)),
    "one member": (members, rob.OnMember(PLAIN, 0)),
    "folded BatchNorm": (lambda: Single(ResNet20(mean=(0.1,), std=(0.3,))), PLAIN),
    "fooled images leave": (single, PGD(LINF, 3, 0.05, restarts=2, early_stop=True)),
    "chunks": (single, rob.Chunked(PLAIN, 2)),
    "strongest": (single, rob.Strongest((PLAIN, LEAST))),
    "targeted": (single, rob.Targeted(PLAIN)),
    "eight bits": (single, rob.Quantized8Bit(PLAIN)),
    "corrupted": (single, rob.CommonCorruption(Brightness(1))),
    "random transforms": (random_transforms, PGD(LINF, 2, 0.05, draws=2)),
}


def play(defense, attack, count=6):
    """One round of a game, two if the defense remembers."""
    x, y = (part.to(DEVICE) for part in images(count))
    index = torch.arange(count).to(DEVICE)
    match = AttackerDefenderSession(attack, defense.to(DEVICE), 0)
    for _ in range(2 if defense.stateful else 1):
        x_adv, answers = match.step(x, y, index)
        assert (x_adv.device, answers.device) == (DEVICE, DEVICE)
    return x_adv, answers


@pytest.mark.parametrize("name", GAMES)
def test_games(device, name):
    make, attack = GAMES[name]
    play(make(), attack)


LOSSES = {
    "AdversarialTraining": lambda net: AdversarialTraining(net, PLAIN),
    "TRADES": lambda net: AdversarialTraining(net, PGD(LINF, 1, 0.05), trades_beta=6.0),
    "MART, AWP": lambda net: AdversarialTraining(net, PLAIN, mart_beta=5.0, awp=0.01),
    "FreeTraining": lambda net: FreeTraining(net, LINF),
    "half of a batch": lambda net: AdversarialTraining(net, PLAIN, fraction=0.5),
    "ADP": lambda net: ADP(net, 2),
    "GAL": lambda net: GAL(net, 2),
    "TRS": lambda net: TRS(net, LINF),
    "DVERGE": lambda net: DVERGE(net, 2),
    "BAT": lambda net: BAT(net, PLAIN, epochs=1, probs=[0.9, 0.1]),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(device, name):
    module = LOSSES[name](partial(SmallCNN, 10, 1)).to(device)
    x, y = (part.to(device) for part in images(4))
    module.noise = Streams.from_index(torch.arange(4).to(device))
    loss = module.loss(x, y)
    assert loss.device == device
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert gradients and all(gradient.device == device for gradient in gradients)


class Slipping(nn.Module):
    """A network that forgets about the device.

    Args:
        slip: what it does to its features.
    """

    def __init__(self, slip):
        super().__init__()
        self.net, self.slip = SmallCNN(10, 1), slip

    def forward(self, x):
        return self.slip(self.net(x))


SLIPS = {
    "zeros": lambda out: out + torch.zeros(10),
    "matrix": lambda out: out @ torch.eye(10),
    "cpu": lambda out: out + out.cpu(),
    "tensor": lambda out: torch.where(out > 0, out, torch.tensor([0.0])),
    "generator": lambda out: out + torch.rand(10, generator=torch.Generator(), device=out.device),
    "index_select": lambda out: out[:, torch.arange(10)].index_select(1, torch.arange(10)),
    "result": lambda out: out.cpu(),
}


@pytest.mark.parametrize("name", SLIPS)
def test_slips_are_refused(device, name):
    refused = Misplaced if DEVICE.type == "meta" else RuntimeError  # of a device that is there
    with pytest.raises((refused, AssertionError) if name == "result" else refused):
        play(Single(Slipping(SLIPS[name])), PLAIN)


def test_figures_are_those_of_the_cpu():
    """The emulated device answers with numbers, and with the right ones."""
    torch.manual_seed(0)
    defense, (x, y) = single(), images()
    expected = AttackerDefenderSession(PLAIN, defense, 0).step(x, y, torch.arange(6))
    with emulated():
        found = [part.cpu() for part in play(defense, PLAIN)]
    for one, other in zip(expected, found, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    assert (torch.zeros(1) + torch.tensor([1.0])).device.type == "cpu"  # nothing is left behind
