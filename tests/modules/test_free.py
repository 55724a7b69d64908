"""FreeTraining against the algorithm written as a plain loop."""

import copy

import pytest
import torch
from lightning.pytorch import Trainer
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_rob.attacks import PGD
from lightning_rob.modules import FreeTraining
from lightning_rob.threat import Threat
from tests.tiny import Blobs, TinyNet

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
    Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    ).fit(module, loader, loader)


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
    ("norm", "replays", "options"),
    [("linf", 3, {}), ("linf", 1, {}), ("l2", 2, {}), ("linf", 2, {"gradient_clip_val": 0.5})],
)
def test_training_is_the_plain_loop(norm, replays, options):
    torch.manual_seed(0)
    module = FreeTraining(TinyNet, Threat(norm, EPS), replays, optimizer=sgd).double()
    net = copy.deepcopy(module.defense.net)
    loader = DataLoader(images(), batch_size=8)
    fit(module, loader, 2, **options)
    delta = plain_loop(net, loader, 2, replays, norm, options.get("gradient_clip_val"))
    for a, b in zip(
        module.defense.net.state_dict().values(), net.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    torch.testing.assert_close(module.delta, delta, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("norm", "replays"), [("linf", 3), ("l2", 2)])
def test_training_on_a_fixed_target_is_the_plain_loop(norm, replays, tmp_path):
    torch.manual_seed(1)
    first = TinyNet().double().eval()
    first.norm.running_mean += 0.25
    torch.save(first.state_dict(), tmp_path / "first.pt")
    torch.manual_seed(0)
    path = str(tmp_path / "first.pt")
    module = FreeTraining(TinyNet, Threat(norm, EPS), replays, sgd, attack_target=path).double()
    net = copy.deepcopy(module.defense.net)
    names = set(module.state_dict())
    loader = DataLoader(images(), batch_size=8)
    fit(module, loader, 2)
    delta = plain_loop(net, loader, 2, replays, norm, target=first)
    for a, b in zip(
        module.defense.net.state_dict().values(), net.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    torch.testing.assert_close(module.delta, delta, rtol=0, atol=1e-6)
    assert set(module.state_dict()) == names  # the target is not saved
    (target,) = module._target
    kept = first.state_dict()
    assert all(torch.equal(value, kept[name]) for name, value in target.state_dict().items())


def test_a_target_whose_checkpoint_is_missing():
    module = FreeTraining(TinyNet, Threat("linf", EPS), attack_target="nowhere.ckpt").double()
    with pytest.raises(FileNotFoundError, match=r"nowhere\.ckpt"):
        fit(module, DataLoader(images(), batch_size=8), 1)


def test_a_replay_is_a_step_and_a_batch_a_global_step():
    module = FreeTraining(TinyNet, Threat("linf", EPS), 4).double()
    fit(module, DataLoader(images(), batch_size=8), 2)
    assert module.trainer.global_step == 6
    assert int(module.defense.net.norm.num_batches_tracked) == 24


def test_black_and_white_pixels_are_perturbed_too():
    """The derivative of torch.clamp is 0 at its bounds."""
    pairs = [((x > 0.5).double(), y, i) for x, y, i in images(8)]
    module = FreeTraining(TinyNet, Threat("linf", EPS), 1).double()
    fit(module, DataLoader(pairs, batch_size=8), 1)
    assert (module.delta != 0).float().mean() > 0.9


def test_it_withstands_more_than_standard_training():
    pairs = Blobs().source(train=True)
    loader = DataLoader([(x, y, i) for i, (x, y) in enumerate(pairs)], batch_size=16)
    x, y = torch.stack([x for x, _ in pairs]), torch.tensor([y for _, y in pairs])
    attack, accuracy = PGD(Threat("linf", 0.1), 10, 0.025, random_start=False), []
    for eps in (0, 0.1):
        torch.manual_seed(0)
        module = FreeTraining(TinyNet, Threat("linf", eps), 4, optimizer=sgd)
        fit(module, loader, 8)
        predictions = module.defense.eval()(attack(module.defense, x, y)).argmax(1)
        accuracy.append((predictions == y).float().mean().item())
    assert accuracy[1] > accuracy[0] + 0.1


def test_no_replays():
    with pytest.raises(ValueError, match="replays must be at least 1, got 0"):
        FreeTraining(TinyNet, Threat("linf", EPS), 0)


def test_a_relative_radius_is_refused():
    with pytest.raises(ValueError, match="FreeTraining is for a radius in pixel units"):
        FreeTraining(TinyNet, Threat("l2", 0.3, relative=True))
