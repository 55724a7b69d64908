from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob.attacks import APGD, PGD, Auto, LatticeClimber
from lightning_rob.defenses import Ensemble, Mixture, Single
from lightning_rob.objectives import ce_of_mean_logits, expected_ce, linear, worst_ce
from lightning_rob.randomness import Streams, normal
from lightning_rob.rules import mean_probs
from lightning_rob.threat import Threat
from tests.attacks.common import (
    Constant,
    Hyperplane,
    Noisy,
    Recording,
    assert_inside,
    mlp,
    noise_images,
    seeded,
)

LINF, L2 = Threat("linf", 0.1), Threat("l2", 0.3)
STEPS = {"linf": 0.03, "l2": 0.1}
both_norms = pytest.mark.parametrize("threat", [LINF, L2], ids=["linf", "l2"])


def ensemble(gain=3.0):
    return Ensemble([mlp(1, gain=gain), mlp(2, gain=gain)], [0.7, 0.3])


# closed forms
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("objective", [expected_ce, worst_ce, ce_of_mean_logits, linear])
def test_reaches_the_optimum_of_a_linear_net(norm, objective):
    """Away from the bounds the margin falls by exactly eps ||w||_q, however confident the net."""
    threat, w = Threat(norm, 0.05), 100 * torch.randn(8, generator=seeded(1)).double()
    net, x = Hyperplane(w), 0.3 + 0.4 * torch.rand((20, 8), generator=seeded(2)).double()
    y = (net(x)[:, 1] > 0).long()
    y[::4] = 1 - y[::4]
    unit = w.sign() if norm == "linf" else w / w.norm()
    expected = x - 0.05 * (2 * y - 1)[:, None] * unit
    for random_start in (False, True):
        attack = PGD(threat, 60, 0.05, objective=objective, random_start=random_start)
        torch.testing.assert_close(
            attack(Single(net), x, y, seeded(3)), expected, rtol=0, atol=1e-9
        )


# reference loops
def loss(defense, x, y):
    """The expected cross-entropy of a pair, summed over the images."""
    weights = defense.weights.double()
    pairs = zip(weights, defense.members, strict=True)
    return sum(w * F.cross_entropy(m(x), y, reduction="sum") for w, m in pairs)


def gradient(defense, x, y):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(loss(defense, x, y), x)[0]


def back_into(threat, x_adv, x):
    delta = x_adv - x
    if threat.norm == "linf":
        delta = delta.clamp(-threat.eps, threat.eps)
    else:
        length = delta.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
        delta = torch.where(length > threat.eps, delta * threat.eps / length, delta)
    return (x + delta).clamp(0, 1)


def direction(threat, g):
    if threat.norm == "linf":
        return g.sign()
    return g / g.flatten(1).norm(dim=1).view(-1, 1, 1, 1)


WAYS = {  # steps, whether from a random start, and the dampings
    "fgsm": (1, False, (0.0,)),
    "bim": (8, False, (0.0,)),
    "pgd": (8, True, (0.0,)),
    "momentum": (12, False, (0.9,)),  # RT paper, Algorithm 1 with one velocity
    "aggmo": (12, False, (0.0, 0.9, 0.99)),  # the mean of the velocities' directions
}


@both_norms
@pytest.mark.parametrize(("steps", "random_start", "momentum"), WAYS.values(), ids=WAYS)
def test_the_way_by_hand(threat, steps, random_start, momentum):
    defense, (x, y) = ensemble(), noise_images()
    step, x_adv = STEPS[threat.norm], threat.start(x, seeded(5)) if random_start else x
    velocities = [torch.zeros_like(x) for _ in momentum]
    for _ in range(steps):
        g = direction(threat, gradient(defense, x_adv, y))
        velocities = [d * v + g for d, v in zip(momentum, velocities, strict=True)]
        move = sum(direction(threat, v) for v in velocities) / len(momentum)
        x_adv = back_into(threat, x_adv + step * move, x)
    attack = PGD(threat, steps, step, random_start=random_start, momentum=momentum)
    torch.testing.assert_close(attack(defense, x, y, seeded(5)), x_adv, rtol=0, atol=1e-6)


# which of the iterates is returned
def values_of(objective, defense, x, y):
    with torch.no_grad():
        return objective(defense.logits(x), defense.weights, y)


