"""The climb against brute force over the sets of members of linear ensembles."""

from itertools import combinations, product

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, nnls
from torch import nn

from lightning_rob.attacks import ARC, PGD, LatticeClimber
from lightning_rob.attacks.arc import expected_accuracy
from lightning_rob.defenses import Ensemble
from lightning_rob.threat import Threat
from tests.attacks.common import accuracy, assert_inside, images, trained_net

THREATS = {"linf": Threat("linf", 0.1), "l2": Threat("l2", 0.3), "l1": Threat("l1", 0.3)}
every_norm = pytest.mark.parametrize("threat", THREATS.values(), ids=THREATS)


class Linear(nn.Module):
    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = torch.tensor(w), torch.tensor(b)  # [K, D], [K]

    def forward(self, x):
        return x.flatten(1) @ self.w.T + self.b


def ensemble(seed, members, classes, threat, points=2, size=8):
    """Linear members with decision boundaries at about the radius, and points of class 0."""
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(members, classes, size))
    x = rng.uniform(0.35, 0.65, (points, size))
    normals = w[:, :1] - w[:, 1:]  # [M, K - 1, D]
    reach = rng.uniform(0.2, 1.3, normals.shape[:2]) * threat.eps
    offsets = reach * np.linalg.norm(normals, threat.q, axis=-1) - normals @ x.mean(0)
    b = np.concatenate([np.zeros((members, 1)), -offsets], 1)
    defense = Ensemble(list(map(Linear, w, b)), rng.dirichlet(np.ones(members)).tolist())
    return defense, torch.tensor(x), torch.zeros(points, dtype=torch.long)


def room(normals, gaps, threat):
    """How far inside the ball a perturbation may stay that crosses all these boundaries."""
    n = normals / np.linalg.norm(normals, axis=1, keepdims=True)
    g = gaps / np.linalg.norm(normals, axis=1)
    if threat.p == 2:  # the shortest perturbation with -n d >= g, as nonnegative least squares
        above = np.vstack([-n.T, g])
        goal = np.append(np.zeros(n.shape[1]), 1.0)
        rest = above @ nnls(above, goal)[0] - goal
        return threat.eps - np.linalg.norm(rest[:-1] / rest[-1]) if abs(rest).max() > 1e-9 else -1
    if threat.p == 1:  # d as the difference of two vectors, whose entries add up to the radius
        cost, one = np.append(np.zeros(2 * n.shape[1]), -1.0), np.ones((len(n), 1))
        size = np.append(np.ones(2 * n.shape[1]), 0)[None]
        sides, most = np.vstack([np.hstack([n, -n, one]), size]), np.append(-g, threat.eps)
        signs = [(0, None)] * (2 * n.shape[1]) + [(None, None)]
        return -linprog(cost, sides, most, bounds=signs).fun
    cost = np.append(np.zeros(n.shape[1]), -1.0)
    ball = [(-threat.eps, threat.eps)] * n.shape[1] + [(None, None)]
    return -linprog(cost, np.c_[n, np.ones(len(n))], -g, bounds=ball).fun


def lowest(defense, x, threat):
    """The lowest expected accuracy in the ball, by all sets of members and classes.

    Of all sets that have room in the ball, and of those with at least 1 % of its radius.
    """
    weights = defense.weights.double()
    best = [1.0, 1.0]
    for size in range(1, len(weights) + 1):
        for members in combinations(range(len(weights)), size):
            left = float(1 - weights[list(members)].sum())
            nets = [defense.members[i] for i in members]
            for classes in product(range(1, len(nets[0].b)), repeat=size):
                w = [(net.w[0] - net.w[k]).numpy() for net, k in zip(nets, classes, strict=True)]
                b = [float(net.b[0] - net.b[k]) for net, k in zip(nets, classes, strict=True)]
                gaps = [u @ x.numpy() + c for u, c in zip(w, b, strict=True)]
                if left < max(best) - 1e-9:
                    inside = room(np.array(w), np.array(gaps), threat) / threat.eps
                    least = (1e-6, 0.01)
                    best = [
                        min(b, left) if inside > s else b for b, s in zip(best, least, strict=True)
                    ]
    return best


