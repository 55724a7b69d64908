"""Chunks give the same images; accelerated networks and 8-bit images, what they change."""

from shutil import which

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob.attacks import (
    ARC,
    GMSA,
    PGD,
    Accelerated,
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
from tests.tiny import TinyNet, pgd, recipe, records, robust_eval, run

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
def test_the_same_images(name):
    attack, defended = CASES[name]
    x, y = batch()
    streams = [Streams.from_index(torch.arange(len(x)), 5) for _ in "ab"]
    whole = attack(defended(Net()), x, y, streams[0])
    parts = Chunked(attack, 4)(defended(Net()), x, y, streams[1])
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-9)
    assert streams[0].counter == streams[1].counter


def test_images_at_a_time():
    net, (x, y) = Net(), batch()
    Chunked(PGD(LINF, 2, 0.03), images=4)(Single(net), x, y)
    assert net.sizes == [4, 4, 4, 4, 3, 3]


@pytest.mark.parametrize("name", CASES)
def test_a_cpu_attacks_what_its_caches_hold(name, monkeypatch):
    attack, defended = CASES[name]
    (x, y), images, net = batch(), [], Net()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    for at_once in (11, 4):
        monkeypatch.setattr("lightning_rob.runtime.memory.IMAGES_PER_THREAD", at_once)
        net.sizes.clear()
        noise = Streams.from_index(torch.arange(len(x)), 5)
        images.append(attack(defended(net), x, y, noise))
    torch.testing.assert_close(images[1], images[0], rtol=0, atol=1e-9)
    assert set(net.sizes) <= {4, 3}


@pytest.mark.parametrize("name", CASES)
def test_out_of_memory_goes_on_in_halves(name):
    attack, defended = CASES[name]
    x, y = batch()
    streams = [Streams.from_index(torch.arange(len(x)), 5) for _ in "ab"]
    whole = attack(defended(Net()), x, y, streams[0])
    most = 6 * (3 if name == "eot" else 1)
    with pytest.warns(UserWarning, match="11 images at once ran out of memory and goes on with 6"):
        halves = attack(defended(Net(most=most)), x, y, streams[1])
    torch.testing.assert_close(halves, whole, rtol=0, atol=1e-9)


def test_one_image_that_does_not_fit_is_an_error():
    x, y = batch(5)
    net = Net(most=1)
    net.most = 0.5
    with pytest.warns(UserWarning, match="memory"), pytest.raises(torch.OutOfMemoryError):
        PGD(LINF, 2, 0.03)(Single(net), x, y)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 0}, "images must be a positive whole number, got 0"),
        ({"images": True}, "images must be a positive whole number, got True"),
        ({"images": 2.5}, "images must be a positive whole number, got 2.5"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Chunked(PGD(LINF, 1, 0.1), **options)


def test_from_a_recipe(tmp_path):
    """Wrapped in the file, the attack finds the same images as alone."""
    wrapped = {
        "plain": pgd(early_stop=True, random_start=False),
        "chunked": {
            "class_path": "lightning_rob.attacks.Chunked",
            "init_args": {"attack": pgd(early_stop=True, random_start=False), "images": 5},
        },
        "fast": {
            "class_path": "lightning_rob.attacks.Accelerated",
            "init_args": {"attack": pgd(), "autocast": "bfloat16"},
        },
    }
    callbacks = [robust_eval(wrapped)]
    options = {"trainer__callbacks+": callbacks, "model__init_args__monitor": None}
    run("fit", "--config", recipe(tmp_path, **options))
    found = {record["name"]: record["accuracy"] for record in records(tmp_path)}
    # batches of five may round an image or two over a boundary
    assert found["chunked"] == pytest.approx(found["plain"], abs=2.5 / 32)
    assert found["plain"] < found["clean"]
    assert found["fast"] < found["clean"]


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


def test_half_precision_climbs_nearly_as_far():
    """On a network of random weights, whose gradients are all noise: the worst case."""
    torch.manual_seed(0)
    net, (x, y) = settled(SmallCNN(channels=3)), picture(32)
    attack = PGD(LINF, 5, 0.03, random_start=False)
    exact, fast = (
        attack(Single(net), x, y),
        Accelerated(attack, autocast="bfloat16")(Single(net), x, y),
    )
    clean, best, reached = (cross_entropy(net(images), y).item() for images in (x, exact, fast))
    assert fast.dtype == torch.float32
    assert not torch.equal(exact, fast)
    assert reached - clean > 0.8 * (best - clean) > 0


NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
NO_COMPILER = pytest.mark.skipif(not which("c++"), reason="torch.compile needs a C++ compiler")


@pytest.mark.parametrize(
    ("mode", "device"),
    [
        pytest.param(True, "cpu", marks=NO_COMPILER),
        pytest.param("reduce-overhead", "cuda", marks=NO_GPU),
    ],
)
@pytest.mark.parametrize("attack", [PGD(LINF, 3, 0.03, random_start=False), ARC(LINF, 2, 0.03)])
@pytest.mark.slow  # half a minute of compiling
def test_compiled_networks_give_the_same_images(attack, mode, device):
    """On two batches: a CUDA graph is recorded at the first calls, and then replayed."""
    torch.manual_seed(0)
    nets = [settled(SmallCNN(channels=3)).to(device) for _ in "ab"]
    for seed in (0, 1):
        x, y = (part.to(device).roll(seed, 0) for part in picture(32))
        exact = attack(Ensemble(nets), x, y)
        fast = Accelerated(attack, compile=mode)(Ensemble(nets), x, y)
        assert ((exact - fast).abs() < 1e-5).float().mean() > 0.999
        assert not any("forward" in vars(net) for net in nets)


def test_graphs_are_refused_on_a_cpu():
    """Where torch would compile without them, and not say so."""
    attack = Accelerated(PGD(LINF, 1, 0.1), compile="reduce-overhead")
    with pytest.raises(ValueError, match="reduce-overhead is for NVIDIA GPUs, got images on cpu"):
        attack(Single(Recording()), *picture())


def test_networks_are_put_back_after_an_error():
    net, (x, y) = Recording(), picture()
    with pytest.raises(ValueError, match="labels"):
        Accelerated(PGD(LINF, 1, 0.1), autocast="float16")(Single(net), x, y + 9)
    assert "forward" not in vars(net)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to accelerate"),
        ({"autocast": "float8"}, "autocast must be of"),
        ({"compile": "fast"}, "compile must be true, false or .* got 'fast'"),
    ],
)
def test_bad_acceleration(options, message):
    with pytest.raises(ValueError, match=message):
        Accelerated(PGD(LINF, 1, 0.1), **options)


