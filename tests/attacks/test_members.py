"""Attacks on one member and their exact double expectation; the strongest of several attacks."""

import pytest
import torch

from lightning_rob.attacks import ARC, PGD, OnMember, RandomMember, Strongest
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.metrics import robust_accuracy
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from tests.tiny import TinyNet

THREAT = Threat("linf", 16 / 255)
INNER = PGD(THREAT, steps=3, step_size=8 / 255)
PROBS = [0.5, 0.3, 0.2]


@pytest.fixture
def ensemble() -> Ensemble:
    torch.manual_seed(0)
    return Ensemble([TinyNet() for _ in range(3)], PROBS).eval()


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(40, 3, 8, 8, generator=generator)
    return x, torch.randint(0, 4, (40,), generator=generator), torch.arange(40)


@pytest.mark.parametrize("member", [0, 2])
def test_on_member_attacks_that_member_alone(ensemble, batch, member):
    x, y, index = batch
    alone = INNER(Single(ensemble.classifiers[member]), x, y, Streams.from_index(index, 0))
    assert torch.equal(OnMember(INNER, member)(ensemble, x, y, Streams.from_index(index, 0)), alone)


def test_equation_62_by_hand(ensemble, batch):
    """sum_j alpha_j sum_i alpha_i [f_i(x + delta_j) = y], each delta_j found on f_j alone."""
    x, y, index = batch
    session = AttackerDefenderSession(RandomMember(INNER), ensemble, 7)
    _, (probs,) = session.step(x, y, index)
    expected = torch.zeros(len(x))
    for j, attacker in enumerate(PROBS):
        x_adv = OnMember(INNER, j)(ensemble, x, y, Streams.from_index(index, 7, 0))
        for i, net in enumerate(ensemble.classifiers):
            expected += attacker * PROBS[i] * (net(x_adv).argmax(1) == y)
    assert torch.allclose(probs.gather(1, y[:, None])[:, 0], expected, atol=1e-6)
    assert torch.allclose(probs.sum(1), torch.ones(len(x)))


def test_draws_members_with_their_probabilities(ensemble):
    x, y = torch.full((3000, 3, 8, 8), 0.5), torch.zeros(3000, dtype=torch.long)
    attack = PGD(THREAT, steps=1, step_size=1 / 255, random_start=False)
    x_adv = RandomMember(attack)(ensemble, x, y, torch.Generator().manual_seed(0))
    alone = [OnMember(attack, j)(ensemble, x[:1], y[:1])[0] for j in range(3)]
    # a gradient that is nearly zero may have another sign in another batch
    hits = torch.stack([(x_adv == a).flatten(1).float().mean(1) > 0.95 for a in alone])
    assert (hits.sum(0) == 1).all()
    share = hits.float().mean(1)
    spread = 4 * (torch.tensor(PROBS) * (1 - torch.tensor(PROBS)) / 3000).sqrt()
    assert ((share - torch.tensor(PROBS)).abs() < spread).all()


# the strongest of several

WIDE = Threat("linf", 24 / 255)
PARTS = [ARC(WIDE, 4, WIDE.eps), ARC(WIDE, 4, WIDE.eps / 4), PGD(WIDE, 4, WIDE.eps / 2)]


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


def test_a_member_of_no_weight_is_no_strategy(batch):
    torch.manual_seed(0)
    ensemble = Ensemble([TinyNet(), TinyNet()], [1.0, 0.0])
    assert RandomMember(INNER).strategies(ensemble) == [(1.0, OnMember(INNER, 0))]
