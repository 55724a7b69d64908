"""How often a step of an attack makes the host wait for a GPU: exactly as often as listed."""

from collections import Counter

import pytest
import torch
from torch import nn

from lightning_rob.attacks import APGD, ARC, CW, DDN, FAB, PDGD, PGD, AggMo, Square
from lightning_rob.defenses import Ensemble, RandomTransforms, Single
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise, HorizontalFlip
from tests.fakedev import DEVICE, Waits, emulated

LINF, L2 = Threat("linf", 0.1), Threat("l2", 1.0)
NEAR = Threat("linf", 1e-6)  # in which no image is fooled
STEPS = 3


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.Tanh(), nn.Linear(16, 5)).eval()


def single():
    return Single(net())


def members():
    return Ensemble([net(), net(1)], probs=[0.9, 0.1])


def random_transforms():
    return RandomTransforms(net(), [GaussianNoise(), HorizontalFlip()], 2, draws=3)


CASES = {
    "PGD": (single, lambda k: PGD(LINF, k, 0.01), {}),
    "PGD, momentum": (single, lambda k: PGD(L2, k, 0.1, ascent=AggMo()), {}),
    "PGD, early stop": (single, lambda k: PGD(NEAR, k, 1e-6, early_stop=True), {"nonzero": 1}),
    "APGD": (single, lambda k: APGD(LINF, k, early_stop=False), {}),
    "APGD, early stop": (single, lambda k: APGD(NEAR, k), {"nonzero": 1}),
    "ARC": (members, lambda k: ARC(LINF, k, 0.1), {}),
    "ARC, early stop": (members, lambda k: ARC(NEAR, k, 1e-7, early_stop=True), {"nonzero": 1}),
    # the order of the transforms is needed on the host
    "EoT": (random_transforms, lambda k: PGD(LINF, k, 0.01, draws=4), {"_to_copy": 1}),
    # the images that are left, and those that the query changes
    "Square": (single, lambda k: Square(NEAR, k), {"nonzero": 2}),
    # the images that are left, and the end of Newton's method
    "FAB": (single, lambda k: FAB(NEAR, k, 1), {"nonzero": 1, "_local_scalar_dense": 1}),
    "DDN": (single, lambda k: DDN(L2, k), {}),
    "PDGD": (single, lambda k: PDGD(L2, k), {}),
    "CW": (single, lambda k: CW(L2, 2 * k, step_size=1e-4, binary_steps=1, initial_const=10.0), {}),
}


def images():
    return torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(3))


def waits(make, attack):
    defense, x = make(), images()
    y = defense(x, torch.Generator().manual_seed(0)).argmax(1)
    with emulated():
        streams = Streams.from_index(torch.arange(6).to(DEVICE), 0)
        with Waits() as found:
            attack(defense.to(DEVICE), x.to(DEVICE), y.to(DEVICE), streams)
    return Counter(found.found)


@pytest.mark.skipif(DEVICE.type != "meta", reason="counts on the emulated device")
@pytest.mark.parametrize("name", CASES)
def test_steps_wait_for_the_device_as_often_as_listed(name):
    make, attack, allowed = CASES[name]
    few, many = (waits(make, attack(steps)) for steps in (STEPS, 2 * STEPS))
    assert few.total() > 0  # the first step checks its input
    assert many - few == {operation: STEPS * count for operation, count in allowed.items()}
    assert not few - many
