"""Fewer colours."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from kornia.color import lab_to_rgb, rgb_to_lab
from torch import Tensor

from lightning_rob.randomness import Generator
from lightning_rob.transforms.base import Transform, integers
from lightning_rob.transforms.one_by_one import Picture, each


@dataclass(frozen=True)
class Quantise(Transform):
    """Each image in k colours of its own: k-means among its pixels in CIE L*a*b*.

    Athena's code has mini-batches of k-means; on the distinct colours of a small image, each
    weighted by its pixels, the whole of it is faster and nearer to the least error.

    Args:
        colours: k, at most.
    """

    colours: int

    differentiable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.colours < 1:
            raise ValueError(f"colours must be at least 1, got {self.colours}")

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(seed [B] int64, where k-means starts)."""
        return (integers(x, 0, 2**16 - 1, generator=generator),)

    def apply(self, x: Tensor, seed: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W], C = 1 or 3."""
        if x.shape[1] not in (1, 3):
            raise ValueError(f"Quantise needs one or three channels, got {list(x.shape)}")
        return each(x, self._quantised, seed)

    def _quantised(self, image: Picture, seed: float) -> Picture:
        from sklearn.cluster import KMeans  # more than a second to import

        pixels = image.reshape(len(image), -1).T
        found, place, counts = np.unique(pixels, return_inverse=True, return_counts=True, axis=0)
        count = min(self.colours, len(found))
        means = KMeans(count, n_init=1, random_state=int(seed))
        near = means.fit_predict(_lab(found), sample_weight=counts)
        palette = _rgb(means.cluster_centers_)[:, : len(image)]
        quantised: Picture = palette[near[place.reshape(-1)]].T.reshape(image.shape)
        return quantised


def _lab(colours: Picture) -> Picture:
    """[n, 1 or 3] in [0, 1] -> [n, 3]."""
    rgb = torch.from_numpy(colours.T).expand(3, -1)
    lab: Picture = rgb_to_lab(rgb[None, :, :, None])[0, :, :, 0].T.numpy()
    return lab


def _rgb(colours: Picture) -> Picture:
    """[n, 3] -> [n, 3] in [0, 1]."""
    rgb: Picture = lab_to_rgb(torch.from_numpy(colours.T)[None, :, :, None])[0, :, :, 0].T.numpy()
    return rgb