@pytest.mark.parametrize(
    ("threat", "objective", "keep_best"),
    [(LINF, expected_ce, False), (L2, linear, False), (LINF, expected_ce, True)],
)
def test_restarts_are_kept_by_the_objective(threat, objective, keep_best):
    defense, (x, y) = ensemble(gain=8.0), noise_images(40)
    once = PGD(threat, 2, STEPS[threat.norm], objective=objective, keep_best=keep_best)
    generator = seeded(6)
    runs = torch.stack([once(defense, x, y, generator) for _ in range(4)])
    values = torch.stack([values_of(objective, defense, run, y) for run in runs])
    best = values.argmax(0)
    assert len(best.unique()) == 4
    ours = replace(once, restarts=4)(defense, x, y, seeded(6))
    torch.testing.assert_close(ours, runs[best, torch.arange(40)], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("threat", "random_start", "objective"),
    [
        (LINF, False, expected_ce),
        (LINF, True, worst_ce),
        (L2, True, expected_ce),
        (L2, False, linear),
    ],
)
def test_keeps_the_best_iterate(threat, random_start, objective):
    defense, (x, y) = ensemble(gain=10.0), noise_images(60)
    last = replace((PGD(threat, 6, 2 * threat.eps)), random_start=random_start, objective=objective)
    start = threat.start(x, seeded(7)) if random_start else x
    path = [x, start]
    path += [replace(last, steps=k)(defense, x, y, seeded(7)) for k in range(1, 7)]
    values = torch.stack([values_of(objective, defense, z, y) for z in path])
    ours = replace(last, keep_best=True)(defense, x, y, seeded(7))
    value = values_of(objective, defense, ours, y)
    torch.testing.assert_close(value, values.amax(0), rtol=0, atol=1e-12)
    assert (value >= values[-1]).all()
    assert (value >= values[0]).all()
    # the case is one where it matters
    assert (value > values[-1] + 1e-6).sum() > 5
    expected = torch.stack(path)[values.argmax(0), torch.arange(60)]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)


# random defenses
def test_draws_are_averaged_and_fresh():
    """EoT by hand: the gradient of the weighted mean loss over all looks, new ones each step."""
    net, (x, y) = mlp(1, gain=3.0), noise_images()
    generator, x_adv = seeded(9), x
    for _ in range(3):
        leaf = x_adv.clone().requires_grad_()
        total = 0
        for _ in range(4):
            for share in (0.75, 0.25):
                look = leaf + 0.5 * normal(leaf, *leaf.shape[1:], generator=generator)
                total = total + share / 4 * F.cross_entropy(net(look), y, reduction="sum")
        (g,) = torch.autograd.grad(total, leaf)
        x_adv = back_into(L2, x_adv + 0.1 * direction(L2, g), x)
    attack = PGD(L2, 3, 0.1, draws=4, random_start=False)
    ours = attack(Noisy(net, 0.5, (0.75, 0.25)), x, y, seeded(9))
    torch.testing.assert_close(ours, x_adv, rtol=0, atol=1e-6)


# fooled images leave
def attacked(attack, defense, x, y):
    """Return the adversarial images and the probability of the label of each."""
    x_adv = attack(defense, x, y, Streams.from_index(torch.arange(len(x)), 1))
    return x_adv, defense(x_adv).gather(1, y[:, None])[:, 0]


@pytest.mark.parametrize(
    ("threat", "objective", "options"),
    [
        (LINF, expected_ce, {}),
        (L2, expected_ce, {"keep_best": True}),
        (LINF, expected_ce, {"restarts": 3}),
        (L2, linear, {"restarts": 3, "keep_best": True}),
    ],
)
def test_dropping_raises_no_expected_accuracy(options, objective, threat):
    """A fooled image stays fooled; further steps might make its prediction correct again."""
    x, defense = noise_images(64)[0], ensemble()
    y = defense(x).argmax(1)
    attack = PGD(threat, 6, STEPS[threat.norm], objective=objective, **options)
    _, plain = attacked(attack, defense, x, y)
    fast, right = attacked(replace(attack, early_stop=True), defense, x, y)
    assert 0 < right.mean() <= plain.mean() + 1e-6 < 1
    assert (threat.size(fast - x) <= threat.eps + 1e-6).all()


