"""The table of scores by image: order, images seen twice, no images."""

import pytest
import torch

from lightning_rob.metrics import PerImage


def test_table_is_sorted_by_image_and_an_image_seen_twice_counts_once():
    """As when a sampler pads the last batch; the first scores stand."""
    table = PerImage(2)
    table.update(torch.tensor([4, 2, 4]), torch.tensor([[0.25, 1], [0.5, 2], [0.75, 3]]))
    table.update(torch.tensor([2, 9, 4]), torch.tensor([[1.0, 4], [0.125, 5], [1.0, 6]]))
    index, scores = table.compute()
    assert index.tolist() == [2, 4, 9]
    assert scores.dtype == torch.float64
    assert scores.tolist() == [[0.5, 2], [0.25, 1], [0.125, 5]]
    for found, expected in zip(table.rows(), table.compute(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("images", [None, 0, 1])
def test_table_of_one_image_or_none(columns, images):
    table = PerImage(columns)
    if images is not None:
        table.update(torch.full((images,), 8), torch.full((images, columns), 0.5))
    index, scores = table.rows()
    assert index.tolist() == [8] * (images or 0)
    assert scores.tolist() == [[0.5] * columns] * (images or 0)
    assert scores.shape[1] == columns
