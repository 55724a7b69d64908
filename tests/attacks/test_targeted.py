"""Targeted runs and high confidence, against the definitions by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob.attacks import PGD, HighConfidence, Targeted
from lightning_rob.defenses import Ensemble, Mixture, Single
from lightning_rob.objectives import (
    ce_of_mean_logits,
    expected_ce,
    expected_margin,
    linear,
    worst_ce,
    worst_margin,
)
from lightning_rob.threat import Threat
from tests.attacks.common import mlp, noise_images

LINF = Threat("linf", 0.1)


def runner_up(defense, x, y, rank):
    """By hand, image by image."""
    probs = sum(w * m(x).softmax(1) for w, m in zip([0.7, 0.3], defense.members, strict=True))
    targets = []
    for row, label in zip(probs.tolist(), y.tolist(), strict=True):
        wrong = sorted((k for k in range(5) if k != label), key=lambda k: -row[k])
        targets.append(wrong[rank - 1])
    return torch.tensor(targets)


def towards_linear(logits, target):
    """The target's logit minus the largest other one."""
    others = logits.scatter(1, target[:, None], -torch.inf)
    return logits.gather(1, target[:, None])[:, 0] - others.amax(1)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("objective", [linear, ce_of_mean_logits])
def test_climbs_towards_a_runner_up(rank, objective):
    defense, (x, y) = (Ensemble([mlp(1, 5, 3.0), mlp(2, 5, 3.0)], [0.7, 0.3])), noise_images(12, 5)
    target = runner_up(defense, x, y, rank)
    assert (target != y).all()
    x_adv = x
    for _ in range(6):
        leaf = x_adv.clone().requires_grad_()
        first, second = (member(leaf) for member in defense.members)
        logits = 0.7 * first + 0.3 * second
        if objective is linear:
            value = towards_linear(logits, target).sum()
        else:
            value = -F.cross_entropy(logits, target, reduction="sum")
        (g,) = torch.autograd.grad(value, leaf)
        x_adv = (x + (x_adv + 0.03 * g.sign() - x).clamp(-0.1, 0.1)).clamp(0, 1)
    attack = Targeted(PGD(LINF, 6, 0.03, objective, random_start=False), rank)
    torch.testing.assert_close(attack(defense, x, y), x_adv, rtol=0, atol=1e-6)


# high confidence

KEEPS_BEST = PGD(LINF, 6, 0.03, random_start=False, keep_best=True)


@pytest.mark.parametrize("least", [False, True])
def test_high_confidence_keeps_the_most_confident_of_its_runs(least):
    x, y = noise_images(12, 5)
    nets = [mlp(0, 5, 3.0), mlp(1, 5, 3.0)]
    space = Mixture([Single(model) for model in nets])
    climb = replace(KEEPS_BEST, objective=worst_ce if least else expected_ce)

    def confidence(images):
        probs = torch.stack([model(images).softmax(-1) for model in nets]).detach()
        wrong = probs.scatter(-1, y.expand(2, -1)[..., None], 0).amax(-1)
        return wrong.amin(0) if least else wrong.mean(0)

    def margin(k):
        def objective(logits, weights, y):
            other = logits.gather(-1, ((y + k) % 5).expand(2, -1)[..., None])[..., 0]
            gaps = other - logits.gather(-1, y.expand(2, -1)[..., None])[..., 0]
            return gaps.amin(0) if least else gaps.mean(0)

        return objective

    runs = [replace(KEEPS_BEST, objective=worst_margin if least else expected_margin)]
    runs += [replace(KEEPS_BEST, objective=margin(k)) for k in range(1, 5)]
    best = torch.stack([confidence(x), *(confidence(run(space, x, y)) for run in runs)]).amax(0)
    found = confidence(HighConfidence(climb, untargeted=1)(space, x, y))
    torch.testing.assert_close(found, best, rtol=1e-5, atol=1e-6)


def test_probabilities_that_round_to_zero_still_have_an_order():
    net = nn.Linear(4, 4, bias=False)
    net.weight.data = torch.diag(torch.tensor([1000.0, 300.0, 200.0, 400.0]))
    x, y = torch.full((1, 4), 0.5), torch.tensor([0])
    assert (net(x).softmax(1)[0, 1:] == 0).all()
    attack = Targeted(PGD(LINF, 1, 0.1, linear, random_start=False))
    expected = torch.tensor([[0.4, 0.5, 0.5, 0.6]])
    torch.testing.assert_close(attack(Single(net), x, y), expected)
