"""DENT: its objective, optimizer and adaptation by hand, and attacks on it in parts."""

import math
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm, one_hot

from lightning_rob.attacks import PGD, Chunked, HighConfidence
from lightning_rob.defenses import DENT, Mixture
from lightning_rob.defenses.dent import AdaMod, information
from lightning_rob.nets import SmallCNN
from lightning_rob.objectives import worst_ce
from lightning_rob.threat import Threat


def trained(make):
    """Statistics and scales that are not those of a fresh layer."""
    torch.manual_seed(0)
    net = make()
    for _ in range(3):
        net(torch.rand(32, 3, 8, 8))
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d) and module.affine:
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias, 0, 0.2)
    return net.eval()


class Hard(nn.Module):
    """Votes in the place of logits."""

    def forward(self, z):
        return one_hot(z.argmax(1), z.shape[1]).float()


def small():
    return trained(lambda: SmallCNN(classes=5, channels=3, width=4))


def images(count=7):
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_the_objective_is_equation_8():
    """Divided by B, the logarithm of B and the 1e-5 in the logarithms aside."""
    logits = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)).double()
    probs = logits.softmax(-1)
    entropy, total = -(probs * probs.log()).sum(), probs.sum(0)
    equation = entropy + (total * total.log()).sum()
    value = 16 * (information(logits) + math.log(16))
    assert value.item() == pytest.approx(equation.item(), rel=1e-3)
    mean = probs.mean(0)
    released = -(probs * (probs + 1e-5).log()).sum(1).mean() + (mean * (mean + 1e-5).log()).sum()
    assert information(logits).item() == pytest.approx(released.item(), rel=1e-12)


def test_entropy_alone_has_no_rounding_in_its_logarithms():
    """The objective of Tent; its gradient is -p (log p + H), also where p is 0 in float64."""
    logits = torch.randn(16, 5, generator=torch.Generator().manual_seed(0)).double()
    logits[0] = torch.tensor([900.0, 0, 0, 0, 0])
    logits.requires_grad_()
    probs, logs = logits.softmax(-1), logits.log_softmax(-1)
    entropy = -torch.special.xlogy(probs, probs).sum(1)
    value = information(logits, 0.0)
    assert value.item() == pytest.approx(entropy.mean().item(), rel=1e-12)
    (gradient,) = torch.autograd.grad(value, logits)
    expected = -probs * (logs + entropy[:, None]) / 16
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def test_adamod_by_hand():
    chance = torch.Generator().manual_seed(0)
    gradients = torch.randn(9, 3, generator=chance, dtype=torch.float64)
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = AdaMod([weight], 0.01, (0.9, 0.99), 0.7)
    mean = square = size = torch.zeros(3, dtype=torch.float64)
    expected = torch.ones(3, dtype=torch.float64)
    for t, gradient in enumerate(gradients, start=1):
        weight.grad = gradient
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient**2
        now = 0.01 * math.sqrt(1 - 0.99**t) / (1 - 0.9**t) / (square.sqrt() + 1e-8)
        size = 0.7 * size + 0.3 * now
        expected = expected - torch.minimum(size, now) * mean
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-12, atol=1e-12)


def test_adaptation_by_hand():
    """Plain gradient descent on scales and shifts of each image, on the static statistics."""
    net, x = small(), images()
    optimizer = partial(torch.optim.SGD, lr=0.5)
    final = DENT(net, steps=3, optimizer=optimizer).adapt(x).eval()
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    scales = [m.weight.detach().repeat(len(x), 1).requires_grad_() for m in norms]
    shifts = [m.bias.detach().repeat(len(x), 1).requires_grad_() for m in norms]

    def forward():
        out = net.normalize(x)
        for stage, norm, scale, shift in zip(
            (net.layer1, net.layer2, net.layer3), norms, scales, shifts, strict=True
        ):
            plain = batch_norm(stage[0](out), norm.running_mean, norm.running_var)
            out = stage[3]((plain * scale[..., None, None] + shift[..., None, None]).relu())
        return net.linear(out.mean((2, 3)))

    for _ in range(3):
        gradients = torch.autograd.grad(information(forward()), scales + shifts)
        with torch.no_grad():
            for weight, gradient in zip(scales + shifts, gradients, strict=True):
                weight -= 0.5 * gradient
    with torch.no_grad():
        torch.testing.assert_close(final.logits(x)[0], forward(), rtol=1e-4, atol=1e-5)


def test_an_image_depends_on_its_batch():
    net, x = small(), images(32)
    whole = DENT(net).adapt(x).eval().logits(x)[0]
    half = DENT(net).adapt(x[:16]).eval().logits(x[:16])[0]
    assert not torch.allclose(whole[:16], half, atol=1e-4)
    # By entropy alone each image is on its own; AdaMod forgets the size of a gradient, not its eps.
    net, x = net.double(), x.double()
    alone = DENT(net, diversity=0.0, optimizer=partial(AdaMod, lr=0.006, eps=1e-30))
    whole = alone.adapt(x).eval().logits(x)[0]
    half = alone.adapt(x[:16]).eval().logits(x[:16])[0]
    torch.testing.assert_close(whole[:16], half, rtol=1e-6, atol=1e-9)


def test_an_adapted_network_predicts_its_own_batch_only():
    final = DENT(small()).adapt(images(7))
    with pytest.raises(ValueError, match="adapted to 7 images was given 3"):
        final.logits(images(3))


class Limited(SmallCNN):
    """Runs out of memory on more than `most` images that want gradients."""

    most = 100

    def forward(self, x):
        if x.requires_grad and len(x) > Limited.most:
            raise torch.OutOfMemoryError("no memory left")
        return super().forward(x)


def limited():
    return trained(lambda: Limited(classes=5, channels=3, width=4)).double()


CLIMB = PGD(Threat("linf", 0.1), 3, 0.05, random_start=False, keep_best=True)


@pytest.mark.parametrize(
    "inner",
    [
        CLIMB,
        replace(CLIMB, objective=worst_ce),
        HighConfidence(CLIMB, untargeted=1, targeted=1),
        Chunked(CLIMB, images=3),
    ],
    ids=["avg", "min", "confident", "chunked"],
)
def test_the_models_of_a_round_are_attacked_in_parts(inner, monkeypatch):
    """Each image meets its own scales and shifts, also in halves of halves."""
    x, y = images(11).double(), torch.arange(11) % 5
    defense, chunked = DENT(limited(), steps=2), isinstance(inner, Chunked)
    space = Mixture([defense.adapted_model, defense.adapt(x).adapted_model])
    expected = (inner.attack if chunked else inner)(space, x, y)
    monkeypatch.setattr(Limited, "most", 3)
    told = nullcontext() if chunked else pytest.warns(UserWarning, match="ran out of memory")
    with told:
        found = inner(space, x, y)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    with torch.no_grad():
        space.logits(x)  # all are asked again
    turned = space.defenses[1].logits(x.flip(0))[0].flip(0)
    assert not torch.allclose(turned, space.defenses[1].logits(x)[0])


def test_a_network_without_batch_norm():
    with pytest.raises(ValueError, match="a Flatten has none"):
        DENT(nn.Flatten())
    hard = nn.Sequential(small(), Hard())
    with pytest.raises(TypeError, match="the logits of a Sequential have none"):
        DENT(hard).adapt(images())
    with pytest.raises(ValueError, match="DENT needs the statistics of training"):
        DENT(nn.BatchNorm2d(3, track_running_stats=False)).adapt(images())
