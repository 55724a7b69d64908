"""URejectron: rejections, the training of the discriminator, attacks on the network."""

import copy
import hashlib
from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob.attacks import CW, PGD
from lightning_rob.defenses import Single
from lightning_rob.defenses.urejectron import URejectron
from lightning_rob.rules import rejected_share
from lightning_rob.threat import Threat
from tests import tiny
from tests.attacks.common import seeded as chance
from tests.tiny import TinyNet

LINF = Threat("linf", 16 / 255)


def judge(width: int = 16) -> nn.Module:
    """A network that quickly learns to separate two sets of 8x8 images, if they differ."""
    flat = nn.Linear(3 * 8 * 8, width)
    return nn.Sequential(nn.Flatten(), flat, nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 2))


def blobs(train: bool, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tiny.blobs(train, train_size=count, test_size=count)


@pytest.fixture
def net() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tiny.fit_all(TinyNet(), *blobs(True, 96), 40)


def made(net: nn.Module, **options) -> URejectron:
    defaults = {"discriminator": judge, "epochs": 3, "source": blobs(True, 96)}
    return URejectron(net, **{**defaults, **options})


def digest(defense: nn.Module) -> str:
    state = [v.detach().numpy().tobytes() for v in (*defense.parameters(), *defense.buffers())]
    return hashlib.sha256(b"".join(state)).hexdigest()


# predictions
def test_before_it_adapts_it_is_the_network(net):
    x, _ = blobs(False, 20)
    defense = made(net)
    assert torch.equal(defense(x), Single(net)(x))
    with pytest.raises(RuntimeError, match="before it has adapted"):
        defense.scores(x)


def middling(net: nn.Module, x: torch.Tensor) -> float:
    """A threshold that rejects half of the images."""
    return float(made(net).adapt(x, chance()).scores(x).median())


@pytest.mark.parametrize("tau", [0.0, None, 1.0])
def test_rejects_what_scores_above_the_threshold(net, tau):
    x, _ = blobs(False, 61)
    tau = middling(net, x) if tau is None else tau
    final = made(net, tau=tau).adapt(x, chance())
    scores, told = final.trained_discriminator(x).softmax(1)[:, 1], Single(net)(x)
    assert torch.equal(final.scores(x), scores)
    answers = final(x)
    for score, row, expected in zip(scores.tolist(), answers, told, strict=True):
        assert row.tolist() == ([0.0] * 4 if score > tau else expected.tolist())
    assert int((answers.sum(1) == 0).sum()) == {0.0: 61, 1.0: 0}.get(tau, 30)


# what it learns
def told(image: torch.Tensor) -> bytes:
    return image.numpy().tobytes()


def test_descent_by_hand(net):
    """Every image of both kinds once an epoch, in batches of both, one Adam."""
    x, source, seen = blobs(False, 30)[0], blobs(True, 50), []
    start = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))

    def watched():
        twin = copy.deepcopy(start)
        twin.register_forward_pre_hook(
            lambda module, given: seen.append((given[0].clone(), module.training))
        )
        return twin

    final = made(net, discriminator=watched, epochs=2, batch_size=32, source=source).adapt(
        x, chance()
    )
    assert not final.trained_discriminator.training
    assert all(training for _, training in seen)
    batches = [batch for batch, _ in seen]
    assert [len(batch) for batch in batches] == [32, 32, 16] * 2
    everything = Counter(map(told, torch.cat([source[0], x])))
    assert all(
        Counter(map(told, torch.cat(epoch))) == everything for epoch in (batches[:3], batches[3:])
    )
    assert not torch.equal(batches[0], batches[3])
    optimizer, tests = torch.optim.Adam(start.parameters()), set(map(told, x))
    for batch in batches:
        is_test = torch.tensor([told(row) in tests for row in batch]).long()
        optimizer.zero_grad()
        cross_entropy(start(batch), is_test).backward()
        optimizer.step()
    torch.testing.assert_close(start[1].weight, final.trained_discriminator[1].weight)