@pytest.mark.parametrize("rounded", [{"autocast": "bfloat16"}, {"tf32": True}])
@pytest.mark.parametrize("inner", [PGD(LINF, 1, 0.1, early_stop=True), "twice"])
def test_attacks_that_cannot_be_accelerated(inner, rounded):
    plain = PGD(LINF, 1, 0.1)
    inner = Accelerated(plain, autocast="float16") if inner == "twice" else inner
    with pytest.raises(ValueError, match=r"accelerated twice|leave out early_stop or (auto|tf32)"):
        Accelerated(inner, **rounded)


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


def test_truncation_leaves_the_ball_and_this_does_not():
    x, threat = eight_bit(8, 3, 8, 8), Threat("linf", 8 / 255)
    x_adv = threat.project(x - 8 / 255, x)
    truncated = (x_adv * 255 - 1e-4).clamp_min(0).floor() / 255  # what uint8() makes of it
    assert (threat.size(truncated - x) > 8.9 / 255).any()
    found = quantize(x_adv, x, threat)
    assert torch.allclose(found, x_adv, atol=1e-6)


def test_little_of_the_perturbation_is_lost():
    x, threat = eight_bit(8, 3, 8, 8), Threat("l2", 1.0)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    x_adv = threat.project(x + noise, x)
    found = quantize(x_adv, x, threat)
    assert (threat.size(found - x) > 0.9 * threat.size(x_adv - x)).all()


def test_fools_nearly_as_often_as_the_attack():
    torch.manual_seed(0)
    defense, threat = Single(TinyNet()).eval(), Threat("linf", 32 / 255)
    x = eight_bit(40, 3, 8, 8)
    y = defense(x).argmax(1)
    inner = PGD(threat, steps=10, step_size=8 / 255)
    plain, kept = (attack(defense, x, y) for attack in (inner, Quantized8Bit(inner)))
    broken = [(defense(images).argmax(1) != y).float().mean() for images in (plain, kept)]
    assert broken[0] > 0.5
    assert broken[1] > broken[0] - 0.1


def test_other_bounds_are_refused():
    inner = PGD(Threat("linf", 0.1, bounds=(-1.0, 1.0)), steps=1, step_size=0.1)
    with pytest.raises(ValueError, match="8-bit images range over"):
        Quantized8Bit(inner)
