"""TADV: its loss by hand, a network drawn and trained anew, and the same training as a fit."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_rob.attacks import PGD, Attack
from lightning_rob.defenses import Single
from lightning_rob.defenses.tadv import TADV, half_adversarial
from lightning_rob.defenses.transductive import reinitialized
from lightning_rob.nets import ResNet20, SmallCNN
from lightning_rob.randomness import generator_from, seeded_global_rng
from lightning_rob.threat import Threat
from tests.attacks.common import seeded as chance
from tests.modules.support import batch
from tests.tiny import Blobs, TinyNet, blobs, same_weights

THREAT = Threat("linf", 32 / 255)
ATTACK = PGD(THREAT, steps=2, step_size=16 / 255)


class Spy(Attack):
    """Whites the images out and remembers what it was to attack, how, and with which chance."""

    def __init__(self):
        self.threat = THREAT
        self.seen = []

    def perturb(self, defense, x, y, generator):
        self.seen.append((x.clone(), y.clone(), defense.net.training, generator))
        return torch.ones_like(x)


def untouched(defense, x, y, generator):
    """No attack at all."""
    return x


def tadv(net=None, attack=ATTACK, **options):
    options = {"epochs": 2, "batch_size": 32} | options
    return TADV(net or TinyNet(), blobs(), attack, **options)


def same(a, b):
    return same_weights(a.adapted.state_dict(), b.adapted.state_dict())


# The loss
@pytest.mark.parametrize(
    ("n", "fraction", "clean"),
    [(8, 0.5, 4), (7, 0.5, 3), (1, 0.5, 0), (8, 0.25, 6), (8, 0.9, 1), (8, 1, 0), (8, 0.01, 8)],
)
def test_the_loss_is_of_one_forward_by_the_shares_of_clean_and_attacked(n, fraction, clean):
    """Both parts share batch statistics; the attack is in eval mode."""
    net, spy, (x, y) = TinyNet().train(), Spy(), batch(n)
    if n == 1:
        net.norm = nn.Identity()  # of one image BatchNorm has no statistics
    twin = copy.deepcopy(net)
    losses = F.cross_entropy(
        twin(torch.cat([x[:clean], torch.ones_like(x[clean:])])), y, reduction="none"
    )
    parts = [(1 - fraction, losses[:clean]), (fraction, losses[clean:])]
    expected = sum(weight * part.mean() for weight, part in parts if len(part))
    torch.testing.assert_close(half_adversarial(Single(net), x, y, spy, fraction), expected)
    torch.testing.assert_close(net.state_dict(), twin.state_dict())
    assert net.training
    assert len(spy.seen) == (clean < n)
    for images, labels, training, _ in spy.seen:
        assert torch.equal(images, x[clean:])
        assert torch.equal(labels, y[clean:])
        assert not training


# Weights drawn anew
def shaken(net):
    """A network none of whose numbers are those that a constructor gives."""
    with torch.no_grad():
        for weight in net.parameters():
            weight.normal_()
    for name, buffer in net.named_buffers():
        if "running" in name:
            buffer.uniform_(2, 3)
    return net


@pytest.mark.parametrize("make", [TinyNet, SmallCNN, ResNet20])
def test_every_weight_is_drawn_anew_and_statistics_are_forgotten(make):
    net = shaken(make())
    before = copy.deepcopy(net.state_dict())
    fresh = reinitialized(net, chance())
    old = dict(net.named_parameters())
    for name, weight in fresh.named_parameters():
        assert not (weight == old[name]).any(), name
        assert weight.isfinite().all(), name
    for name, buffer in fresh.named_buffers():
        for ending, start in {"running_mean": 0, "running_var": 1}.items():
            assert not name.endswith(ending) or (buffer == start).all()
    assert same_weights(before, net.state_dict())
    assert type(fresh) is type(net)


class Token(nn.Module):
    """A parameter that no reset_parameters knows of."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(192, 4)
        self.token = nn.Parameter(torch.zeros(192))

    def forward(self, x):
        return self.head(x.flatten(1) + self.token)


def test_a_network_that_cannot_be_drawn_anew_is_refused():
    with pytest.raises(TypeError, match=r"Token cannot be trained anew: .* draws token;"):
        tadv(Token()).adapt(batch()[0], chance())


# The defense
def by_hand(net, source, private, epochs, batch_size):
    """Adam with a halved rate each epoch, on batches whose second half is white."""
    images, labels = source
    net = reinitialized(net, private).train()
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(epochs):
        adam.param_groups[0]["lr"] = 0.01 * 0.5**epoch
        for index in torch.randperm(len(images), generator=private).split(batch_size):
            x, y = images[index].clone(), labels[index]
            half = len(x) // 2
            x[half:] = 1
            logits = net(x)
            clean = F.cross_entropy(logits[:half], y[:half])
            loss = 0.5 * clean + 0.5 * F.cross_entropy(logits[half:], y[half:])
            adam.zero_grad()
            loss.backward()
            adam.step()
    return net


def test_retraining_is_the_loop_by_hand():
    # without BatchNorm, behind which Adam makes much of gradients that are rounding
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, 4))
    defense = tadv(
        net,
        attack=Spy(),
        epochs=3,
        batch_size=20,
        optimizer=partial(torch.optim.Adam, lr=0.01),
        lr_scheduler=partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    )
    x = batch()[0]
    found = defense.adapt(x, chance(5)).adapted.state_dict()
    private = generator_from(x, chance(5))
    with seeded_global_rng(private, x.device):
        expected = by_hand(defense.net, blobs(), private, 3, 20).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_a_last_batch_of_one_image_shifts_no_end_of_an_epoch():
    """It joins the batch before, and the schedule still steps once an epoch."""
    x, y = blobs()
    defense = TADV(TinyNet(), (x[:5], y[:5]), Spy(), epochs=3, batch_size=2)
    steps = defense.losses(reinitialized(defense.net, chance()), x, chance())
    assert [ends for _, ends in steps] == [False, True] * 3


def test_redrawn_weights_are_as_large_as_those_of_the_class():
    net = ResNet20(widths=(16, 32, 64))
    fresh = dict(reinitialized(net, chance()).named_parameters())
    for name, weight in net.named_parameters():
        if weight.dim() == 4:
            assert fresh[name].std().item() == pytest.approx(weight.std().item(), rel=0.2), name


def test_it_learns_from_a_data_set_and_augments_its_images():
    items, x = Blobs().source(True), batch()[0]
    options = {"attack": untouched, "epochs": 1, "batch_size": 32}
    plain = tadv(**options).adapt(x, chance(1))
    assert same(plain, TADV(TinyNet(), items, **options).adapt(x, chance(1)))
    seen = []

    def dark(image):
        seen.append(image.shape)
        return 0 * image

    assert not same(plain, tadv(augment=[dark], **options).adapt(x, chance(1)))
    assert seen == [(3, 8, 8)] * 96
