import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_rob.attacks import ARC, PGD
from lightning_rob.attacks.arc import expected_accuracy, member_order
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.objectives import ce_of_mean_logits, linear
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from tests import plain
from tests.attacks.common import Constant, Hyperplane


class MLP(nn.Module):
    """A teacher all members share, and as much again of their own: they mostly agree."""

    def __init__(self, seed, classes):
        super().__init__()
        shared = torch.Generator().manual_seed(12345)
        own = torch.Generator().manual_seed(seed)
        shapes = ((6, 12), (12, classes))
        first, last = (
            torch.randn(shape, generator=shared).double()
            + 0.7 * torch.randn(shape, generator=own).double()
            for shape in shapes
        )
        self.first, self.last = nn.Parameter(first), nn.Parameter(last)

    def forward(self, x):
        return ((2 * x.flatten(1) - 1) @ self.first).tanh() @ self.last


def mlps(count, seed=0, classes=4):
    return [MLP(100 * seed + i, classes) for i in range(count)]


def batch(members, count=16, seed=0):
    """Images on which most members agree, and every fourth one with any label."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand((10 * count, 6), generator=generator).double()
    with torch.no_grad():
        answers = torch.stack([member(x).argmax(1) for member in members])
    y = answers.mode(0).values
    chosen = (answers == y).sum(0).argsort(descending=True, stable=True)[:count]
    x, y = x[chosen], y[chosen]
    y[3::4] = torch.randint(int(y.max()) + 1, (len(y[3::4]),), generator=generator)
    return x, y


def scores(members, weights, x, y):
    return expected_accuracy(members, torch.as_tensor(weights), x, y)


CASES = [
    ("linf", 0.15, 0.15, [0.5, 0.5]),
    ("linf", 0.2, 0.05, [0.3, 0.7]),
    ("linf", 0.3, 0.1, [0.2, 0.5, 0.3]),
    ("l2", 0.2, 0.07, [1.0]),
    ("l2", 0.3, 0.08, [0.1, 0.9]),
    ("l2", 0.25, 0.1, [1 / 3, 1 / 3, 1 / 3]),
    ("l2", 0.4, 0.15, [0.5, 0.3, 0.2]),
]


@pytest.mark.parametrize(("norm", "eps", "eta", "alpha"), CASES)
@pytest.mark.parametrize(("neighbours", "random_start"), [(None, False), (1, True), (2, False)])
def test_algorithm_2(norm, eps, eta, alpha, neighbours, random_start):
    members, threat = mlps(len(alpha), seed=len(alpha)), Threat(norm, eps)
    defense = Ensemble(members, alpha)
    x, y = batch(members, 24)
    start = threat.start(x, Streams(torch.arange(24))) if random_start else None
    attack = ARC(threat, 5, eta, neighbours, random_start)
    ours = attack(defense, x, y, Streams(torch.arange(24)))
    weights = defense.weights.double()
    expected = plain.arc(members, weights, x, y, threat, 5, eta, neighbours, start)
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    # the case is one where something is fooled and something is not
    clean, left = scores(members, weights, x, y), scores(members, weights, ours, y)
    assert random_start or (left <= clean + 1e-9).all()
    assert 0 < left.mean() < clean.mean() - 0.1


# Theorems 4.1 and 4.2
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("members", [1, 2, 5])
def test_theorem_4_1(norm, members):
    """Adaptive PGD on two-class linear members takes its steps against one auxiliary classifier.

    Its weights are the mean of the members', each times alpha and the probability of a mistake.
    """
    generator = torch.Generator().manual_seed(members)
    w = torch.randn(members, 12, generator=generator).double()
    b = 0.1 * torch.randn(members, generator=generator).double()
    alpha = torch.rand(members, generator=generator).double()
    alpha /= alpha.sum()
    defense, threat = Ensemble(list(map(Hyperplane, w, b.tolist())), alpha), Threat(norm, 0.05)
    x = torch.rand(20, 12, generator=generator).double().clamp(0.2, 0.8)
    y = torch.randint(2, (20,), generator=generator)
    side = torch.where(y == 1, 1.0, -1.0).double()[:, None]
    mistaken = torch.sigmoid(-2 * side * ((x - 0.5) @ w.T + b))  # [B, M]
    towards = -side * ((mistaken * alpha) @ w)  # [B, D]: the way to lower the lead
    step = PGD(threat, 1, threat.eps, random_start=False)(defense, x, y) - x
    torch.testing.assert_close(step, threat.eps * threat.steepest(towards), rtol=0, atol=1e-7)
    # No perturbation of the ball lowers the auxiliary classifier's lead further.
    others = threat.start(x.repeat(50, 1), Streams(torch.arange(1000))) - x.repeat(50, 1)
    best = (step * towards).sum(1)
    assert (best.repeat(50) >= (others * towards.repeat(50, 1)).sum(1) - 1e-9).all()
    torch.testing.assert_close(best, threat.eps * threat.dual(towards), rtol=1e-6, atol=0)


def opposed(norm, seed, dim, share=1.0, dtype=torch.float32):
    """The counter-example: a radius that fools either of two members, and images in between."""
    w = torch.randn(dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    w = w.where(w.abs() > 0.05, 0.05)
    p = math.inf if norm == "linf" else 2
    b = share * 0.15 * float(w.norm() ** 2 / torch.linalg.vector_norm(w, p))
    eps = 2 * b * float(torch.linalg.vector_norm(w, p) / w.norm() ** 2)
    defense = Ensemble([Hyperplane(w, b), Hyperplane(-w, b)], [0.5, 0.5])
    x, y = torch.full((3, dim), 0.5, dtype=dtype), torch.ones(3, dtype=torch.int64)
    return defense, Threat(norm, eps), x, y


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(
    ("seed", "dim", "dtype"),
    [(0, 2, torch.float32), (1, 5, torch.float64), (2, 30, torch.float64), (3, 200, torch.float32)],
)
def test_theorem_4_2(norm, seed, dim, dtype):
    """Adaptive PGD stays at expected accuracy 1 where ARC reaches 1/2."""
    defense, threat, x, y = opposed(norm, seed, dim, dtype=dtype)
    assert threat.eps == pytest.approx(0.3, rel=1e-5)
    plain_pgd = PGD(threat, 20, threat.eps / 4, random_start=False)
    for blind in (
        plain_pgd,
        replace(plain_pgd, keep_best=True),
        replace(plain_pgd, momentum=(0.0, 0.9, 0.99)),
        replace(plain_pgd, objective=linear),
        replace(plain_pgd, objective=ce_of_mean_logits),
    ):
        assert defense(blind(defense, x, y))[:, 1].tolist() == [1.0] * 3
    for neighbours, steps in ((None, 1), (1, 1), (1, 5)):
        x_adv = ARC(threat, steps, threat.eps, neighbours)(defense, x, y)
        assert defense(x_adv)[:, 1].tolist() == [0.5] * 3
    for member in map(Single, defense.members):  # it is the mixing that blinds PGD, not the radius
        for attack in (plain_pgd, ARC(threat, 1, threat.eps)):
            assert member(attack(member, x, y))[:, 1].tolist() == [0.0] * 3


# properties
ENSEMBLES = [(2, [0.9, 0.1]), (3, [0.2, 0.5, 0.3]), (5, None)]


@pytest.mark.parametrize(("norm", "neighbours"), [("linf", 1), ("l2", None)])
@pytest.mark.parametrize(("count", "probs"), ENSEMBLES)
def test_dropping_the_fooled_changes_no_accuracy(norm, neighbours, count, probs):
    members = mlps(count, seed=8)
    defense, (x, y) = Ensemble(members, probs), batch(members, 64)
    keep = ARC(Threat(norm, 0.2), 6, 0.1, neighbours)
    drop = replace(keep, early_stop=True)
    all_steps, few_steps = keep(defense, x, y), drop(defense, x, y)
    after_all = scores(members, defense.weights, all_steps, y)
    after_few = scores(members, defense.weights, few_steps, y)
    torch.testing.assert_close(after_all, after_few, rtol=0, atol=1e-6)
    assert 0 < (after_all == 0).sum() < 64
    # images that are not fooled are searched to the end, but in smaller batches
    left = after_all > 0
    torch.testing.assert_close(few_steps[left], all_steps[left], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("probs", "order"),
    [
        ([0.9, 0.1], [0, 1]),
        ([0.1, 0.9], [1, 0]),
        ([0.5, 0.5], [1, 0]),
        ([1 / 3, 1 / 3, 1 / 3], [2, 1, 0]),
        ([0.2, 0.5, 0.3], [1, 2, 0]),
        ([1.0], [0]),
    ],
)
def test_member_order(probs, order):
    assert member_order(torch.tensor(probs)) == order


# in half precision
@pytest.mark.parametrize("place", ["autocast", "bfloat16"])
def test_small_probabilities_count_in_half_precision(place):
    """A member of probability 0.001 must not be lost in the rounding of the scores."""
    right, wrong = Constant(1.0, 0.0), Constant(0.0, 1.0)
    x, y = torch.rand(2, 4), torch.zeros(2, dtype=torch.int64)
    x = x.bfloat16() if place == "bfloat16" else x
    weights = torch.tensor([0.999, 0.001])
    with torch.autocast("cpu", torch.bfloat16, enabled=place == "autocast"):
        both = expected_accuracy([right, right], weights, x, y)
        one = expected_accuracy([right, wrong], weights, x, y)
    assert both.float().tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    assert one.float().tolist() == pytest.approx([0.999, 0.999], abs=1e-6)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(("count", "probs"), ENSEMBLES)
def test_never_weaker_than_its_start(norm, count, probs):
    members = mlps(count, seed=5)
    defense = Ensemble(members, probs)
    x, y = batch(members, 32)
    threat = Threat(norm, 0.1 if norm == "linf" else 0.25)
    pgd = PGD(threat, 10, threat.eps / 4, random_start=False)
    probs = defense.weights
    before = scores(members, probs, pgd(defense, x, y), y)
    after = scores(members, probs, ARC(threat, 5, threat.eps, start=pgd)(defense, x, y), y)
    assert (after <= before).all()
    assert (after <= scores(members, probs, x, y)).all()
    assert after.mean() < before.mean()


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_dropping_the_fooled_from_a_random_start_loses_nothing(norm):
    """An image fooled as it is may not be fooled where the search starts, and the other way round.

    The search compares with the clean image, so what the start had fooled it may lose again.
    """
    for seed in range(5):
        members = mlps(2, seed=seed)
        defense, (x, y) = Ensemble(members), batch(members, 32, seed=seed)
        keep = ARC(Threat(norm, 0.4), 4, 0.4, random_start=True)
        drop = replace(keep, early_stop=True)
        streams = [Streams(torch.arange(32)) for _ in range(2)]
        after_all = scores(members, defense.weights, keep(defense, x, y, streams[0]), y)
        after_few = scores(members, defense.weights, drop(defense, x, y, streams[1]), y)
        assert (after_few <= after_all + 1e-6).all()


def helping(logits, weights, y):
    return -ce_of_mean_logits(logits, weights, y)


def test_a_start_worse_than_the_image_is_not_taken():
    members, probs = mlps(2), [0.5, 0.5]
    x, y = batch(members, 32)
    threat = Threat("linf", 0.3)
    defense, start = Ensemble(members, probs), PGD(threat, 20, 0.05, helping, random_start=False)
    clean = scores(members, probs, x, y)
    assert (scores(members, probs, start(defense, x, y), y) > clean).any()
    attack = ARC(threat, 1, 1e-9, start=start)
    assert (scores(members, probs, attack(defense, x, y), y) <= clean).all()
