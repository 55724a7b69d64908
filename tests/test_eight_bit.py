"""Images that can be saved: whole 255ths, and in the ball."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rob import PGD, Quantized8Bit, Single, Threat
from lightning_rob.attacks.eight_bit import rounded
from tests.tiny import TinyNet


def eight_bit(*shape, seed=0):
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=chance) / 255


@settings(deadline=None, derandomize=True)
@given(
    st.sampled_from(["linf", "l2"]),
    st.sampled_from([1 / 255, 4 / 255, 8 / 255, 0.5, 2.0]),
    st.integers(0, 10_000),
)
def test_every_image_is_of_255ths_and_in_the_ball(norm, eps, seed):
    x = eight_bit(4, 3, 4, 4, seed=seed)
    threat = Threat(norm, eps)
    x_adv = threat.project(
        x + 2 * eps * torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)), x
    )
    found = rounded(x_adv, x, threat)
    assert torch.equal((found * 255).round() / 255, found)
    assert (threat.distance(found, x) <= eps * (1 + 1e-5)).all()
    assert ((found >= 0) & (found <= 1)).all()


def test_truncation_leaves_the_ball_and_this_does_not():
    x, threat = eight_bit(8, 3, 8, 8), Threat("linf", 8 / 255)
    x_adv = threat.project(x - 8 / 255, x)
    truncated = (x_adv * 255 - 1e-4).clamp_min(0).floor() / 255  # what uint8() makes of it
    assert (threat.size(truncated - x) > 8.9 / 255).any()
    found = rounded(x_adv, x, threat)
    assert torch.allclose(found, x_adv, atol=1e-6)


def test_little_of_the_perturbation_is_lost():
    x, threat = eight_bit(8, 3, 8, 8), Threat("l2", 1.0)
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    x_adv = threat.project(x + noise, x)
    found = rounded(x_adv, x, threat)
    assert (threat.size(found - x) > 0.9 * threat.size(x_adv - x)).all()


def test_it_breaks_what_the_attack_breaks():
    torch.manual_seed(0)
    defense, threat = Single(TinyNet()).eval(), Threat("linf", 32 / 255)
    x = eight_bit(40, 3, 8, 8)
    y = defense(x).argmax(1)
    inner = PGD(threat, steps=10, step_size=8 / 255)
    plain, kept = (attack(defense, x, y) for attack in (inner, Quantized8Bit(inner)))
    broken = [(defense(images).argmax(1) != y).float().mean() for images in (plain, kept)]
    assert broken[0] > 0.5
    assert broken[1] > broken[0] - 0.1


def test_other_bounds_are_refused():
    inner = PGD(Threat("linf", 0.1, bounds=(-1.0, 1.0)), steps=1, step_size=0.1)
    with pytest.raises(ValueError, match="8-bit images range over"):
        Quantized8Bit(inner)
