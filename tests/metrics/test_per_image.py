"""The table of scores by image: order, images seen twice, no images."""

import pytest
import torch

from lightning_rob.metrics import PerImage


def test_table_is_sorted_by_image():
    table = PerImage(2)
    table.update(torch.tensor([7, 3]), torch.tensor([[0.7, 0.07], [0.3, 0.03]]))
    table.update(torch.tensor([5]), torch.tensor([[0.5, 0.05]]))
    index, scores = table.compute()
    assert index.tolist() == [3, 5, 7]
    assert scores.dtype == torch.float64
    expected = torch.tensor([[0.3, 0.03], [0.5, 0.05], [0.7, 0.07]]).double()
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-7)


def test_image_seen_twice_counts_once():
    """As when a sampler pads the last batch; the first scores stand."""
    table = PerImage(1)
    table.update(torch.tensor([4, 2, 4]), torch.tensor([[0.25], [0.5], [0.75]]))
    table.update(torch.tensor([2, 9, 4]), torch.tensor([[1.0], [0.125], [1.0]]))
    index, scores = table.compute()
    assert index.tolist() == [2, 4, 9]
    assert scores.tolist() == [[0.5], [0.25], [0.125]]


def test_table_never_written():
    index, scores = PerImage(4).rows()
    assert index.shape == (0,)
    assert scores.shape == (0, 4)


def test_rows_are_what_compute_gives():
    table = PerImage(2)
    table.update(torch.tensor([3, 1]), torch.tensor([[0.5, 1.0], [0.25, 0.0]]))
    for found, expected in zip(table.rows(), table.compute(), strict=True):
        assert torch.equal(found, expected)


def test_table_keeps_what_is_changed_afterwards():
    table, scores = PerImage(1), torch.tensor([[0.25], [0.5]])
    table.update(torch.tensor([0, 1]), scores)
    found = table.compute()[1]
    found += 1
    assert scores.tolist() == [[0.25], [0.5]]


@pytest.mark.parametrize("columns", [1, 2])
def test_table_of_a_single_image(columns):
    table = PerImage(columns)
    table.update(torch.tensor([8]), torch.full((1, columns), 0.5))
    index, scores = table.rows()
    assert index.tolist() == [8]
    assert scores.tolist() == [[0.5] * columns]


def test_no_images():
    table = PerImage(3)
    table.update(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3))
    index, scores = table.compute()
    assert (index.shape, scores.shape) == ((0,), (0, 3))
