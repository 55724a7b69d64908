"""Networks, images and checks that the tests of attacks share."""

import random
from functools import cache

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob.attacks import attacking
from lightning_rob.defenses import Defense, TransformEnsemble
from lightning_rob.randomness import Streams, normal
from lightning_rob.rules import mean_probs
from lightning_rob.transforms.pool import chosen
from tests.counting import Shared

PROTOTYPES = {
    side: torch.rand((4, channels, side, side), generator=torch.Generator().manual_seed(42))
    for side, channels in ((6, 1), (8, 3))
}


class ConvNet(nn.Module):
    """Batch norm and dropout show whether an attack runs in evaluation mode."""

    def __init__(self, width=6, channels=1, side=6):
        super().__init__()
        self.conv = nn.Conv2d(channels, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.3)
        self.linear = nn.Linear(width * side**2, 4)

    def forward(self, x):
        return self.linear(self.drop(self.norm(self.conv(x)).relu()).flatten(1))


class NonFinite(nn.Module):
    """A network whose logits are NaN."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * float("nan")


class Recording(nn.Module):
    """A network that keeps the images that it is called on."""

    def __init__(self, net):
        super().__init__()
        self.net, self.seen = net, Shared()

    def forward(self, x):
        self.seen.append(x.detach().clone())
        return self.net(x)


class Affine(nn.Linear):
    """A linear network of images."""

    def forward(self, x):
        return super().forward(x.flatten(1))


class Hyperplane(nn.Module):
    """Two classes on both sides of a plane."""

    def __init__(self, w, bias=0.0):
        super().__init__()
        self.w, self.bias = nn.Parameter(w), bias

    def margin(self, x):
        return (x.flatten(1) - 0.5) @ self.w + self.bias

    def forward(self, x):
        f = self.margin(x)
        return torch.stack([-f, f], 1)


class Constant(nn.Module):
    """The same logits for every image, and a gradient."""

    def __init__(self, *logits):
        super().__init__()
        self.logits = torch.tensor(logits, dtype=torch.float64)

    def forward(self, x):
        return self.logits + 0 * x.flatten(1).sum(1, keepdim=True)


class Noisy(Defense):
    """A look at the image with noise for each weight; keeps the sizes of the batches."""

    def __init__(self, net, strength=0.3, weights=(1.0,)):
        super().__init__(torch.tensor(weights), mean_probs)
        self.net, self.strength, self.calls = net, strength, Shared()

    def logits(self, x, generator=None):
        self.calls.append(len(x))
        looks = [
            x + self.strength * normal(x, *x.shape[1:], generator=generator) for _ in self.weights
        ]
        return torch.stack([self.net(look) for look in looks])


def plane(norm, gain=1.0):
    """A hyperplane, images on both sides of it, their labels and distances (of the dual norm)."""
    net = Hyperplane(gain * torch.randn(12, generator=seeded(1), dtype=torch.float64)).double()
    x = 0.3 + 0.4 * torch.rand((40, 3, 2, 2), generator=seeded(2), dtype=torch.float64)
    y, f = net(x).argmax(1), net(x)[:, 1].detach().abs()
    return net, x, y, f / torch.linalg.vector_norm(net.w.detach(), 1 if norm == "linf" else 2)


def mlp(seed, classes=3, gain=1.0):
    """A small network in double precision for images of 3x2x2 pixels."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, classes))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(gain)
    return net.double()


def noise_images(count=10, classes=3, seed=0):
    """Images of 3x2x2 pixels in double precision, and labels."""
    x = torch.rand((count, 3, 2, 2), generator=(chance := seeded(seed))).double()
    return x, torch.randint(classes, (count,), generator=chance)


def images(count, seed=0, channels=1, side=6):
    generator = seeded(seed)
    y = torch.randint(4, (count,), generator=generator)
    shape = (count, channels, side, side)
    noise = 0.15 * torch.randn(shape, generator=generator, dtype=torch.float32)
    return (0.25 + 0.5 * PROTOTYPES[side][y, :channels] + noise).clamp(0, 1), y


