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


def test_zeros_lower_the_variance_but_not_that_of_nonzero_entries():
    """By hand: two draws of eight entries, the first with two zeros."""
    first, second = torch.ones(1, 8), torch.tensor([[-1.0] * 4 + [1.0] * 4])
    first[:, :2] = 0  # 14 of 16 entries are left; squares: 2 x 1/2 and 2 x 2
    variance, _, _, of_nonzero = gradient_spread(torch.stack([first, second]))
    assert variance.item() == pytest.approx((2 * 0.5 + 2 * 2) / 8)
    assert of_nonzero.item() == pytest.approx((2 * 0.5 + 2 * 2) / 8 / (14 / 16))