def found_and_lowest(defense, x, y, threat, steps):
    """The expected accuracies [N] that the climb leaves, and the lowest with room in the ball."""
    x_adv = LatticeClimber(threat, steps)(defense, x, y)
    assert_inside(threat, x_adv, x)
    found = expected_accuracy(defense.members, defense.weights, x_adv, y).double()
    least, best = found.new_tensor([lowest(defense, image, threat) for image in x]).T
    assert (found >= least - 1e-5).all()
    return found, best


@every_norm
@pytest.mark.parametrize("members", [2, 4])
def test_no_image_of_the_ball_is_worse(threat, members):
    """The theorem of the paper, on two classes and linear members: what is found is maximal."""
    found, best = found_and_lowest(*ensemble(members, members, 2, threat, 8), threat, 60)
    assert len(best.unique()) > 1
    assert (found <= best + 1e-5).all()


@pytest.mark.slow
@every_norm
def test_a_thousand_linear_ensembles(threat):
    """Equal to brute force on each of 500 ensembles of two to four members; four minutes a norm."""
    for seed in range(500):
        defense, x, y = ensemble(seed, 2 + seed % 3, 2, threat, 1)
        found, best = found_and_lowest(defense, x, y, threat, 300)
        assert (found <= best + 1e-5).all(), seed


@every_norm
def test_three_classes(threat):
    """Which classes the members are to predict is a choice of its own, made by the gradients."""
    found, best = found_and_lowest(*ensemble(5, 3, 3, threat, 16), threat, 50)
    assert (found - best).mean() < 0.02


@every_norm
def test_more_members_than_all_sets_are_tried_of(threat):
    """A chain of sets fools a member if one can be fooled, and nearly what brute force does."""
    found, best = found_and_lowest(*ensemble(6, 6, 2, threat, 2), threat, 40)
    assert (found < 1 - 1e-5)[best < 1 - 1e-5].all()
    assert (found - best).mean() < 0.05


@every_norm
@pytest.mark.parametrize("probs", [[0.24, 0.19, 0.19, 0.19, 0.19], [0.2] * 5])
def test_a_member_that_keeps_out_four_others(threat, probs):
    """Each of four looks at pixels of its own, and the one that is tried first at all of them."""
    w = torch.zeros(5, 2, 12)
    for i in range(1, 5):
        w[i, 1, 3 * i - 3 : 3 * i] = 1
    w[0, 1] = -1
    if probs[0] == 0.2:
        w = w.flip(0)  # of equally probable members the last is tried first
    share = 0.9 / 4 if threat.p == 1 else 0.45  # of the radius, all of which they share in l1
    reach = threat.dual(w[:, 1]) * threat.eps * torch.where(w[:, 1].sum(1) < 0, 0.9, share)
    b = torch.stack([torch.zeros(5), -reach - 0.5 * w[:, 1].sum(1)], 1)
    defense = Ensemble(list(map(Linear, w.tolist(), b.tolist())), probs)
    x, y = torch.full((2, 12), 0.5), torch.zeros(2, dtype=torch.long)
    found = expected_accuracy(
        defense.members, defense.weights, LatticeClimber(threat)(defense, x, y), y
    )
    assert found.tolist() == pytest.approx([probs[0]] * 2)


@pytest.fixture
def three():
    return Ensemble([trained_net(seed) for seed in (1, 2, 3)], [0.5, 0.3, 0.2])


@every_norm
def test_stronger_than_arc_and_pgd(three, threat):
    """On networks, at no more passes than ARC."""
    x, y = images(30, seed=3)
    eps = threat.eps
    climbed = accuracy(three, LatticeClimber(threat)(three, x, y), y)
    others = [PGD(threat, 20, eps / 4, random_start=False)]
    for attack in others if threat.p == 1 else [*others, ARC(threat, 20)]:
        assert climbed <= accuracy(three, attack(three, x, y), y)


@every_norm
def test_a_class_that_is_ruled_out(threat):
    """Its logit is -inf: no boundary leads there, and no image is NaN."""
    defense, x, y = ensemble(7, 2, 3, threat)
    for net in defense.members:
        net.b[2] = -torch.inf
    assert_inside(threat, LatticeClimber(threat, 20)(defense, x, y), x)
