"""FreeTraining against the algorithm written as a plain loop."""

import copy

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_rob.modules import FreeTraining
from lightning_rob.threat import Threat
from tests.tiny import TinyNet, quiet_trainer, same_weights

EPS = 0.05


def images(n=20):
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(n, 3, 8, 8, generator=generator, dtype=torch.float64)
    return list(
        zip(x, torch.randint(0, 4, (n,), generator=generator), torch.arange(n), strict=True)
    )


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=1e-3)


def fit(module, loader, epochs, **options):
    options |= {"max_epochs": epochs, "limit_val_batches": 0}
    quiet_trainer(**options).fit(module, loader, loader)


def plain_loop(net, loader, epochs, replays, norm, clip=None, target=None):
    """Shafahi et al. 2019, Algorithm 1; the smaller last batch updates its part of delta.

    With a target the perturbation increases the target's loss; the network is only trained.
    """
    optimizer, delta = sgd(net.parameters()), torch.zeros(8, 3, 8, 8).double()
    net.train()
    for _ in range(epochs):
        for x, y, _ in loader:
            for _ in range(replays):
                d = delta[: len(x)].clone()
                z = (x + d).clamp(0, 1).requires_grad_()
                optimizer.zero_grad()
                F.cross_entropy(net(z), y).backward()
                if target:
                    (z.grad,) = torch.autograd.grad(F.cross_entropy(target(z), y), z)
                if clip:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
                optimizer.step()
                if norm == "linf":
                    moved = (d + EPS * z.grad.sign()).clamp(-EPS, EPS)
                else:
                    lengths = z.grad.flatten(1).norm(dim=1).clamp_min(1e-12).view(-1, 1, 1, 1)
                    moved = d + EPS * z.grad / lengths
                    lengths = moved.flatten(1).norm(dim=1).view(-1, 1, 1, 1)
                    moved = moved * (EPS / lengths).clamp(max=1)
                delta[: len(x)] = moved
    return delta


@pytest.mark.parametrize(
    ("norm", "replays", "targeted", "options"),
    [
        ("linf", 3, False, {}),
        ("l2", 2, False, {}),
        ("linf", 2, False, {"gradient_clip_val": 0.5}),
        ("l2", 2, True, {}),
    ],
)
def test_training_is_the_plain_loop(norm, replays, targeted, options, tmp_path):
    torch.manual_seed(1)
    first = TinyNet().double().eval()
    first.norm.running_mean += 0.25
    torch.save(first.state_dict(), tmp_path / "first.pt")
    torch.manual_seed(0)
    path = str(tmp_path / "first.pt") if targeted else None
    module = FreeTraining(TinyNet, Threat(norm, EPS), replays, sgd, attack_target=path).double()
    net, names = copy.deepcopy(module.defense.net), set(module.state_dict())
    loader = DataLoader(images(), batch_size=8)
    fit(module, loader, 2, **options)
    clip, target = options.get("gradient_clip_val"), first if targeted else None
    delta = plain_loop(net, loader, 2, replays, norm, clip, target)
    near = {"rtol": 0, "atol": 1e-6}
    for a, b in zip(module.defense.state_dict().values(), net.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, **near)
    torch.testing.assert_close(module.delta, delta, **near)
    assert set(module.state_dict()) == names  # the target is not saved
    for target in module._target:
        assert same_weights(target.state_dict(), first.state_dict())


def test_black_and_white_pixels_are_perturbed_too():
    """The derivative of torch.clamp is 0 at its bounds."""
    pairs = [((x > 0.5).double(), y, i) for x, y, i in images(8)]
    module = FreeTraining(TinyNet, Threat("linf", EPS), 1).double()
    fit(module, DataLoader(pairs, batch_size=8), 1)
    assert (module.delta != 0).float().mean() > 0.9
