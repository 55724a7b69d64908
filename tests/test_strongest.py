"""Several attacks as one are as strong as each image's strongest."""

import pytest
import torch

from lightning_rob.attacks import ARC, PGD, Strongest
from lightning_rob.defenses import Ensemble
from lightning_rob.metrics import robust_accuracy
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from tests.tiny import TinyNet

THREAT = Threat("linf", 24 / 255)
PARTS = [ARC(THREAT, 4, THREAT.eps), ARC(THREAT, 4, THREAT.eps / 4), PGD(THREAT, 4, THREAT.eps / 2)]


@pytest.fixture
def game():
    torch.manual_seed(0)
    x, y = torch.rand(40, 3, 8, 8), torch.randint(0, 4, (40,))
    # In float64, where an image's arithmetic hardly depends on its batch.
    return Ensemble([TinyNet() for _ in range(3)], [0.5, 0.3, 0.2]).double().eval(), x.double(), y


def right(attack, game, noise=None):
    defense, x, y = game
    return robust_accuracy(defense(attack(defense, x, y, noise)), y)


def test_is_the_minimum_of_its_parts_image_by_image(game):
    each = torch.stack([right(attack, game) for attack in PARTS[:2]])
    assert (each[0] != each[1]).any()
    torch.testing.assert_close(right(Strongest(PARTS[:2]), game), each.amin(0))


def test_stays_in_the_ball_and_depends_on_the_image_alone(game):
    defense, x, y = game
    attack, streams = Strongest(PARTS), Streams.from_index(torch.arange(40), 1)
    whole = attack(defense, x, y, streams)
    assert THREAT.size(whole - x).max() <= THREAT.eps + 1e-6
    half = torch.arange(20, 40)
    part = attack(defense, x[half], y[half], Streams.from_index(half, 1))
    torch.testing.assert_close(whole[half], part)


def test_needs_one_threat():
    other = PGD(Threat("l2", 1.0), 1, 0.1)
    for attacks in ([], [PARTS[0], other]):
        with pytest.raises(ValueError, match="attacks must share one threat"):
            Strongest(attacks)


def test_the_same_random_attack_thrice_has_three_starts():
    torch.manual_seed(0)
    ensemble = Ensemble([TinyNet(), TinyNet()]).eval()
    x, y = torch.rand(30, 3, 8, 8), torch.randint(0, 4, (30,))
    once = PGD(Threat("linf", 0.1), 1, 0.01)
    right = [
        robust_accuracy(
            ensemble(attack(ensemble, x, y, Streams.from_index(torch.arange(30), 1))), y
        )
        for attack in (once, Strongest((once, once, once)))
    ]
    assert (right[1] <= right[0]).all()
    assert right[1].sum() < right[0].sum()
