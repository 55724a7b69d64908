"""Robust accuracy by hand, and its sum over many images."""

import pytest
import torch

from lightning_rob.metrics import RobustAccuracy, robust_accuracy


def test_by_hand():
    p = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.3, 0.5], [0.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    correct = robust_accuracy(p, torch.tensor([0, 1, 2, 1]))
    assert correct.tolist() == pytest.approx([0.9, 0.3, 0.0, 1.0])
    assert robust_accuracy(p[:0], torch.zeros(0, dtype=torch.int64)).shape == (0,)
    nonfinite = torch.tensor([[torch.nan, 1.0], [0.25, 0.75], [torch.inf, 0.0]])
    assert robust_accuracy(nonfinite, torch.tensor([0, 0, 0])).tolist() == [0, 0.25, 0]


def test_many_images_are_not_lost_in_rounding():
    """In single precision the sum would stop at 2^24 and drift long before."""
    metric = RobustAccuracy()
    metric.update(torch.tensor([[0.9, 0.1]]).expand(1000, 2), torch.zeros(1000, dtype=torch.int64))
    metric.total += 0.9 * 99_999_000
    metric.count += 99_999_000
    metric.update(torch.tensor([[0.9, 0.1]]), torch.ones(1, dtype=torch.int64))
    assert metric.total.item() == pytest.approx(90_000_000.1, abs=1e-4)
    assert metric.count.item() == 100_000_001
