"""DANN: the network in parts, the defense, the run, and the data that both domains come from."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob.defenses.dann import DANN
from lightning_rob.defenses.transductive import learning, reinitialized
from tests.attacks.common import seeded as generator
from tests.tiny import ROOT, TinyDANN, blobs, same_weights


def descent(parameters):
    """Adam would make steps of rounding errors, where BatchNorm leaves no gradient."""
    return torch.optim.SGD(parameters, 0.1)


def tiny_defense(**options):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = TinyDANN()
    return DANN(net, **{"source": blobs(), "epochs": 3, "batch_size": 16} | options)


# The schedule and the loss
def written_out(net, source, x, epochs, size, scale, chance):
    """The authors' loop: p = (i + epoch * n) / (epochs * n), n the smaller number of batches."""
    x_s, y_s = source
    optimizer = descent(net.parameters())
    n = min(-(-len(x_s) // size), -(-len(x) // size))
    for epoch in range(epochs):
        first = torch.randperm(len(x_s), generator=chance)
        second = torch.randperm(len(x), generator=chance)
        for i in range(n):
            alpha = scale * (2 / (1 + np.exp(-10 * (i + epoch * n) / epochs / n)) - 1)
            part, place = (order[i * size : (i + 1) * size] for order in (first, second))
            optimizer.zero_grad()
            encoder = net.encoder
            a, b = encoder(x_s[part]), encoder(x[place])
            told = [
                F.cross_entropy(net.discriminator(f.detach()), torch.full((len(f),), d))
                for d, f in enumerate((a, b))
            ]
            sum(told).backward()
            frozen = copy.deepcopy(net.discriminator).requires_grad_(False)
            fooled = [
                F.cross_entropy(frozen(f), torch.full((len(f),), d)) for d, f in enumerate((a, b))
            ]
            (F.cross_entropy(net.predictor(a), y_s[part]) - alpha * sum(fooled)).backward()
            optimizer.step()


@pytest.mark.parametrize(
    ("known", "test", "size", "scale"), [(96, 32, 16, 0.1), (96, 33, 10, 1.0), (32, 96, 16, 0.1)]
)
def test_adapting_is_the_authors_loop(known, test, size, scale):
    """An epoch is as long as the smaller set: 2, 4 or 2 steps."""
    source, x = tuple(part[:known] for part in blobs()), blobs(False, test_size=test)[0]
    defense = tiny_defense(source=source, epochs=4, batch_size=size, scale=scale, optimizer=descent)
    with learning(chance := generator(5), x.device):
        ours = defense.fit_to_batch(x, chance).adapted
    with learning(chance := generator(5), x.device):
        net = reinitialized(defense.net, chance).train()
        written_out(net, source, x, 4, size, scale, chance)
    for a, b in zip(ours.state_dict().values(), net.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


# The defense
def test_the_cifar_recipe_is_the_papers(monkeypatch, tmp_path):
    """SGD, a tenth at epochs 50, 75 and 90, batches of 64, crops and flips (appendix A.4.2)."""
    from lightning_rob.cli.lightning_cli import RobustCLI

    monkeypatch.chdir(tmp_path)
    recipe = ["--config", str(ROOT / "configs/dann_cifar10.yaml"), "--trainer.accelerator=cpu"]
    built = RobustCLI(recipe, run=False)
    defense = built.model.defense
    assert defense.batch_size == built.datamodule.batch_size == 64
    assert [type(step).__name__ for step in defense.augment] == [
        "RandomCrop",
        "RandomHorizontalFlip",
    ]
    optimizer = defense.optimizer([nn.Parameter(torch.zeros(1))])
    schedule, rates = defense.lr_scheduler(optimizer), []
    for _ in range(defense.epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    wanted = [0.1] * 50 + [0.01] * 25 + [0.001] * 15 + [0.0001] * 10
    assert rates == pytest.approx(wanted)
    assert optimizer.param_groups[0]["nesterov"]


def test_augmentation_is_of_both_domains_and_by_the_defenders_generator():
    seen = []

    def step(image):
        seen.append(float(image[0, 0, 0]))
        return image + 0.01 * torch.rand(())

    x, y = torch.zeros(8, 3, 8, 8), torch.arange(8) % 4
    defense = tiny_defense(source=(x, y), epochs=1, batch_size=8, augment=[step])
    one, same = (defense.adapt(torch.ones(8, 3, 8, 8), generator(1)) for _ in range(2))
    assert sorted(seen) == [0.0] * 16 + [1.0] * 16
    assert same_weights(one.adapted.state_dict(), same.adapted.state_dict())
