import math
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from lightning_rob.attacks import ARC, PGD, Attack
from lightning_rob.attacks.arc import expected_accuracy, member_order
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.objectives import ce_of_mean_logits, linear
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from tests import plain


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


def mlp(seed, classes=4):
    return MLP(seed, classes)


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


# Algorithm 2, one image at a time, in plain loops


def norm(v, p):
    return max(abs(a) for a in v) if p == math.inf else sum(abs(a) ** p for a in v) ** (1 / p)


def reference_arc(members, alpha, image, label, threat, eta, steps, start, candidates):
    """ARC as the paper and its authors have it: image, start and result are lists of floats.

    `candidates` is G, the number of competitors with the largest logits; None is all of them.
    """
    p, eps, size = threat.p, threat.eps, len(image)
    q = 1 if p == math.inf else 2

    def logits(point):
        with torch.no_grad():
            return [m(torch.tensor([point], dtype=torch.float64))[0].tolist() for m in members]

    def score(delta):
        rows = logits([image[d] + delta[d] for d in range(size)])
        right = [row.index(max(row)) == label for row in rows]
        return sum(a for a, r in zip(alpha, right, strict=True) if r)

    def confined(delta):
        if p == math.inf:
            delta = [max(-eps, min(eps, a)) for a in delta]
        elif norm(delta, 2) > eps:
            delta = [a * eps / norm(delta, 2) for a in delta]
        return [max(min(a, 1 - image[d]), 0 - image[d]) for d, a in enumerate(delta)]

    def gradients(member, point):
        z = torch.tensor([point], dtype=torch.float64, requires_grad=True)
        out = member(z)[0]
        rows = [torch.autograd.grad(f, z, retain_graph=True)[0][0].tolist() for f in out]
        return out.tolist(), rows

    # falling probability; of equal ones the later member first
    order = sorted(range(len(members)), key=lambda i: (alpha[i], i), reverse=True)
    rho = 0.05 * eps
    delta, v = list(start), score([0.0] * size)
    for _ in range(steps):
        local, v_local = [0.0] * size, v
        for i in order:
            point = [image[d] + delta[d] + local[d] for d in range(size)]
            f, grads = gradients(members[i], point)
            m = f.index(max(f))
            rivals = sorted((j for j in range(len(f)) if j != m), key=lambda j: -f[j])
            nearest, w_n, zeta = None, None, math.inf
            for j in rivals[:candidates]:
                w = [grads[m][d] - grads[j][d] for d in range(size)]
                distance = abs(f[m] - f[j]) / (norm(w, q) + 1e-10)
                if distance < zeta:
                    nearest, w_n, zeta = j, w, distance
            assert nearest is not None
            if p == math.inf:
                g = [-float((a > 0) - (a < 0)) for a in w_n]
            else:
                g = [-a / (norm(w_n, 2) + 1e-10) for a in w_n]
            beta = eta
            if i != order[0] and zeta < eta:
                moved = sum(a * b for a, b in zip(w_n, local, strict=True)) / (norm(w_n, q) + 1e-10)
                beta = eta / (eta - zeta + 1e-10) * abs(moved + zeta) + rho
            step = [local[d] + beta * g[d] for d in range(size)]
            length = norm(step, p) + 1e-10
            step = [eta * a / length for a in step]
            v_hat = score(confined([delta[d] + step[d] for d in range(size)]))
            if v_hat <= v_local:
                local, v_local = step, v_hat
        candidate = confined([delta[d] + local[d] for d in range(size)])
        v_hat = score(candidate)
        if v_hat <= v:
            delta, v = candidate, v_hat
    return delta


CASES = [
    ("linf", 0.15, 0.15, [0.5, 0.5]),
    ("linf", 0.15, 0.15, [0.9, 0.1]),
    ("linf", 0.2, 0.05, [0.3, 0.7]),
    ("linf", 0.15, 0.15, [1 / 3, 1 / 3, 1 / 3]),
    ("linf", 0.3, 0.1, [0.2, 0.5, 0.3]),
    ("l2", 0.2, 0.2, [0.5, 0.5]),
    ("l2", 0.3, 0.08, [0.1, 0.9]),
    ("l2", 0.3, 0.3, [0.8, 0.2]),
    ("l2", 0.25, 0.1, [1 / 3, 1 / 3, 1 / 3]),
    ("l2", 0.4, 0.15, [0.5, 0.3, 0.2]),
]


