"""Compiled networks and gradients in half precision: what they change, and what they must not."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob.attacks import ARC, PGD, Accelerated
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.nets import SmallCNN
from lightning_rob.threat import Threat
from tests.test_folding import settled

LINF = Threat("linf", 0.1)


class Telling(nn.Module):
    """A network that tells in which precision it computes, with and without gradients."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
        self.seen = set()

    def forward(self, x):
        out = self.net(x)
        self.seen.add((bool(x.requires_grad), out.dtype))
        return out


def batch(size=4):
    x = torch.rand(6, 3, size, size, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(6) % 4


def test_half_precision_is_for_gradients_alone():
    nets = [Telling(), Telling()]
    Accelerated(ARC(LINF, 2, 0.1), autocast="bfloat16")(Ensemble(nets), *batch())
    for net in nets:
        assert net.seen == {(True, torch.bfloat16), (False, torch.float32)}
        assert "forward" not in vars(net)


def test_half_precision_climbs_nearly_as_high():
    """On a network of random weights, whose gradients are all noise: the worst case."""
    torch.manual_seed(0)
    net, (x, y) = settled(SmallCNN(channels=3)), batch(32)
    attack = PGD(LINF, 5, 0.03, random_start=False)
    exact, fast = (
        attack(Single(net), x, y),
        Accelerated(attack, autocast="bfloat16")(Single(net), x, y),
    )
    clean, best, reached = (cross_entropy(net(images), y).item() for images in (x, exact, fast))
    assert fast.dtype == torch.float32
    assert not torch.equal(exact, fast)
    assert reached - clean > 0.8 * (best - clean) > 0


@pytest.mark.slow  # half a minute of compiling
def test_compiled_networks_give_the_same_images():
    torch.manual_seed(0)
    net = settled(SmallCNN(channels=3))
    (x, y), attack = batch(32), PGD(LINF, 3, 0.03, random_start=False)
    exact = attack(Single(net), x, y)
    fast = Accelerated(attack, compile=True)(Single(net), x, y)
    assert ((exact - fast).abs() < 1e-5).float().mean() > 0.999
    assert "forward" not in vars(net)


def test_networks_are_put_back_after_an_error():
    net = Telling()
    with pytest.raises(ValueError, match="labels"):
        Accelerated(PGD(LINF, 1, 0.1), autocast="float16")(Single(net), batch()[0], batch()[1] + 9)
    assert "forward" not in vars(net)


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "nothing to accelerate"), ({"autocast": "float8"}, "autocast must be of")],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Accelerated(PGD(LINF, 1, 0.1), **options)


@pytest.mark.parametrize("rounded", [{"autocast": "bfloat16"}, {"tf32": True}])
@pytest.mark.parametrize("inner", [PGD(LINF, 1, 0.1, early_stop=True), "twice"])
def test_what_cannot_be_accelerated(inner, rounded):
    plain = PGD(LINF, 1, 0.1)
    inner = Accelerated(plain, autocast="float16") if inner == "twice" else inner
    with pytest.raises(ValueError, match=r"accelerated twice|leave out early_stop or (auto|tf32)"):
        Accelerated(inner, **rounded)
