"""The gradient of an objective: of all draws, of a mixture part by part, and of single draws."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob import plots
from lightning_rob.attacks import APGD, PGD, Square, attacking, draw_gradients, trace
from lightning_rob.attacks.gradient import ObjectiveGradient
from lightning_rob.defenses import Ensemble, Mixture, Single
from lightning_rob.objectives import (
    ce_of_mean_probs,
    confident,
    expected_ce,
    expected_probability_margin,
    linear,
    worst_ce,
)
from lightning_rob.randomness import Streams, normal
from lightning_rob.rules import majority, mean_probs, random_member
from lightning_rob.runtime.errors import ZeroGradientWarning
from lightning_rob.threat import Threat
from tests.attacks.common import (
    Constant,
    Noisy,
    Recording,
    images,
    mlp,
    noise_images,
    plane,
    trained_net,
)


def test_gradients_are_those_of_single_draws():
    x, y = noise_images(6)
    defense, chance = Noisy(mlp(0)), torch.Generator().manual_seed(3)
    expected = []
    for _ in range(4):
        noisy = x + 0.3 * normal(x, 3, 2, 2, generator=chance)
        noisy.requires_grad_()
        loss = F.cross_entropy(defense.net(noisy), y, reduction="sum")
        expected += torch.autograd.grad(loss, noisy)
    ours = draw_gradients(defense, x, y, 4, torch.Generator().manual_seed(3))
    torch.testing.assert_close(ours, torch.stack(expected))
    leaf = x.clone().requires_grad_()
    logits = mlp(0)(leaf)
    wrong = logits.scatter(1, y[:, None], -torch.inf).amax(1)
    (of_margin,) = torch.autograd.grad((wrong - logits.gather(1, y[:, None])[:, 0]).sum(), leaf)
    ours = draw_gradients(Single(mlp(0)), x, y, 2, objective=linear)
    torch.testing.assert_close(ours, torch.stack([of_margin, of_margin]))


@pytest.mark.parametrize(
    ("rule", "fooled"), [(random_member, False), (mean_probs, True), (majority, True)]
)
def test_an_image_is_fooled_if_no_part_that_may_predict_is_correct(rule, fooled):
    """Label 0: one of three parts is correct; pooled, the other two outvote it."""
    right, wrong = Constant(3.0, 0.0, 0.0), Constant(0.0, 9.0, 0.0)
    parts = [Single(right), Ensemble([wrong, wrong], rule=mean_probs), Single(wrong)]
    defense, (x, _) = Mixture(parts, [0.2, 0.4, 0.4], rule), noise_images(2)
    y = torch.zeros(2, dtype=torch.int64)
    with attacking(defense) as defense:
        found = ObjectiveGradient(expected_ce)(defense, x, y, None).fooled(y)
    assert found.tolist() == [fooled] * 2
    assert ((defense(x)[:, 0] == 0) == found).all()


@pytest.mark.parametrize("objective", [expected_ce, worst_ce])
def test_a_mixture_of_confident_parts_has_one_value_with_and_without_a_gradient(objective):
    """Else keep_best, which compares both, would miss the better of two images."""
    parts = [Single(Constant(margin, 0.0, 0.0)) for margin in (140.0, 80.0, 200.0)]
    defense, (x, _) = Mixture(parts, [0.25, 0.5, 0.25]), noise_images(2)
    y, at = torch.zeros(2, dtype=torch.int64), ObjectiveGradient(objective)
    values = at(defense, x, y, None).value, at.value(defense, x, y, None).detach()
    torch.testing.assert_close(*values, rtol=1e-6, atol=0)


class Scaled(nn.Module):
    """The same predictions; from some factor on, the probabilities have no gradient."""

    def __init__(self, net, factor):
        super().__init__()
        self.net, self.factor = net, factor

    def forward(self, x):
        return self.net(x) * self.factor


def test_warns_of_the_images_that_cannot_move_though_others_can():
    cool, (x, _) = trained_net(1).eval(), images(40, seed=6)
    y, threat = cool(x).argmax(1), Threat("linf", 0.1)
    factor = torch.ones(40, 1)
    factor[:20] = 1e6
    pgd, hot = PGD(threat, 1, 0.1, confident, random_start=False), Single(Scaled(cool, factor))
    with pytest.warns(ZeroGradientWarning, match="exactly zero for 20 of 40 images"):
        pgd(hot, x, y)


@pytest.mark.parametrize("kind", [PGD, APGD])
@pytest.mark.parametrize("norm", ["linf", "l2"])
@pytest.mark.parametrize("objective", [expected_ce, ce_of_mean_probs, expected_probability_margin])
def test_huge_logits_have_a_gradient(kind, norm, objective):
    """A hyperplane of logits in the thousands: images nearer than eps are fooled, and only they."""
    net, x, y, distance = plane(norm, gain=1e5)
    net, x, distance = net.float(), x.float(), distance.float()
    threat = Threat(norm, distance.median().item())
    leaf = x.clone().requires_grad_()
    torch.nn.functional.cross_entropy(net(leaf), y).backward()
    assert (leaf.grad == 0).flatten(1).all(1).sum() >= 38
    counted = Recording(net)
    attack = (
        PGD(threat, 60, threat.eps / 8, objective) if kind is PGD else APGD(threat, 60, objective)
    )
    x_adv = attack(Single(counted), x, y)
    sure = (distance - threat.eps).abs() > 0.01 * threat.eps
    assert sure.sum() > 35
    assert torch.equal((net(x_adv).argmax(1) != y)[sure], (distance < threat.eps)[sure])
    assert len(counted.seen) == 60 if kind is PGD else 62  # one pass a step, as everywhere


@pytest.mark.parametrize("norm", ["linf", "l1"])
def test_a_trace_is_of_the_iterates_by_hand(norm):
    """The attack's images stay bit for bit; each step's loss, margin and norm are the network's."""
    net, (x, y) = trained_net(1).eval(), images(3, seed=1)
    attack = PGD(Threat(norm, 0.3), 6, 0.1)
    noise = Streams.from_index(torch.arange(3), 5)
    recording = Recording(net)
    alone = [attack(Single(recording), x[[i]], y[[i]], noise[torch.tensor([i])]) for i in range(3)]
    seen = torch.cat(recording.seen)
    found = trace(attack, Single(net), x, y, noise)
    assert torch.equal(found.x_adv, torch.cat(alone))
    assert found.loss.shape == found.margin.shape == found.gradient_norm.shape == (3, 6)
    logits, labels = net(seen.requires_grad_()), y.repeat_interleave(6)
    loss = F.cross_entropy(logits, labels, reduction="none")
    (gradient,) = torch.autograd.grad(loss.sum(), seen)
    wrong = logits.scatter(1, labels[:, None], -torch.inf).amax(1)
    margin = logits.gather(1, labels[:, None])[:, 0] - wrong
    expected = (loss, margin, gradient.flatten(1).norm(dim=1))
    for ours, theirs in zip((found.loss, found.margin, found.gradient_norm), expected, strict=True):
        torch.testing.assert_close(ours.flatten(), theirs, rtol=1e-3, atol=1e-5)
    lines = [axes.get_lines() for axes in plots.trace(found).axes]
    assert [len(drawn) for drawn in lines] == [3, 4, 3]  # and the margin's zero
    assert torch.equal(torch.as_tensor(lines[0][1].get_ydata()), found.loss[1])


def test_a_trace_ends_where_an_image_leaves_and_needs_gradients():
    net, (x, y) = trained_net(1).eval(), images(12, seed=1)
    defense = Ensemble([net, trained_net(2)], rule=mean_probs)
    found = trace(APGD(Threat("linf", 0.1), 20), defense, x, y, Streams.from_index(y))
    lengths = found.loss.isfinite().sum(1)
    assert lengths.min() < lengths.max() == found.loss.shape[1] == 22
    mixture = Ensemble([net, trained_net(2)], rule=random_member)
    assert trace(PGD(Threat(), 3, 0.1), mixture, x, y).loss.shape == (12, 3)  # not one for a member
    with pytest.raises(ValueError, match="Square asked for no gradient of an objective on 12"):
        trace(Square(Threat("linf", 0.1), 5), defense, x, y)
