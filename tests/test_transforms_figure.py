import torch

from lightning_rob.figures.transforms import STRENGTHS, arranged, examples, transforms
from lightning_rob.plots import pixels
from lightning_rob.transforms import Gamma, Gray, Sobel, catalogue

X = torch.rand(3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_blocks_are_not_broken():
    assert arranged([1, 3, 3, 3, 3, 1, 9]) == [
        (0, 0),
        (0, 1),
        (0, 4),
        (0, 7),
        (1, 0),
        (1, 3),
        (2, 0),
    ]


def test_what_is_drawn():
    assert [label for label, _ in examples(Gamma, X, 0)] == [f"alpha {a:g}" for a in STRENGTHS]
    assert len(examples(Sobel, X, 0)) == 1
    greys = [image for _, image in examples(Gray, X, 0)]
    assert len(greys) == 3
    assert not torch.equal(greys[0], greys[1])


def test_all_are_named():
    figure = transforms(X)
    titles = {axes.get_title() for axes in figure.axes} - {""}
    assert titles == {"the image", *catalogue()}
    shown = sum(bool(axes.images) for axes in figure.axes)
    assert shown == 1 + sum(len(examples(kind, X, 0)) for kind in catalogue().values())
    assert pixels(figure, dpi=40).std() > 0.1