@pytest.mark.parametrize(("norm", "eps", "eta", "alpha"), CASES)
@pytest.mark.parametrize(("neighbours", "random_start"), [(None, False), (1, True), (2, False)])
def test_algorithm_2(norm, eps, eta, alpha, neighbours, random_start):
    members, threat = mlps(len(alpha), seed=len(alpha)), Threat(norm, eps)
    defense = Ensemble(members, alpha)
    x, y = batch(members, 8)
    start = threat.start(x, Streams(torch.arange(8))) - x if random_start else torch.zeros_like(x)
    attack = ARC(threat, 3, eta, neighbours, random_start)
    ours = attack(defense, x, y, Streams(torch.arange(8)))
    weights = defense.weights.double().tolist()
    for b in range(8):
        delta = reference_arc(
            members,
            weights,
            x[b].tolist(),
            int(y[b]),
            threat,
            eta,
            3,
            start[b].tolist(),
            neighbours,
        )
        expected = x[b] + torch.tensor(delta, dtype=torch.float64)
        torch.testing.assert_close(ours[b], expected, rtol=0, atol=1e-6)
    # the case is one where something is fooled and something is not
    clean, left = scores(members, weights, x, y), scores(members, weights, ours, y)
    assert (left <= clean + 1e-9).all()
    assert left.mean() < clean.mean() - 0.1


def test_one_network_and_many_steps():
    """Algorithm 2 on a single member: DeepFool's steps, renewed at every iterate."""
    net, threat = mlp(7), Threat("l2", 0.2)
    x, y = batch([net], 6, seed=1)
    ours = ARC(threat, 6, 0.07)(Single(net), x, y)
    for b in range(6):
        delta = reference_arc(
            [net], [1.0], x[b].tolist(), int(y[b]), threat, 0.07, 6, [0.0] * 6, None
        )
        expected = x[b] + torch.tensor(delta, dtype=torch.float64)
        torch.testing.assert_close(ours[b], expected, rtol=0, atol=1e-6)


# Theorem 4.2


class Side(nn.Module):
    """Two classes, separated by w.(x - 0.5) + b = 0: the centre is at a distance b / ||w||."""

    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = w, b

    def forward(self, x):
        f = (x.flatten(1) - 0.5) @ self.w + self.b
        return torch.stack([-f / 2, f / 2], 1)