def test_long_steps_of_large_balls_are_not_refused():
    assert PGD(Threat("linf", 0.6), 1, 1.5).steps == PGD(Threat("l2", 9), 1, 2).steps == 1


def test_the_rule_of_a_mixture_decides_which_images_are_fooled():
    """Each part is wrong, towards another class; their mean is right."""
    first = Recording(Constant(2.9, 3.0, -9.0))
    defense = Mixture([Single(first), Single(Constant(2.9, -9.0, 3.0))], rule=mean_probs)
    x, y = noise_images(6)[0], torch.zeros(6, dtype=torch.int64)
    assert (defense(x).argmax(1) == 0).all()
    attack = PGD(LINF, 3, 0.03, early_stop=True, random_start=False)
    first.seen.clear()
    attack(defense, x, y)
    assert len(first.seen) == 3  # no image has left
    net = mlp(1, gain=3.0)
    mixed = Mixture([Single(net), Single(Constant(0.0, 0.0, 0.0))], rule=mean_probs)
    y = mixed(x).argmax(1)
    exact = mixed(replace(attack, early_stop=False)(mixed, x, y)).gather(1, y[:, None])
    assert torch.equal(mixed(attack(mixed, x, y)).gather(1, y[:, None]), exact)


def test_dropping_from_a_mixture_needs_to_see_who_answers():
    defense = Mixture([ensemble(), ensemble()])
    with pytest.raises(TypeError, match="which part of a mixture predicts"):
        PGD(LINF, 1, 0.1, objective=linear, early_stop=True)(defense, *noise_images(3))


def test_l1_attacks_reach_the_optimum_of_a_linear_network():
    """It moves the pixels of the largest weights to their bounds, until the radius is spent."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 2))
    w = torch.randn(784, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        net[1].weight.copy_(torch.stack([torch.zeros_like(w), w]))
        net[1].bias.copy_(torch.tensor([1e3, 0.0]))  # no image is ever misclassified
    x = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    y, threat, order = torch.zeros(20).long(), Threat("l1", 12), w.abs().argsort(descending=True)
    room = torch.where(w > 0, 1 - x.flatten(1), x.flatten(1))[:, order]
    spent = torch.minimum(room, (12 - room.cumsum(1) + room).clamp_min(0))
    best = (spent * w.abs()[order]).sum(1)
    for attack, least in ((PGD(threat, 20, 3.0), 0.85), (APGD(threat), 0.98)):
        x_adv = attack(Single(net), x, y, torch.Generator().manual_seed(2))
        assert_inside(Threat("l1", 12 + 1e-5), x_adv, x)
        reached = ((x_adv - x).flatten(1) * w).sum(1) / best
        assert least < reached.min() and reached.max() < 1 + 1e-5
    # A bias by which some images can be misclassified in the ball, and others cannot.
    net[1].bias.data[0] = (x.flatten(1) @ w + best).median()
    room = best / (net[1].bias[0] - x.flatten(1) @ w).detach()
    for attack in (Auto(threat, 600), LatticeClimber(threat, 200), APGD(threat)):
        x_adv = attack(Single(net), x, y, torch.Generator().manual_seed(2))
        assert_inside(Threat("l1", 12 + 1e-5), x_adv, x)
        fooled, sure = net(x_adv).argmax(1) == 1, (room - 1).abs() > 0.02
        assert torch.equal(fooled[sure], room[sure] > 1)
        assert 5 < fooled.sum() < 15 <= sure.sum()


def test_best_iterate_is_the_image_where_nothing_helps():
    """A hill whose top is the image itself: every other point of the ball is worse."""

    class Hill(nn.Module):
        def forward(self, x):
            f = (x - 0.5).square().flatten(1).sum(1)
            return torch.stack([f, -f], 1)

    x, y = torch.full((4, 6), 0.5).double(), torch.zeros(4, dtype=torch.int64)
    for threat in (LINF, L2):
        best = PGD(threat, 3, 2 * threat.eps, keep_best=True, restarts=2)
        assert torch.equal(best(Single(Hill()), x, y, seeded()), x)
        away = replace(best, keep_best=False)
        assert not torch.allclose(away(Single(Hill()), x, y, seeded()), x)
