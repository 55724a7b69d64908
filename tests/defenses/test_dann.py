"""DANN: the network in parts, the defense, the run, and the data that both domains come from."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob.defenses.dann import DANN, domain_adversarial_loss
from lightning_rob.defenses.transductive import learning, reinitialized
from tests.attacks.common import seeded as generator
from tests.tiny import ROOT, TinyDANN, blobs, same_weights


def fast(parameters):
    return torch.optim.Adam(parameters, 0.005)


def descent(parameters):
    """Adam would make steps of rounding errors, where BatchNorm leaves no gradient."""
    return torch.optim.SGD(parameters, 0.1)


def tiny_defense(**options):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        net = TinyDANN()
    return DANN(net, **{"source": blobs(), "epochs": 3, "batch_size": 16} | options)


# The schedule and the loss
def by_hand(net, x, y, target):
    """Class loss and domain loss apart, in the order of the two forwards."""
    source, other = net.encoder(x), net.encoder(target)
    domains = torch.cat([net.discriminator(source), net.discriminator(other)])
    told = torch.tensor([0] * len(x) + [1] * len(target))
    each = F.cross_entropy(domains, told, reduction="none")
    domain = each[: len(x)].mean() + each[len(x) :].mean()
    return F.cross_entropy(net.predictor(source), y), domain


@pytest.mark.parametrize("weight", [0.0, 0.1, 1.0])
def test_the_encoder_plays_against_the_discriminator(weight):
    """Encoder: class - alpha * domain; predictor: class; discriminator: domain."""
    net = TinyDANN().double()
    twin = copy.deepcopy(net)
    x, y = blobs()
    target = blobs(False)[0].double()
    loss = domain_adversarial_loss(net, x.double(), y, target, weight)
    loss.backward()
    classes, domain = by_hand(twin, x.double(), y, target)
    torch.testing.assert_close(loss, classes + domain, rtol=0, atol=1e-6)
    encoder, rest = list(twin.encoder.parameters()), [twin.predictor, twin.discriminator]
    (classes - weight * domain).backward(inputs=encoder, retain_graph=True)
    (classes + domain).backward(inputs=[p for part in rest for p in part.parameters()])
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-6)
    assert same_weights(net.state_dict(), twin.state_dict())  # two forwards, source first


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
def halves(count, of_target, chance):
    """Two classes: the left half separates them clearly, but shows class 1 on all target images.

    The right half separates them faintly in both sets.
    """
    y = torch.randint(2, (count,), generator=chance)
    sign = (2.0 * y - 1).view(-1, 1, 1, 1)
    x = 0.5 + 0.1 * torch.randn(count, 1, 8, 8, generator=chance)
    x[..., 4:] += 0.06 * sign
    x[..., :4] += 0.15 * (torch.ones_like(sign) if of_target else sign)
    return x.clamp(0, 1), y


def test_what_is_true_of_the_source_only_is_not_trusted():
    """Plain training on the source trusts it, and is little better than guessing on the target."""
    chance = generator()
    source, (x, y) = halves(256, False, chance), halves(256, True, chance)
    net = TinyDANN(inputs=64, classes=2, width=32)
    right = {}
    for scale in (0.0, 0.2):
        settings = {"epochs": 50, "batch_size": 64, "scale": scale, "optimizer": fast}
        final = DANN(net, source, **settings).adapt(x, generator())
        right[scale] = float((final(x).argmax(1) == y).float().mean())
        assert (final(source[0]).argmax(1) == source[1]).float().mean() > 0.95
    assert right[0.0] < 0.75
    assert right[0.2] > 0.9


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