def opposed(norm, seed, dim, share=1.0, dtype=torch.float32):
    """The counter-example: a radius that fools either of two members, and images in between."""
    w = torch.randn(dim, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    w = w.where(w.abs() > 0.05, 0.05)
    p = math.inf if norm == "linf" else 2
    b = share * 0.15 * float(w.norm() ** 2 / torch.linalg.vector_norm(w, p))
    eps = 2 * b * float(torch.linalg.vector_norm(w, p) / w.norm() ** 2)
    defense = Ensemble([Side(w, b), Side(-w, b)], [0.5, 0.5])
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
    plain = PGD(threat, 20, threat.eps / 4, random_start=False)
    for blind in (
        plain,
        replace(plain, keep_best=True),
        replace(plain, momentum=(0.9,)),
        replace(plain, momentum=(0.0, 0.9, 0.99)),
        replace(plain, objective=linear),
        replace(plain, objective=ce_of_mean_logits),
    ):
        assert defense(blind(defense, x, y))[:, 1].tolist() == [1.0] * 3
    for neighbours in (None, 1):
        for steps in (1, 5):
            x_adv = ARC(threat, steps, threat.eps, neighbours)(defense, x, y)
            assert defense(x_adv)[:, 1].tolist() == [0.5] * 3


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_theorem_4_2_member_alone_is_fooled_by_both(norm):
    """It is the mixing that blinds PGD, not the radius."""
    defense, threat, x, y = opposed(norm, 1, 5)
    for member in defense.members:
        for attack in (PGD(threat, 5, threat.eps, random_start=False), ARC(threat, 1, threat.eps)):
            alone = Single(member)
            assert alone(attack(alone, x, y))[:, 1].tolist() == [0.0] * 3


# properties


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("classes", [2, 3, 6])
def test_all_neighbours_are_the_full_search(norm, classes):
    members, threat = mlps(2, seed=5, classes=classes), Threat(norm, 0.2)
    x, y = batch(members, 32)
    y = y % classes
    full = ARC(threat, 4, 0.1)(Ensemble(members, [0.6, 0.4]), x, y)
    for neighbours in (classes - 1, classes, 1000):
        some = ARC(threat, 4, 0.1, neighbours)(Ensemble(members, [0.6, 0.4]), x, y)
        assert torch.equal(some, full)
    if classes > 2:
        one = ARC(threat, 4, 0.1, 1)(Ensemble(members, [0.6, 0.4]), x, y)
        assert not torch.equal(one, full)


ENSEMBLES = [(2, [0.9, 0.1]), (3, [0.2, 0.5, 0.3]), (5, None)]


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(("count", "probs"), ENSEMBLES)
def test_more_steps_never_help_the_defense(norm, count, probs):
    members = mlps(count, seed=6)
    defense, (x, y) = Ensemble(members, probs), batch(members, 64)
    left = [scores(members, defense.weights, x, y)]
    for steps in range(1, 8):
        x_adv = ARC(Threat(norm, 0.2), steps, 0.08)(defense, x, y)
        left.append(scores(members, defense.weights, x_adv, y))
        assert (left[-1] <= left[-2]).all()
    assert left[-1].mean() < left[0].mean() - 0.1
    assert left[-1].mean() > 0


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


@dataclass(frozen=True)
class Given(Attack):
    """Images that are known beforehand."""

    threat: Threat
    images: torch.Tensor

    def perturb(self, defense, x, y, generator):
        return self.images


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


def test_a_start_worse_than_the_image_is_not_taken():
    members, probs = mlps(2), [0.5, 0.5]
    x, y = batch(members, 32)
    threat = Threat("linf", 0.3)
    helped = PGD(threat, 20, 0.05, objective=helping, random_start=False)(
        Ensemble(members, probs), x, y
    )
    clean, start = scores(members, probs, x, y), scores(members, probs, helped, y)
    assert (start > clean).any()
    attack = ARC(threat, 1, 1e-9, start=Given(threat, helped))
    assert (scores(members, probs, attack(Ensemble(members, probs), x, y), y) <= clean).all()


def helping(logits, weights, y):
    return -ce_of_mean_logits(logits, weights, y)


@pytest.mark.parametrize("options", [{"random_start": True}, {"threat": Threat("linf", 0.2)}])
def test_a_start_that_does_not_fit(options):
    pgd = PGD(Threat("linf", 0.1), 1, 0.1)
    with pytest.raises(ValueError, match="start must be of threat"):
        ARC(**({"threat": pgd.threat, "steps": 1, "step_size": 0.1, "start": pgd} | options))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_stronger_than_adaptive_pgd_on_opposed_members(norm):
    """Members that were pushed apart, the case the paper is about."""
    defense, threat, _, _ = opposed(norm, 4, 6, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x = 0.5 + 0.02 * torch.randn((50, 6), generator=generator).double()
    y = torch.ones(50, dtype=torch.int64)
    threat = replace(threat, eps=0.8 * threat.eps)
    pgd = PGD(threat, 20, threat.eps / 4, random_start=False)(defense, x, y)
    arc = ARC(threat, 20, threat.eps)(defense, x, y)
    assert defense(arc)[:, 1].mean() <= 0.5
    assert defense(arc)[:, 1].mean() <= defense(pgd)[:, 1].mean()


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
    assert member_order(Ensemble([nn.Identity()] * len(probs), probs).weights) == order


def test_expected_accuracy_by_hand():
    members, weights = mlps(3, seed=9), [0.5, 0.3, 0.2]
    x = torch.rand((100, 6), generator=torch.Generator().manual_seed(9)).double()
    y = torch.arange(100) % 4
    ours = scores(members, weights, x, y)
    for b in range(100):
        right = [int(m(x[b : b + 1]).argmax()) == int(y[b]) for m in members]
        expected = sum(w for w, r in zip(weights, right, strict=True) if r)
        assert ours[b].item() == pytest.approx(expected, abs=1e-6)
    assert len(set(ours.tolist())) > 2


# in half precision


@pytest.mark.parametrize("place", ["autocast", "bfloat16"])
def test_small_probabilities_count_in_half_precision(place):
    """A member of probability 0.001 must not be lost in the rounding of the scores."""

    class Constant(nn.Module):
        def __init__(self, right):
            super().__init__()
            self.right = right

        def forward(self, x):
            logits = torch.tensor([1.0, 0.0] if self.right else [0.0, 1.0])
            return logits.expand(len(x), 2).to(x.dtype)

    x, y = torch.rand(2, 4), torch.zeros(2, dtype=torch.int64)
    x = x.bfloat16() if place == "bfloat16" else x
    weights = torch.tensor([0.999, 0.001])
    with torch.autocast("cpu", torch.bfloat16, enabled=place == "autocast"):
        both = expected_accuracy([Constant(True), Constant(True)], weights, x, y)
        one = expected_accuracy([Constant(True), Constant(False)], weights, x, y)
    assert both.float().tolist() == pytest.approx([1.0, 1.0], abs=1e-6)
    assert one.float().tolist() == pytest.approx([0.999, 0.999], abs=1e-6)


@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize(("neighbours", "drop"), [(1, True), (3, False)])
def test_as_strong_as_the_plain_batched_algorithm(norm, neighbours, drop):
    """Which `benchmarks/attacks.py` measures the time against."""
    members, weights = mlps(3, seed=5), torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    x, y = batch(members, 24)
    threat = Threat(norm, 0.15 if norm == "linf" else 0.3)
    slow = plain.arc(members, weights, x, y, threat, 5, threat.eps, neighbours)
    attack = ARC(threat, 5, threat.eps, neighbours, early_stop=drop)
    fast = attack(Ensemble(members, weights), x, y)
    if not drop:
        torch.testing.assert_close(fast, slow, rtol=0, atol=1e-9)
    left = [expected_accuracy(members, weights, images, y) for images in (slow, fast)]
    torch.testing.assert_close(*left)
    assert 0 < left[0].mean() < 1
