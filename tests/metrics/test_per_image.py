"""The table of scores by image: order, images seen twice, no images."""

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
