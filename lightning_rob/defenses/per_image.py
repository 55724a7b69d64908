"""Layers that know each image of one batch, and defenses restricted to a part of that batch."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


class PerImageLayer(nn.Module):
    """A layer with values of its own for each image of one batch, which sees no other batch."""

    separable = True  # whether the output of an image is independent of the other images
    rows: Tensor | None = None


class WholeBatch(PerImageLayer):
    """A mark: the outputs of an image depend on the other images."""

    separable = False


class PerImageValues(PerImageLayer):
    """Values [B, …] of the images of one batch: labels, or features to come near."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = values

    def forward(self) -> Tensor:
        return self.values if self.rows is None else self.values[self.rows]


def per_image_layers(defense: nn.Module) -> list[PerImageLayer]:
    """Return the layers of a defense that have values for each image of one batch."""
    return [layer for layer in defense.modules() if isinstance(layer, PerImageLayer)]


@contextmanager
def restricted_to(defense: nn.Module, index: Tensor) -> Iterator[None]:
    """Restrict a defense that has adapted to a batch to the images at some positions [b]."""
    layers = per_image_layers(defense)
    before = [layer.rows for layer in layers]
    try:
        for layer, rows in zip(layers, before, strict=True):
            # Inside another such context the positions are relative to the images selected there.
            layer.rows = index if rows is None else rows[index]
        yield
    finally:
        for layer, rows in zip(layers, before, strict=True):
            layer.rows = rows
