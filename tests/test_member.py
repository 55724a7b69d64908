"""Attackers who look at one member: what they attack, and the exact double expectation."""

import pytest
import torch

from lightning_rob.attacks import PGD, OnMember, RandomMember, Strongest
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.evaluation.protocol import evaluate_once
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
    chance = torch.Generator().manual_seed(1)
    x = torch.rand(40, 3, 8, 8, generator=chance)
    return x, torch.randint(0, 4, (40,), generator=chance), torch.arange(40)


@pytest.mark.parametrize("member", [0, 2])
def test_on_member_attacks_that_member_alone(ensemble, batch, member):
    x, y, index = batch
    alone = INNER(Single(ensemble.classifiers[member]), x, y, Streams.from_index(index, 0))
    assert torch.equal(OnMember(INNER, member)(ensemble, x, y, Streams.from_index(index, 0)), alone)


def test_a_member_that_is_not_there(ensemble, batch):
    with pytest.raises(ValueError, match="member must be 0 … 2, got 3"):
        OnMember(INNER, 3)(ensemble, *batch[:2])
    with pytest.raises(ValueError, match="0 or more, got -1"):
        OnMember(INNER, -1)


def test_equation_62_by_hand(ensemble, batch):
    """sum_j alpha_j sum_i alpha_i [f_i(x + delta_j) = y], each delta_j found on f_j alone."""
    x, y, index = batch
    _, (answers,) = evaluate_once(RandomMember(INNER), ensemble, x, y, index, 7)
    expected = torch.zeros(len(x))
    for j, attacker in enumerate(PROBS):
        x_adv = OnMember(INNER, j)(ensemble, x, y, Streams.from_index(index, 7, 0))
        for i, net in enumerate(ensemble.classifiers):
            expected += attacker * PROBS[i] * (net(x_adv).argmax(1) == y)
    assert torch.allclose(answers.gather(1, y[:, None])[:, 0], expected, atol=1e-6)
    assert torch.allclose(answers.sum(1), torch.ones(len(x)))


def test_draws_members_as_often_as_they_answer(ensemble):
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


def test_a_member_that_never_answers_is_no_strategy(batch):
    torch.manual_seed(0)
    ensemble = Ensemble([TinyNet(), TinyNet()], [1.0, 0.0])
    assert RandomMember(INNER).strategies(ensemble) == [(1.0, OnMember(INNER, 0))]


def test_within_the_strongest(ensemble, batch):
    x, y, index = batch
    both = Strongest((OnMember(INNER, 1), RandomMember(INNER)))
    assert both.threat == THREAT
    assert (
        THREAT.size(both(ensemble, x, y, Streams.from_index(index, 0)) - x) <= 16 / 255 + 1e-6
    ).all()
