import pytest
import torch

from lightning_rob.figures.pool import pool_figure
from lightning_rob.plots import pixels
from lightning_rob.transforms.pool import GROUPS


@pytest.mark.parametrize("channels", [1, 3])
def test_all_72_and_the_image_are_named_and_drawn(channels):
    x = torch.rand(channels, 16, 16, generator=torch.Generator().manual_seed(0))
    figure = pool_figure(x)
    drawn = [axes for axes in figure.axes if axes.images]
    assert len(drawn) == 73
    assert {axes.get_title() for axes in drawn} - {""} == {"clean", *GROUPS}
    shown = [axes.images[0].get_array() for axes in drawn]
    assert all(picture.shape == (16, 16, 3) and picture.std() > 1 for picture in shown)
    labels = [text.get_text().replace("\n", " ") for axes in drawn for text in axes.texts]
    assert labels[0] == ""
    assert {"top left", "png compression 1", "nl means fast", "gaussian type4"} < set(labels)
    assert pixels(figure, dpi=40).std() > 0.1


def test_the_seed_is_of_the_chance_alone():
    x = torch.rand(1, 12, 12, generator=torch.Generator().manual_seed(1))
    pictures = [
        [axes.images[0].get_array() for axes in pool_figure(x, seed).axes if axes.images]
        for seed in (0, 1)
    ]
    changed = sum((a != b).any() for a, b in zip(*pictures, strict=True))
    assert 7 <= changed <= 9  # the noises, and k-means unless it ends at the same colours