# what an attacker sees
def test_the_adapted_model_accepts_a_score_that_is_the_threshold(net):
    x, _ = blobs(False, 61)
    for tau in made(net).adapt(x, chance()).scores(x).tolist()[::4]:
        final = made(net, tau=tau).adapt(x, chance())
        assert torch.equal(final.adapted_model(x).argmax(1) == 4, final(x).sum(1) == 0)


@pytest.mark.parametrize("scale", [1, 1e8])
@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
def test_rejection_has_a_gradient_and_the_right_side(net, tau, scale):
    """No tie with a class, also of large logits, whose gradient is that of the score."""
    x, _ = blobs(False, 61)
    net.last.weight.data *= scale
    final = made(net, tau=tau, epochs=20).adapt(x, chance())
    x.requires_grad_()
    logits = final.adapted_model.logits(x)[0]
    rejected = (final(x).sum(1) == 0).tolist()
    top = logits[:, :4].amax(1)
    assert torch.equal(logits[:, :4].argmax(1), net(x).argmax(1))
    assert [bool(r > t) for r, t in zip(logits[:, 4], top, strict=True)] == rejected
    assert all(r != t for r, t in zip(logits[:, 4], top, strict=True))
    (gradient,) = torch.autograd.grad((logits[:, 4] - top).sum(), x)
    assert (gradient != 0).flatten(1).any(1).all()


def test_an_attack_on_the_adapted_model_is_accepted_more_often(net):
    """PGD on the classifier alone does not see what rejects its images."""
    x, y = blobs(False, 60)
    attack = PGD(Threat("linf", 32 / 255), 40, 4 / 255, random_start=False)
    known = attack(Single(net), x, y, chance())
    strict = float(made(net, epochs=20).adapt(known, chance()).scores(known).quantile(0.1))
    final = made(net, epochs=20, tau=strict).adapt(known, chance())
    fooled = []
    for target in (Single(net), final.adapted_model):
        answers = final(attack(target, x, y, chance()))
        fooled.append(float(((answers.sum(1) > 0) & (answers.argmax(1) != y)).float().mean()))
    assert fooled[1] > fooled[0] + 0.2


class Broken(nn.Module):
    """NaN on every second image."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        even = torch.arange(len(x)) % 2 == 0
        return self.net(x).masked_fill(even[:, None], torch.nan)


def test_logits_that_are_not_finite_are_no_rejection(net):
    x, _ = blobs(False, 40)
    answers = made(Broken(net), tau=1.0).adapt(x, chance())(x)
    assert rejected_share(answers, None, True).sum() == 0
    assert answers[::2].isnan().all() and answers[1::2].sum(1).eq(1).all()


def test_networks_of_other_precision(net):
    x, _ = blobs(False, 20)
    assert made(net.double()).adapt(x, chance()).adapted_model(x).shape == (20, 5)


# what it leaves alone
def test_attacks_are_on_the_network_and_leave_the_discriminator(net):
    x, y = blobs(False, 40)
    final = made(net).adapt(x, chance())
    before = digest(final)
    for attack in (
        PGD(LINF, 3, 8 / 255),
        CW(Threat("l2", 100), 20, 0.01, binary_steps=1, initial_const=1.0),
    ):
        alone = attack(Single(net), x, y, chance(2))
        assert torch.equal(attack(final, x, y, chance(2)), alone)
        assert torch.equal(attack(made(net), x, y, chance(2)), alone)
    assert digest(final) == before


# what is refused
def test_needs_two_classes_and_images(net):
    x, _ = blobs(False, 20)
    with pytest.raises(ValueError, match=r"logits \[B, 2\], got \[96, 4\]"):
        made(net, discriminator=TinyNet, batch_size=200, source=blobs(True, 76)).adapt(x, chance())
    with pytest.raises(ValueError, match="learns from labelled images"):
        URejectron(net).adapt(x, chance())


def test_part_of_the_source(net):
    x, counts = blobs(False, 20)[0], []
    counting = nn.Flatten()
    counting.register_forward_hook(lambda module, given, out: counts.append(len(out)))
    made(
        net,
        discriminator=lambda: nn.Sequential(counting, nn.Linear(192, 2)),
        epochs=1,
        source_size=30,
    ).adapt(x, chance())
    assert counts == [50]
