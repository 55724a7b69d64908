"""Defenses that are broken on purpose, each with the check that must find it, and honest ones."""

import torch
from torch import nn
from torch.nn.functional import avg_pool2d, hardtanh

from lightning_rob.attacks import PGD
from lightning_rob.defenses import Defense, Ensemble, RandomTransforms, Single
from lightning_rob.objectives import classification_loss
from lightning_rob.randomness import normal
from lightning_rob.rules import mean_probs
from lightning_rob.threat import Threat
from tests.tiny import TinyNet

THREAT, LARGE = Threat("linf", 0.15), Threat("linf", 0.3)
IMAGES = 50


class Through(nn.Module):
    """A network between a function of its input and one of its output."""

    def __init__(self, net, before=lambda x: x, after=lambda z: z):
        super().__init__()
        self.net, self.before, self.after = net, before, after

    def forward(self, x):
        return self.after(self.net(self.before(x)))


class AlwaysDropping(nn.Dropout):
    """Dropout that eval() does not reach."""

    def train(self, mode=True):
        return super().train(True)


class Rounding(TinyNet):
    """A network on quantized images."""

    def forward(self, x):
        return super().forward((8 * x).round() / 8)


class Noisy(Defense):
    """A defense with noise of the generator that poses as one network."""

    def __init__(self, net, size=0.2):
        super().__init__(torch.ones(1), mean_probs)
        self.net, self.size = net, size

    @property
    def classifiers(self):
        return [self.net]

    def logits(self, x, generator=None):
        return self.net(x + self.size * normal(x, *x.shape[1:], generator=generator))[None]


def _rooted(x):
    """Return the same images; the gradient is 0 times infinity."""
    return x + 0 * (x - x.detach()).abs().sqrt()


def _astray(x):
    """Return the same images; half of the gradient has the wrong sign."""
    sign = 2.0 * torch.randint(2, x.shape[1:], generator=torch.Generator().manual_seed(0)) - 1
    return x.detach() + sign * (x - x.detach())


class Decoy(nn.Module):
    """The predictions of one network with the gradient of another."""

    def __init__(self, net, decoy):
        super().__init__()
        self.net, self.decoy = net, decoy

    def forward(self, x):
        shown = self.decoy(x)
        return self.net(x).detach() + shown - shown.detach()


def _only(seen):
    """Return the same images; only values in a mask, by an image's shape, have a gradient."""

    def before(x):
        kept = seen(x.shape[1:]).to(x)
        return x * kept + (x * (1 - kept)).detach()

    return before


_half = _only(lambda shape: torch.randint(2, shape, generator=torch.Generator().manual_seed(0)))
_third = _only(lambda shape: torch.arange(shape.numel()).view(shape) >= shape.numel() * 2 // 3)
_last_rows = _only(lambda shape: torch.arange(shape[1])[:, None] >= shape[1] * 3 // 4)


def _scaled(x):
    """Return the same images; the gradient is multiplied by fixed random numbers."""
    factors = 1 + 3 * torch.randn(x.shape[1:], generator=torch.Generator().manual_seed(0)).to(x)
    return x.detach() + factors * (x - x.detach())


def _blurred(x):
    """Return the same images; the gradient is blurred."""
    blurred = avg_pool2d(x, 3, 1, 1)
    return x.detach() + (blurred - blurred.detach())


def straight_through(x):
    """Round images to 256 grey levels; the gradient passes straight through."""
    return x + ((255 * x).round() / 255 - x).detach()


def _half_nan(x):
    """Return NaN for about half of all images, chosen by the sum of their pixels."""
    odd = (10 * x.sum((1, 2, 3), keepdim=True)).floor() % 2 == 1
    return torch.where(odd, torch.nan, x)


def clamped(x):
    """Return the same images; values of 0 or 1 have no gradient, in any release of torch."""
    return hardtanh(x, 0.0, 1.0)


def _stair(z):
    return (20 * z).floor() / 20


PLANTED = {
    "zero_gradient": (lambda net: Single(Through(net, after=_stair)), "zero_gradients"),
    "softmax": (lambda net: Single(Through(net, after=lambda z: z.softmax(1))), "outputs"),
    "quantized": (lambda net: Single(Through(net, lambda x: (8 * x).round() / 8)), "steps_inside"),
    "saturated": (lambda net: Single(Through(net, after=lambda z: 1e4 * z)), "saturation"),
    "dropout": (lambda net: Single(nn.Sequential(AlwaysDropping(0.2), net)), "modes"),
    "nondeterministic": (
        lambda net: Single(Through(net, lambda x: x + 0.2 * torch.randn_like(x))),
        "randomness",
    ),
    "noise_of_generator": (Noisy, "randomness"),
    "dynamic": (lambda net: Single(Through(net, lambda x: x - x.mean(0) + 0.5)), "batches"),
    "detached": (lambda net: Single(Through(net, lambda x: x.detach())), "gradient"),
    "infinite_gradient": (lambda net: Single(Through(net, _rooted)), "infinite_gradients"),
    "non_finite_predictions": (lambda net: Single(Through(net, _half_nan)), "numbers"),
    "misleading": (lambda net: Single(Through(net, _astray)), "black_box"),
    "half_detached": (lambda net: Single(Through(net, _half)), "slope"),
    "two_thirds_detached": (lambda net: Single(Through(net, _third)), "slope"),
    "rows_detached": (lambda net: Single(Through(net, _last_rows)), "slope"),
    "scaled_gradient": (lambda net: Single(Through(net, _scaled)), "slope"),
    "blurred_gradient": (lambda net: Single(Through(net, _blurred)), "slope"),
    "clamped": (lambda net: Single(Through(net, clamped)), "bounds"),
    "decoy": (lambda net: Single(Decoy(net, Through(net, lambda x: x.flip(3)))), "slope"),
}


def trained(net, x, y, threat=None, steps=150, batch=None, lr=0.01):
    """Train a network by some steps of Adam, adversarially if there is a threat; in eval mode."""
    optimizer = torch.optim.Adam(net.parameters(), lr)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        chosen = torch.randperm(len(x), generator=generator)[: batch or len(x)]
        images, labels = x[chosen], y[chosen]
        if threat:
            attack = PGD(threat, 4, threat.eps / 3)
            images = attack(Single(net), images, labels, generator)
        optimizer.zero_grad()
        classification_loss(net.train()(images), labels).backward()
        optimizer.step()
    return net.eval()


def honest(plain, robust, other):
    """Return defenses that must pass without a flag, of one standard net and two robust ones."""
    transforms = {"GaussianNoise": {"alpha": 0.1}, "Gamma": {"alpha": 0.1}, "UniformNoise": {}}
    return {
        "standard": Single(plain),
        "adversarially_trained": Single(robust),
        "randomized_ensemble": Ensemble([robust, other], [0.6, 0.4]),
        "ensemble_of_means": Ensemble([robust, other], rule=mean_probs),
        "random_transforms": RandomTransforms(robust, transforms, size=2, draws=5),
        "eight_bit_straight_through": Single(Through(robust, straight_through)),
    }
