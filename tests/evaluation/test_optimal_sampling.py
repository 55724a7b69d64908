"""Optimal sampling probabilities, against sweeps of all probabilities and closed forms."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_rob import PGD, Ensemble, LatticeClimber, Single, Threat, optimal_sampling
from lightning_rob.attacks import NoAttack
from lightning_rob.attacks.arc import expected_accuracy
from tests.attacks.common import images, trained_net
from tests.attacks.test_lattice_climber import Linear, ensemble

THREAT = Threat("linf", 0.1)
CLIMB = LatticeClimber(THREAT, 20)


def kept(members, probs, x, y, attack=CLIMB):
    """The accuracy that the attack leaves at these probabilities."""
    defense = Ensemble(members, torch.as_tensor(probs))
    found = expected_accuracy(defense.members, defense.weights, attack(defense, x, y), y)
    return found.double().mean().item()


def test_two_members_against_a_fine_sweep():
    """No probability of a tenth is better, and attacked anew it keeps what is said."""
    defense, x, y = ensemble(11, 2, 2, THREAT, 24)
    found = optimal_sampling(defense, CLIMB, [(x, y)])
    sweep = [kept(defense.members, [p, 1 - p], x, y) for p in torch.linspace(0, 1, 11).double()]
    assert min(sweep) < found.accuracy - 0.05  # a choice that matters
    assert found.accuracy == pytest.approx(max(sweep), abs=2e-3)
    assert kept(defense.members, found.probs, x, y) == pytest.approx(found.accuracy, abs=1e-3)
    assert found.accuracy <= found.bound + 1e-6 <= found.accuracy + 2e-3
    assert found.images == 24


def test_no_other_probabilities_keep_more():
    defense, x, y = ensemble(3, 3, 2, THREAT, 8, size=12)
    found = optimal_sampling(defense, CLIMB, [(x[:3], y[:3]), (x[3:], y[3:])], steps=40)
    others = torch.distributions.Dirichlet(torch.full((3,), 0.5)).sample((5,)).double()
    others = torch.cat([others, torch.eye(3).double(), defense.weights[None].double()])
    assert max(kept(defense.members, probs, x, y) for probs in others) <= found.bound + 2e-3
    assert found.accuracy >= found.bound - 1e-3


def test_of_members_that_no_attack_changes_the_better_one_predicts():
    """Of two members that no attack changes, right on 0.7 and 0.3 of the images, the first."""
    y = torch.tensor([0] * 7 + [1] * 3)
    always = [Linear([[0.0] * 2] * 2, [1.0, 0.0]), Linear([[0.0] * 2] * 2, [0.0, 1.0])]
    defense = Ensemble(always, [0.2, 0.8])
    found = optimal_sampling(defense, NoAttack(THREAT), [(torch.rand(10, 2), y)])
    assert found.probs.tolist() == pytest.approx([1, 0])
    assert (found.accuracy, found.bound) == pytest.approx((0.7, 0.7))
    torch.testing.assert_close(found.trail[0], torch.tensor([0.2, 0.8, 0.38]).double())


def test_a_rejection_is_no_success_of_the_attack():
    """Of two members, one accepts and is wrong, the other rejects: nothing gets past it."""
    wrong, rejecting = (
        Linear([[0.0] * 2] * 3, logits) for logits in ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0])
    )
    defense = Ensemble([wrong, rejecting], rejects=2)
    y = torch.zeros(10, dtype=torch.long)
    found = optimal_sampling(defense, NoAttack(THREAT), [(torch.rand(10, 2), y)])
    assert found.probs.tolist() == pytest.approx([0, 1])
    assert (found.accuracy, found.bound) == pytest.approx((1, 1))


def test_the_ensemble_stays_as_it_is_and_images_are_chosen_by_seed():
    defense = Ensemble([trained_net(1), trained_net(2)], [0.9, 0.1]).train()
    x, y = images(30, seed=3)
    before = {name: value.clone() for name, value in defense.state_dict().items()}
    loader = DataLoader(TensorDataset(x, y), 7)
    attack = PGD(Threat("linf", 0.05), 2, 0.02)
    found, again = (optimal_sampling(defense, attack, loader, max_images=20) for _ in range(2))
    assert torch.equal(found.trail, again.trail)
    assert found.images == 20
    assert defense.training
    assert all(torch.equal(value, before[name]) for name, value in defense.state_dict().items())


def test_wrong_arguments():
    with pytest.raises(ValueError, match="is for an Ensemble"):
        optimal_sampling(Single(trained_net(1)), CLIMB, [images(2)])
    with pytest.raises(ValueError, match="needs images, got none"):
        optimal_sampling(Ensemble([trained_net(1)]), CLIMB, [])
