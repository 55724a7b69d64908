"""The smallest perturbation is known for linear networks."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from lightning_rob.attacks import CW, DeepFool, attacking
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.objectives import expected_margin, linear
from lightning_rob.threat import Threat
from tests.attacks.common import Affine
from tests.tiny import TinyNet, blobs, fit_all

FREE = Threat("l2", 100)


def distances(net, x, y, order):
    """To the nearest class boundary of a linear net, where no bound is in the way: [B]."""
    logits, other = net(x), torch.arange(net.out_features) != y[:, None]
    gaps = logits.gather(1, y[:, None]) - logits
    normals = torch.linalg.vector_norm(net.weight[y][:, None] - net.weight, order, dim=-1)
    return torch.where(other, gaps / normals, torch.inf).amin(1).detach()


def affine(classes, gain=1.0, seed=0, count=8, square=False):
    """A linear net, at right angles if square, and of many images the farthest from a boundary."""
    generator = torch.Generator().manual_seed(seed)
    net = Affine(48, classes).double().requires_grad_(False)
    w = torch.randn(classes, 48, generator=generator).double()
    net.weight.copy_(gain * (torch.linalg.qr(w.T).Q.T if square else w))
    net.bias.copy_(-0.5 * net.weight.sum(1))
    x = 0.3 + 0.4 * torch.rand(400, 3, 4, 4, generator=generator).double()
    chosen = distances(net, x, net(x).argmax(1), 2).argsort(descending=True)[:count]
    return net, x[chosen], net(x[chosen]).argmax(1)


@cache
def trained():
    """Return a small trained net, with test images of all contrasts and their labels."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = fit_all(TinyNet(), *blobs(), 60)
    x, y = blobs(False, test_size=40)
    contrast = torch.linspace(0.1, 1, len(x)).view(-1, 1, 1, 1)
    return Single(net), 0.5 + contrast * (x - 0.5), y


def sizes(attack, defense, x, y, generator=None):
    return attack.threat.size(attack(defense, x, y, generator) - x)


def predictions(defense, x):
    with attacking(defense) as defense, torch.no_grad():
        return defense(x).argmax(1)


# closed forms
@pytest.mark.parametrize(
    ("classes", "objective", "gain"), [(2, expected_margin, 30.0), (5, linear, 0.3)]
)
def test_smallest_perturbation_of_a_linear_net(classes, objective, gain):
    """Where the nearest class is the one of the largest logit, which is what CW climbs."""
    net, x, y = affine(classes, gain=gain, square=True)
    attack = CW(FREE, 200, 0.005, objective=objective)
    ratio = sizes(attack, Single(net), x, y) / distances(net, x, y, order=2)
    assert ratio.min() > 0.999
    assert ratio.max() < 1.01


def test_confidence_is_the_margin():
    net, x, y = affine(2)
    attack = CW(FREE, 200, 0.005, confidence=0.2)
    x_adv = attack(Single(net), x, y)
    logits = net(x_adv)
    margin = logits.gather(1, 1 - y[:, None]) - logits.gather(1, y[:, None])
    assert (margin > 0.2).all()
    assert (margin < 0.23).all()


def test_pixels_leave_the_bounds_they_are_on():
    """Black images, where tanh is flat: the nearest boundary is there all the same."""
    net, x, _ = affine(2)
    black = torch.zeros_like(x)
    w = net.weight[1] - net.weight[0]
    net.bias.copy_(torch.stack([0.1 * w.norm(), -0.1 * w.norm()]))
    size = sizes(CW(FREE, 150), Single(net), black, torch.zeros(len(x), dtype=torch.int64))
    # only what rises can move: w.delta = 0.2 ||w|| with delta along the positive part of w
    expected = 0.2 * w.norm() / w.clamp_min(0).norm()
    torch.testing.assert_close(size, expected.expand(len(x)), rtol=0.01, atol=0)


# the search
def test_more_of_the_search_is_never_worse():
    defense, x, y = trained()
    last = torch.full((len(x),), torch.inf)
    for binary_steps in (3, 5, 8):
        attack = CW(FREE, 30, 0.02, binary_steps)
        x_adv = attack(defense, x, y)
        size = torch.where(predictions(defense, x_adv) == y, torch.inf, FREE.size(x_adv - x))
        assert (size <= last).all()
        last = size
    assert last.isfinite().all()


NEAREST = {
    "cw": CW(FREE, 40, 0.04, 5),
    "deepfool": DeepFool(Threat("linf", 1), overshoot=1e-6),
    "deepfool-l2": DeepFool(FREE, overshoot=0.0),
}
each_attack = pytest.mark.parametrize("attack", NEAREST.values(), ids=NEAREST)


@each_attack
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_perturbations_that_are_too_large_are_projected(attack, share):
    defense, x, y = trained()
    free = attack(defense, x, y)
    found = attack.threat.size(free - x)
    ball = replace(attack.threat, eps=share * float(found.median()))
    x_adv = replace(attack, threat=ball)(defense, x, y)
    small = found <= ball.eps
    assert torch.equal(x_adv[small], free[small])
    torch.testing.assert_close(x_adv[~small], ball.project(free, x)[~small])
    assert ball.size(x_adv - x).max() <= ball.eps + 1e-6
    assert share == 0 or 0 < int(small.sum()) < len(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pixels_without_a_gradient_stay(dtype):
    """tanh does not quite undo atanh, and Adam would make a step of what is left."""
    net, x, _ = affine(2)
    net.weight[:, ::2] = 0
    x, net = ((x - 0.3) / 0.4).to(dtype), net.to(dtype)
    x_adv = CW(FREE, 30, 0.05, 4)(Single(net), x, net(x).argmax(1))
    changed = (x_adv != x).flatten(1)
    assert not changed[:, ::2].any()
    assert changed[:, 1::2].all()


# distributions
def test_members_weigh_in_by_their_probability():
    """The boundary of two linear members' mean margin is that of the mean network."""
    mean, x, y = affine(2)
    shift = Affine(48, 2).double().requires_grad_(False)
    shift.weight.copy_(torch.randn(2, 48, generator=torch.Generator().manual_seed(9)))
    parts = []
    for share in (0.3, -0.7):
        parts.append(Affine(48, 2).double().requires_grad_(False))
        parts[-1].weight.copy_(mean.weight + share * shift.weight)
        parts[-1].bias.copy_(mean.bias)
    size = sizes(CW(FREE, 200, 0.005), Ensemble(parts, [0.7, 0.3]), x, y)
    ratio = size / distances(mean, x, y, order=2)
    assert ratio.min() > 0.999
    assert ratio.max() < 1.01


def test_weak_and_strong_first_constants_meet():
    defense, x, y = (part[20:32] if torch.is_tensor(part) else part for part in trained())
    weak, strong = (sizes(CW(FREE, 60, initial_const=c), defense, x, y) for c in (1e-3, 100.0))
    assert weak.median() == pytest.approx(strong.median().item(), rel=0.03)


def test_without_success_the_nearest_to_it():
    """A budget of steps that cannot reach: the objective has risen all the same."""
    net, x, y = affine(3, gain=1.0)
    before = linear(net(x)[None], torch.ones(1), y)
    x_adv = CW(FREE, 2, 1e-3, binary_steps=2)(Single(net), x, y)
    after = linear(net(x_adv)[None], torch.ones(1), y)
    assert (before < after).all()
    assert (after < 0).all()