def trained_transforms(names, steps=60, channels=1, side=6):
    """A transformation ensemble whose members know their transformed images, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        nets = [ConvNet(channels=channels, side=side) for _ in chosen(names)]
        ensemble = TransformEnsemble(nets, names)
        for i, net in enumerate(nets):
            optimizer = torch.optim.Adam(net.parameters(), 0.01)
            for step in range(steps):
                x, y = images(64, 1000 * i + step, channels, side)
                optimizer.zero_grad()
                cross_entropy(net(ensemble.seen(i, x, seeded(step))), y).backward()
                optimizer.step()
            net.zero_grad()
    return ensemble


@cache
def weights_of(seed):
    """Trained in double precision: the same weights, to rounding, on every machine."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)  # by which the first weights are drawn
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = ConvNet().double()
        torch.set_default_dtype(before)
        optimizer = torch.optim.Adam(net.parameters(), 0.01)
        for step in range(60):
            x, y = images(64, seed=1000 * seed + step)
            optimizer.zero_grad()
            cross_entropy(net(x.double()), y).backward()
            optimizer.step()
    return net.float().state_dict()


def trained_net(seed):
    """A fresh copy of a trained network, in training mode."""
    with torch.random.fork_rng():
        net = ConvNet()
    net.load_state_dict(weights_of(seed))
    return net


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def streams(x):
    return Streams.from_index(torch.arange(len(x)), 0)


def right(defense, x, y):
    """The probability [B] of a right prediction."""
    with attacking(defense) as defense, torch.no_grad():
        return defense(x, seeded()).gather(1, y[:, None])[:, 0]


def accuracy(defense, x, y):
    return right(defense, x, y).mean().item()


def assert_inside(threat, x_adv, x):
    assert x_adv.shape == x.shape
    assert x_adv.dtype == x.dtype
    assert x_adv.isfinite().all()
    assert x_adv.min() >= threat.bounds[0]
    assert x_adv.max() <= threat.bounds[1]
    rounding = 1e-6 * max(1, threat.eps)
    assert (threat.distance(x_adv.double(), x.double()) <= threat.eps + rounding).all()


def snapshot(defense):
    """Everything that an attack must leave as it was."""
    return {
        "modes": [module.training for module in defense.modules()],
        "modules": [(name, id(module)) for name, module in defense.named_modules()],
        "forwards": [module.__dict__.get("forward") for module in defense.modules()],
        "trainable": [p.requires_grad for p in defense.parameters()],
        "grads": [p.grad if p.grad is None else p.grad.clone() for p in defense.parameters()],
        "owners": [id(p) for p in defense.parameters()],
        "state": {name: value.clone() for name, value in defense.state_dict().items()},
        "weights": defense.weights.clone(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state()[1].tolist(),
        "python": random.getstate(),
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "hooks": sum(len(m._forward_hooks) + len(m._backward_hooks) for m in defense.modules()),
    }


def assert_same(before, after):
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key in ("state", "weights", "torch"):
            torch.testing.assert_close(after[key], value, rtol=0, atol=0, msg=key)
        elif key == "grads":
            for old, new in zip(value, after[key], strict=True):
                assert (old is None) == (new is None)
                assert old is None or torch.equal(old, new)
        else:
            assert after[key] == value, key


def half_frozen(defense):
    """The defense in training, with some parts frozen and some gradients pending."""
    first, *others = (part for part in defense.modules() if isinstance(part, ConvNet))
    first.norm.eval()
    first.conv.requires_grad_(False)
    for net in others:
        net.drop.eval()
        net.norm.weight.requires_grad_(False)
    for i, parameter in enumerate(defense.parameters()):
        parameter.grad = None if i % 3 else torch.full_like(parameter, float(i))
    return defense
