"""Attacks on adapting defenses by what they see, against hand-written references."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from lightning_rob.attacks import (
    GMSA,
    PGD,
    CommonCorruption,
    FewAttacked,
    OnMember,
    PartialBatchAttack,
    RandomMember,
    ThroughAdaptation,
    TransferFromStatic,
)
from lightning_rob.defenses import DENT, Ensemble, Single
from lightning_rob.defenses.transductive import Transductive
from lightning_rob.evaluation import RoundProtocol, evaluate
from lightning_rob.evaluation.protocol import AttackerDefenderSession
from lightning_rob.nets import SmallCNN
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms.corruptions import Brightness
from tests.tiny import TinyNet

THREAT = Threat("linf", 16 / 255)
INNER = PGD(THREAT, steps=3, step_size=8 / 255)


@pytest.fixture
def defense() -> Single:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Single(TinyNet()).eval()


def batch(count=20):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 3, 8, 8, generator=generator)
    return x, torch.randint(0, 4, (count,), generator=generator), torch.arange(count)


@pytest.mark.parametrize(
    ("clean", "count", "kept"), [(0.5, 20, 10), (0.5, 1, 0), (0.25, 9, 2), (0, 6, 0), (1, 6, 6)]
)
def test_the_first_images_stay(defense, clean, count, kept):
    x, y, index = batch(count)
    attack = PartialBatchAttack(INNER, clean)
    x_adv = attack(defense, x, y, Streams.from_index(index, 0))
    assert attack.is_clean(y).tolist() == [i < kept for i in range(count)]
    assert torch.equal(x_adv[:kept], x[:kept])
    alone = INNER(defense, x[kept:], y[kept:], Streams.from_index(index[kept:], 0))
    assert torch.equal(x_adv[kept:], alone)
    assert kept == count or (x_adv[kept:] != x[kept:]).flatten(1).any(1).all()


def test_natural_corruption_of_the_rest(defense):
    x, y, index = batch()
    attack = PartialBatchAttack(INNER, 0.5, CommonCorruption(Brightness(2)))
    x_adv, _ = AttackerDefenderSession(attack, defense, 0).step(x, y, index)
    torch.testing.assert_close(x_adv[:10], Brightness(2)(x[:10]))
    assert float((x_adv[10:] - x[10:]).abs().max()) <= 16 / 255 + 1e-6
    assert attack.threat == Threat("linf", 1.0)
    assert (
        PartialBatchAttack(INNER).threat
        == PartialBatchAttack(INNER, natural=INNER).threat
        == THREAT
    )


# adaptation

WIDE = Threat("linf", 0.1)
KEEPS_BEST = PGD(WIDE, 6, 0.03, random_start=False, keep_best=True)


def small():
    torch.manual_seed(0)
    model = SmallCNN(classes=4, channels=3, width=4)
    for _ in range(3):
        model(torch.rand(32, 3, 8, 8))  # statistics that are not those of a fresh layer
    return model.eval()


def test_the_static_network_is_attacked_by_a_transfer_attack():
    x, y, _ = batch(9)
    defense = DENT(small())
    adapted = defense.adapt(x)
    expected = KEEPS_BEST(Single(defense.net), x, y)
    torch.testing.assert_close(
        TransferFromStatic(KEEPS_BEST)(adapted, x, y), expected, rtol=0, atol=1e-6
    )
    assert not torch.equal(KEEPS_BEST(adapted, x, y), expected)


def test_through_adaptation_each_step_meets_the_defense_adapted_to_it():
    x, y, _ = batch(9)
    defense = DENT(small())
    attack = PGD(WIDE, 3, 0.05, random_start=False)
    x_adv = x
    for _ in range(3):
        final = defense.adapt(x_adv).eval()
        leaf = x_adv.clone().requires_grad_()
        loss = cross_entropy(final.logits(leaf)[0], y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, leaf)
        x_adv = (x + (x_adv + 0.05 * gradient.sign() - x).clamp(-0.1, 0.1)).clamp(0, 1).detach()
    torch.testing.assert_close(ThroughAdaptation(attack)(defense, x, y), x_adv, rtol=0, atol=1e-6)


def test_strategies_are_those_of_the_attack():
    defense = Ensemble([TinyNet(), TinyNet()], [0.7, 0.3])
    found = PartialBatchAttack(RandomMember(INNER), 0.25).strategies(defense)
    assert found == [
        (pytest.approx(p), PartialBatchAttack(OnMember(INNER, i), 0.25))
        for i, p in enumerate((0.7, 0.3))
    ]


class ByBrightness(nn.Module):
    def forward(self, x):
        bright = 20 * (x.flatten(1).mean(1) - 0.5)
        return torch.stack([-bright, bright], 1)


class Watchful(Transductive):
    """Gives a batch back the brightness that it lost: no attack on most of its images succeeds."""

    needs_source, lost, seen = False, 0.0, []

    def fit_to_batch(self, x, generator):
        self.seen.append(x)
        return self.copy_with(lost=0.6 - x.mean())

    def logits(self, x, generator=None):
        return super().logits(x + self.lost, generator)


def gray(count):
    return torch.full((count, 1, 4, 4), 0.6), torch.ones(count).long(), torch.arange(count)


@pytest.mark.parametrize(("few", "left"), [(1, 0.0), (2, 0.0), (7, 1.0)])
def test_a_few_attacked_images_of_a_batch_are_not_noticed(few, left):
    Watchful.seen, attack = [], TransferFromStatic(PGD(Threat("linf", 0.3), 2, 0.3))
    attacks = {"all": attack, "few": FewAttacked(attack, few)}
    result = evaluate(
        Watchful(ByBrightness()),
        attacks,
        [gray(7)],
        protocol=RoundProtocol(images=7),
        progress=False,
    )
    assert result.accuracy("clean") == result.accuracy("all") == 1
    assert result.accuracy("few") == result.accuracy("worst") == left
    turns = [int((x < 0.5).flatten(1).all(1).sum()) for x in Watchful.seen[2:]]
    assert sum(turns) == 7
    assert max(turns) == few


def test_every_image_is_scored_in_its_own_turn():
    """In the order of the batch, with the attack that it meets alone among clean images."""
    x, _, index = gray(5)
    x = x + torch.linspace(-0.3, 0.2, 5)[:, None, None, None]
    y, inner = (x.flatten(1).mean(1) > 0.5).long(), PGD(Threat("linf", 0.1), 2, 0.1)
    defense = Watchful(ByBrightness())
    session = AttackerDefenderSession(FewAttacked(inner, 2), defense, 0)
    x_adv, predicted = session.step(x, y, index)
    for row in ([0, 1], [2, 3], [4]):
        given = x.clone()
        given[row] = x_adv[row]
        assert ((x_adv[row] - x[row]).abs() - 0.1).abs().max() < 1e-6
        torch.testing.assert_close(predicted[0, row], defense.adapt(given)(given)[row])


def test_a_rehearsal_sees_the_whole_round():
    Watchful.seen = []
    attack = FewAttacked(GMSA(PGD(Threat("linf", 0.3), 2, 0.3), rounds=1), 2)
    x_adv, predicted = AttackerDefenderSession(attack, Watchful(ByBrightness()), 0).step(*gray(6))
    assert all(len(x) == 6 for x in Watchful.seen)
    assert (x_adv < 0.5).all() and (predicted[0].argmax(1) == 0).all()


def played(attack, defense, count=6):
    session = AttackerDefenderSession(attack, defense, 0)
    x, y, index = gray(count)
    x_adv, predicted = session.step(x, y, index)
    return session, (x_adv != x).flatten(1).any(1), predicted[0].argmax(1)


class Counting(Watchful):
    """A stateful defense that counts the rounds."""

    stateful, rounds = True, 0

    def after_batch(self, generator=None):
        return self.copy_with(rounds=self.rounds + 1)


def test_all_turns_begin_in_the_state_before_the_round():
    session, _, _ = played(FewAttacked(INNER, 2), Counting(ByBrightness()))
    assert [one.rounds for one in session.defenders[0]] == [session.rehearsals[0].rounds] == [1]


class Unlucky(Watchful):
    """After each adaptation it is wrong on some images, whatever the attack."""

    def fit_to_batch(self, x, generator):
        return self.copy_with(wrong=torch.rand(len(x), generator=generator) < 0.3)

    def logits(self, x, generator=None):
        found = Transductive.logits(self, x)
        wrong = getattr(self, "wrong", None)
        return found if wrong is None else torch.where(wrong[:, None], found.flip(-1), found)


def test_a_rehearsal_is_judged_by_the_attacked_images():
    attack = GMSA(PGD(Threat("linf", 0.3), 2, 0.3), rounds=2, from_clean=False)
    _, moved, _ = played(FewAttacked(attack), Unlucky(ByBrightness()), 30)
    assert moved.all()
    attack = FewAttacked(replace(attack, from_clean=True))
    _, moved, _ = played(attack, Unlucky(ByBrightness()), 30)
    assert moved.sum() > 12  # not where the clean image alone is wrong by chance


class Flat(ByBrightness):
    """No gradient for the first three images."""

    def forward(self, x):
        dark = (x[:, 0, 0, 0] < 0.58)[:, None, None, None]
        return super().forward(torch.where(dark, x.detach(), x))


def test_images_without_a_gradient_are_noted_at_their_places():
    x, y, index = gray(6)
    x[:3] = 0.55
    attack = PGD(Threat("linf", 0.01), 2, 0.01, random_start=False)
    attacks = {"all": attack, "few": FewAttacked(attack, 2)}
    protocol = RoundProtocol(images=6)
    defense = Counting(Flat())
    result = evaluate(defense, attacks, [(x, y, index)], protocol=protocol, progress=False)
    assert result.blind("all") == result.blind("few") == 0.5


@pytest.mark.parametrize(
    "made",
    [
        lambda: FewAttacked(ThroughAdaptation(INNER)),
        lambda: ThroughAdaptation(FewAttacked(INNER)),
        lambda: PartialBatchAttack(FewAttacked(INNER)),
        lambda: FewAttacked(FewAttacked(INNER)),
        lambda: played(GMSA(FewAttacked(INNER)), Watchful(ByBrightness())),
    ],
)
def test_a_part_of_a_round_inside_whole_rounds_is_refused(made):
    with pytest.raises(TypeError, match=r"whole rounds|inside another attack"):
        made()
