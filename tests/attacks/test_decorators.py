"""Chunks give the same images; accelerated networks and 8-bit images, what they change."""

from shutil import which

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_rob.attacks import (
    ARC,
    CW,
    GMSA,
    PGD,
    Accelerated,
    Auto,
    Chunked,
    PartialBatchAttack,
    Quantized8Bit,
    ThroughAdaptation,
)
from lightning_rob.attacks.decorators import quantize
from lightning_rob.defenses import Ensemble, RandomTransforms, Single
from lightning_rob.nets import SmallCNN
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, HorizontalFlip
from tests.attacks.test_folding import settled
from tests.counting import Shared

LINF = Threat("linf", 0.1)


class Net(nn.Module):
    """A small network; runs out of memory on more than `most` images that want gradients."""

    def __init__(self, seed=0, most=None):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 4))
        self.double()
        self.most, self.sizes = most, Shared()

    def forward(self, x):
        if x.requires_grad:
            if self.most and len(x) > self.most:
                raise torch.OutOfMemoryError("no memory left")
            self.sizes.append(len(x))
        return self.layers(x)


def batch(count=11):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(count, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 4, (count,), generator=generator)


def random_transforms(net):
    return RandomTransforms(net, [GaussianNoise(), HorizontalFlip()], 2, 3)


CASES = {
    "pgd": (PGD(LINF, 4, 0.03, restarts=2), lambda net: Single(net)),
    "eot": (PGD(LINF, 4, 0.03, draws=2), random_transforms),
    "arc": (ARC(LINF, 3, 0.1, random_start=True), lambda net: Ensemble([net, Net(1)])),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_images(name, monkeypatch):
    """In chunks; as many at once as the caches of a CPU hold; in halves for want of memory."""
    attack, defended = CASES[name]
    (x, y), net = batch(), Net()
    noise = [Streams.from_index(torch.arange(len(x)), 5) for _ in range(4)]
    whole = attack(defended(net), x, y, noise[0])
    parts = [Chunked(attack, 4)(defended(Net()), x, y, noise[1])]
    assert noise[0].counter == noise[1].counter
    with pytest.warns(UserWarning, match="11 images at once ran out of memory and goes on with 6"):
        short = Net(most=6 * (3 if name == "eot" else 1))
        parts.append(attack(defended(short), x, y, noise[2]))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr("lightning_rob.runtime.memory.IMAGES_PER_THREAD", 4)
    net.sizes.clear()
    attack(defended(net), x, y, noise[3])
    # Without convolutions the caches do not matter; a random defense parts its copies anyway.
    assert max(net.sizes) == (4 if name == "eot" else 11)
    monkeypatch.setattr("lightning_rob.runtime.memory.is_linear", lambda net: False)
    net.sizes.clear()
    noise[3].counter = 0
    parts.append(attack(defended(net), x, y, noise[3]))
    assert set(net.sizes) <= {4, 3}
    for part in parts:
        torch.testing.assert_close(part, whole, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "attack",
    [
        PartialBatchAttack(PGD(LINF, 2, 0.03)),
        Quantized8Bit(PartialBatchAttack(PGD(LINF, 2, 0.03))),
        ThroughAdaptation(PGD(LINF, 2, 0.03)),
        GMSA(ThroughAdaptation(PGD(LINF, 2, 0.03))),
    ],
)
def test_whole_rounds_stay_whole(attack):
    """Neither halved nor chunked: an image's result depends on all of them."""
    x, y = batch()
    with pytest.raises(torch.OutOfMemoryError):
        attack(Single(Net(most=4)), x, y)
    with pytest.raises(ValueError, match=r"attacks whole batches.*around an attack inside"):
        Chunked(attack, images=2)


def test_rounds_whose_inner_attack_runs_out_of_memory():
    """The round stays whole, its attack is made in halves."""
    x, y = batch()
    attack = GMSA(PGD(LINF, 3, 0.03), rounds=1)
    whole = attack(Single(Net()), x, y, Streams.from_index(torch.arange(11), 1))
    with pytest.warns(UserWarning, match="goes on with 6"):
        halves = attack(Single(Net(most=6)), x, y, Streams.from_index(torch.arange(11), 1))
    torch.testing.assert_close(halves, whole, rtol=0, atol=1e-9)


# faster networks
class Recording(nn.Module):
    """A network that records its precision, with and without gradients."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 4))
        self.seen = Shared()

    def forward(self, x):
        out = self.net(x)
        self.seen.append((bool(x.requires_grad), out.dtype))
        return out


def picture(size=4):
    x = torch.rand(6, 3, size, size, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(6) % 4


def test_half_precision_is_for_gradients_alone():
    nets = [Recording(), Recording()]
    Accelerated(ARC(LINF, 2, 0.1), autocast="bfloat16")(Ensemble(nets), *picture())
    for net in nets:
        assert set(net.seen) == {(True, torch.bfloat16), (False, torch.float32)}
        assert "forward" not in vars(net)


NO_COMPILER = pytest.mark.skipif(not which("c++"), reason="torch.compile needs a C++ compiler")


@NO_COMPILER
@pytest.mark.parametrize("attack", [PGD(LINF, 3, 0.03, random_start=False), ARC(LINF, 2, 0.03)])
@pytest.mark.slow  # half a minute of compiling
def test_compiled_networks_give_the_same_images(attack):
    torch.manual_seed(0)
    nets = [settled(SmallCNN(channels=3)) for _ in "ab"]
    exact = attack(Ensemble(nets), *picture(32))
    fast = Accelerated(attack, compile=True)(Ensemble(nets), *picture(32))
    assert ((exact - fast).abs() < 1e-5).float().mean() > 0.999
    assert not any("forward" in vars(net) for net in nets)


# images of 8 bits
def eight_bit(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator) / 255


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from(["linf", "l2"]),
    st.sampled_from([1 / 255, 4 / 255, 8 / 255, 0.5, 2.0]),
    st.integers(0, 10_000),
)
def test_every_image_is_of_255ths_and_in_the_ball(norm, eps, seed):
    x = eight_bit(4, 3, 4, 4, seed=seed)
    threat = Threat(norm, eps)
    x_adv = threat.project(
        x + 2 * eps * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)), x
    )
    found = quantize(x_adv, x, threat)
    assert torch.equal((found * 255).round() / 255, found)
    assert (threat.distance(found, x) <= eps * (1 + 1e-5)).all()
    assert ((found >= 0) & (found <= 1)).all()


def test_rounded_logits_do_not_decide_which_images_leave():
    for attack in (PGD(LINF, 1, 0.1, early_stop=True), CW(Threat("l2", 1.0)), Auto(LINF)):
        with pytest.raises(ValueError, match="leave out early_stop or autocast"):
            Accelerated(attack, autocast="bfloat16")


def test_little_of_the_perturbation_is_lost():
    """Where no pixel is at a bound, half of the images are rounded out of the ball."""
    x, threat = (eight_bit(8, 3, 8, 8) * 127).round() / 255 + 64 / 255, Threat("l2", 1.0)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    x_adv = threat.project(x + noise, x)
    found = quantize(x_adv, x, threat)
    assert (threat.size(found - x) > 0.9 * threat.size(x_adv - x)).all()
