"""The spread of gradients by hand, and where many of their entries are zero."""

import math

import pytest
import torch

from lightning_rob.metrics import gradient_spread


def drawn(count=8, batch=5):
    """Draws that agree more on some images than on others."""
    generator = torch.Generator().manual_seed(0)
    common = torch.randn((batch, 3, 4, 4), generator=generator)
    noise = torch.randn((count, batch, 3, 4, 4), generator=generator)
    return common + noise * torch.linspace(0.2, 3, batch).view(-1, 1, 1, 1)


def test_by_hand():
    """Draw by draw, with the signs as vectors (RT paper, eq. 17)."""
    gradients = drawn()
    variance, cosine, agreement, _ = gradient_spread(gradients)
    for b in range(5):
        signs = [g[b].sign().flatten().tolist() for g in gradients]
        mean = [sum(column) / 8 for column in zip(*signs, strict=True)]
        squares = sum((s - m) ** 2 for row in signs for s, m in zip(row, mean, strict=True))
        assert variance[b].item() == pytest.approx(squares / 7 / 48, rel=1e-5)
        length = math.sqrt(sum(m * m for m in mean))
        cosines = [
            sum(s * m for s, m in zip(row, mean, strict=True)) / length / math.sqrt(48)
            for row in signs
        ]
        assert cosine[b].item() == pytest.approx(sum(cosines) / 8, rel=1e-5)
        signum = [(m > 0) - (m < 0) for m in mean]
        same = sum(s == m for row in signs for s, m in zip(row, signum, strict=True))
        assert agreement[b].item() == pytest.approx(same / 8 / 48, rel=1e-5)


def test_equal_and_opposite_draws():
    g = drawn()[0]
    for draws, expected in ([g, g, g], (0, 1, 1, 0)), ([g, -g], (2, 0, 0, 2)):
        for found, value in zip(gradient_spread(torch.stack(draws)), expected, strict=True):
            torch.testing.assert_close(found, torch.full((5,), float(value)))


def test_zeros_lower_the_variance_but_not_that_of_nonzero_entries():
    """By hand: two draws of eight entries, the first with two zeros. Then independent signs."""
    first, second = torch.ones(1, 8), torch.tensor([[-1.0] * 4 + [1.0] * 4])
    first[:, :2] = 0  # 14 of 16 entries are left; squares: 2 x 1/2 and 2 x 2
    variance, _, _, of_nonzero = gradient_spread(torch.stack([first, second]))
    assert variance.item() == pytest.approx((2 * 0.5 + 2 * 2) / 8)
    assert of_nonzero.item() == pytest.approx((2 * 0.5 + 2 * 2) / 8 / (14 / 16))

    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn((10, 4, 3000), generator=generator)
    erased = gradients * (torch.rand(gradients.shape, generator=generator) > 0.3)
    variance, _, _, of_nonzero = gradient_spread(erased)
    torch.testing.assert_close(variance, torch.full((4,), 0.7), rtol=0, atol=0.02)
    torch.testing.assert_close(of_nonzero, torch.ones(4), rtol=0, atol=0.02)
    erased[:, 1] = 0
    assert gradient_spread(erased)[3][1] == 0


@pytest.mark.parametrize("count", [0, 1])
def test_needs_two_draws(count):
    with pytest.raises(ValueError, match=f"two draws or more, got {count}"):
        gradient_spread(drawn()[:count])
