"""Rounds of which a share is not attacked, and corruptions in the place of an attack."""

import pytest
import torch

from lightning_rob.attacks import PGD, OnMember, RandomMember
from lightning_rob.attacks.corrupted import CommonCorruption
from lightning_rob.attacks.partly import PartialBatchAttack
from lightning_rob.defenses import Ensemble, Single
from lightning_rob.evaluation.protocol import evaluate_once
from lightning_rob.randomness import Streams
from lightning_rob.threat import Threat
from lightning_rob.transforms import GaussianNoise
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
    chance = torch.Generator().manual_seed(1)
    x = torch.rand(count, 3, 8, 8, generator=chance)
    return x, torch.randint(0, 4, (count,), generator=chance), torch.arange(count)


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
    x_adv, _ = evaluate_once(attack, defense, x, y, index, 0)
    torch.testing.assert_close(x_adv[:10], Brightness(2)(x[:10]))
    assert float((x_adv[10:] - x[10:]).abs().max()) <= 16 / 255 + 1e-6
    assert attack.threat == Threat("linf", 1.0)
    assert (
        PartialBatchAttack(INNER).threat
        == PartialBatchAttack(INNER, natural=INNER).threat
        == THREAT
    )


def test_empty_batches_and_shares_out_of_range(defense):
    x, y, _ = batch(0)
    assert PartialBatchAttack(INNER)(defense, x, y).shape == x.shape
    with pytest.raises(ValueError, match=r"share in \[0, 1\], got 1.5"):
        PartialBatchAttack(INNER, 1.5)


def test_strategies_are_those_of_the_attack():
    defense = Ensemble([TinyNet(), TinyNet()], [0.7, 0.3])
    found = PartialBatchAttack(RandomMember(INNER), 0.25).strategies(defense)
    assert found == [
        (pytest.approx(p), PartialBatchAttack(OnMember(INNER, i), 0.25))
        for i, p in enumerate((0.7, 0.3))
    ]


def test_another_radius_reaches_the_inner_attack():
    attack = PartialBatchAttack(INNER, 0.25, CommonCorruption(Brightness(1))).rescaled(8 / 255)
    assert attack.attack.threat.eps == pytest.approx(8 / 255)
    assert attack.attack.step_size == pytest.approx(4 / 255)
    assert attack.natural == CommonCorruption(Brightness(1))


def test_any_transform_is_a_corruption(defense):
    """By each image's own chance, whatever the batch."""
    x, y, index = batch()
    noisy = CommonCorruption(GaussianNoise(alpha=0.2))
    whole = noisy(defense, x, y, Streams.from_index(index, 0))
    parts = [noisy(defense, x[i], y[i], Streams.from_index(index[i], 0)) for i in index.split(6)]
    assert torch.equal(whole, torch.cat(parts))
    assert 0.1 < float((whole - x).std()) < 0.2
    assert torch.equal(whole, noisy(Single(TinyNet()), x, y, Streams.from_index(index, 0)))
