import math

import pytest
import torch

from lightning_rob.transforms.smooth import smooth_modulo, smooth_round

T = torch.linspace(-3.2, 3.2, 1281, dtype=torch.float64)


def test_rounding_by_hand():
    t = torch.tensor([-0.4, 0.5, 1.5, 2.5, 1.25, -7.0], dtype=torch.float64)
    expected = [-0.064, 0.125, 1.875, 2.125, 1.015625, -7.0]
    assert smooth_round(t).tolist() == pytest.approx(expected, abs=1e-12)


def test_modulo_by_hand():
    t = torch.tensor([0.25, 0.75, -0.25, 1.5, 0.5], dtype=torch.float64)
    expected = [0.234375, 0.765625, 0.765625, 0.625, 0.375]
    assert smooth_modulo(t).tolist() == pytest.approx(expected, abs=1e-12)


def test_modulo_at_integers():
    t = torch.arange(-3.0, 4)
    assert smooth_modulo(t).tolist() == [0] * 7
    assert smooth_modulo(t, literal=True).tolist() == [1] * 7
    assert torch.equal(smooth_modulo(T[1:2]), smooth_modulo(T[1:2], literal=True))


@pytest.mark.parametrize("function", [smooth_round, smooth_modulo])
def test_slopes(function):
    """d/dt = 3 u^2 of rounding and 1 - 3 u^2 of the remainder, u the distance to an integer."""
    t = (T + 1e-3).requires_grad_()
    (slope,) = torch.autograd.grad(function(t).sum(), t)
    u = t.detach() - t.detach().round()
    expected = 3 * u**2 if function is smooth_round else 1 - 3 * u**2
    assert torch.allclose(slope, expected, atol=1e-12)


def test_close_to_the_true_ones():
    assert (smooth_round(T) - T.round()).abs().max() <= 1 / 8
    far = 2 / (3 * math.sqrt(3))  # of u - u^3 from 0, at u = 1 / sqrt(3), beyond the half
    assert smooth_modulo(T).min() >= 0
    assert smooth_modulo(T).max() < 1
    assert (smooth_modulo(T) - T % 1).abs().max() <= 1 / 8 + 1e-12 < far
