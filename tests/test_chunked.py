"""Batches in parts give the same images."""

import pytest
import torch
from torch import nn

from lightning_rob.attacks import (
    ARC,
    CW,
    GMSA,
    PGD,
    Chunked,
    DeepFool,
    PartialBatchAttack,
    Quantized8Bit,
    ThroughAdaptation,
)
from lightning_rob.attacks.oom import kept_for_gradients
from lightning_rob.defenses import Ensemble, RandomTransforms, Single
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, HorizontalFlip
from tests.tiny import pgd, recipe, records, robust_eval, run

LINF = Threat("linf", 0.1)


class Net(nn.Module):
    """A small network; runs out of memory on more than `most` images that want gradients."""

    def __init__(self, seed=0, most=None):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 4))
        self.double()
        self.most, self.sizes = most, []

    def forward(self, x):
        if x.requires_grad:
            if self.most and len(x) > self.most:
                raise torch.OutOfMemoryError("no memory left")
            self.sizes.append(len(x))
        return self.layers(x)


def batch(count=11):
    chance = torch.Generator().manual_seed(3)
    x = torch.rand(count, 3, 4, 4, generator=chance, dtype=torch.float64)
    return x, torch.randint(0, 4, (count,), generator=chance)


def random_transforms(net):
    return RandomTransforms(net, [GaussianNoise(), HorizontalFlip()], 2, 3)


CASES = {
    "pgd": (PGD(LINF, 4, 0.03, restarts=2), lambda net: Single(net)),
    "eot": (PGD(LINF, 4, 0.03, draws=2), random_transforms),
    "arc": (ARC(LINF, 3, 0.1, random_start=True), lambda net: Ensemble([net, Net(1)])),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("options", [{"images": 1}, {"images": 4}, {"images": 99}, {"memory": 1}])
def test_the_same_images(name, options):
    attack, defended = CASES[name]
    x, y = batch()
    streams = [Streams.from_index(torch.arange(len(x)), 5) for _ in "ab"]
    whole = attack(defended(Net()), x, y, streams[0])
    parts = Chunked(attack, **options)(defended(Net()), x, y, streams[1])
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-9)
    assert streams[0].counter == streams[1].counter


def test_so_many_at_a_time():
    net, (x, y) = Net(), batch()
    Chunked(PGD(LINF, 2, 0.03), images=4)(Single(net), x, y)
    assert net.sizes == [4, 4, 4, 4, 3, 3]


def test_memory_bounds_what_is_kept():
    """A hidden layer of 32 doubles, and what it is of, is kept of each image."""
    net, (x, y) = Net(), batch(64)
    each = kept_for_gradients(lambda: PGD(LINF, 1, 0.03)(Single(net), x[:2], y[:2]))
    each -= kept_for_gradients(lambda: PGD(LINF, 1, 0.03)(Single(net), x[:1], y[:1]))
    assert 32 * 8 <= each <= 4 * (32 + 48) * 8
    net.sizes.clear()
    Chunked(PGD(LINF, 1, 0.03), memory=20 * each / 2**30)(Single(net), x, y)
    assert net.sizes[:2] == [1, 2]  # to find out
    assert net.sizes[2] == 10


@pytest.mark.parametrize("wrong", [[], [0], [1]])
@pytest.mark.parametrize("attack", [CW(Threat("l2", 9.0), 5), DeepFool(LINF), CASES["arc"][0]])
def test_memory_does_not_hang_on_who_is_wrong(attack, wrong):
    net, x = Net(), batch(40)[0]
    y = net(x).argmax(1)
    y[wrong] = (y[wrong] + 1) % 4
    net.sizes.clear()
    Chunked(attack, memory=20 * 352 / 2**30)(Single(net), x, y)
    assert max(net.sizes) <= 12


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
    """Neither halved nor chunked: what an image becomes there goes by all of them."""
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
        ({}, "give images or memory"),
        ({"images": 3, "memory": 1.0}, "give images or memory"),
        ({"images": 0}, "images must be a positive whole number, got 0"),
        ({"images": True}, "images must be a positive whole number, got True"),
        ({"images": 2.5}, "images must be a positive whole number, got 2.5"),
        ({"memory": -1.0}, "memory must be a positive number of GiB, got -1.0"),
        ({"memory": "4GiB"}, "memory must be a positive number of GiB, got '4GiB'"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        Chunked(PGD(LINF, 1, 0.1), **options)


def test_from_a_recipe(tmp_path):
    """Wrapped in the file, the attack finds what it finds alone."""
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
