"""Transformations of pixel values: fewer colors, normalization, noise, compression, 8 bits."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_rob.nets.normalize import USUAL
from lightning_rob.randomness import Generator, normal, uniform
from lightning_rob.transforms.base import NumpyImage, NumpyTransform, Transform, integers, pinned
from lightning_rob.transforms.compress import jpeg
from lightning_rob.transforms.noise import poisson_quantile

NoiseKind = Literal["gaussian", "localvar", "poisson", "salt", "pepper", "salt_pepper", "speckle"]
WHITE = 255
MIN_STD = 1e-6  # as Keras


def to_levels(x: Tensor) -> Tensor:
    """Round numbers in [0, 1] to 0, 1, …, 255, still floating."""
    return (x * WHITE).round()


def round_8bit(x: Tensor) -> Tensor:
    """Round to the nearest multiples of 1 / 255."""
    return to_levels(x) / WHITE


@dataclass(frozen=True)
class Quantize(NumpyTransform):
    """Quantize each image to at most k colors of its own: k-means on its pixels in CIE L*a*b*.

    Athena's code runs k-means on mini-batches; on the distinct colors of a small image, each
    weighted by its number of pixels, full k-means is faster and nearer to the smallest error.
    """

    colors: int
    channels = (1, 3)
    limits = (("colors", 1, float("inf")),)

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor]:
        """(seed [B] int64 of the initial means)."""
        return (integers(x, 0, 2**16 - 1, generator=generator),)

    def transform_image(self, image: NumpyImage, seed: int) -> NumpyImage:
        from kornia.color import lab_to_rgb, rgb_to_lab
        from sklearn.cluster import KMeans  # more than a second to import

        pixels = image.reshape(len(image), -1).T
        # Each distinct colour once, weighted by its pixels.
        found, index, counts = np.unique(pixels, return_inverse=True, return_counts=True, axis=0)
        count = min(self.colors, len(found))
        means = KMeans(count, n_init=1, random_state=int(seed))
        rgb = torch.from_numpy(found.T).expand(3, -1)[None, :, :, None]
        lab = rgb_to_lab(rgb)[0, :, :, 0].T.numpy()
        cluster = means.fit_predict(lab, sample_weight=counts)
        centers = torch.from_numpy(means.cluster_centers_.T)[None, :, :, None]
        palette = lab_to_rgb(centers)[0, : len(image), :, 0].T.numpy()
        return palette[cluster[index.reshape(-1)]].T.reshape(image.shape)


class NormalizeImage(Transform):
    """Subtract the image's own mean and divide by its own deviation; clamp to [0, 1].

    As Keras' `samplewise_center` and `samplewise_std_normalization`, over all channels together.
    Pixels below the mean become black: nineteen in twenty of a digit. The gradient passes the clamp
    unchanged, for an attack would not see those pixels otherwise.
    """

    def apply(self, x: Tensor) -> Tensor:
        dims = (1, 2, 3)
        deviation = x.std(dims, correction=0, keepdim=True)
        return pinned((x - x.mean(dims, keepdim=True)) / (deviation + MIN_STD), 0, 1)


class NormalizeFeature(Transform):
    """Subtract the mean of a data set and divide by its deviation; clamp as `NormalizeImage`.

    Athena's code fits Keras' `featurewise_center` anew on each batch that it transforms, which
    makes one image's result depend on the others; here the numbers are fixed, those of MNIST for
    grey images and of CIFAR-10 for color.
    """

    channels = (1, 3)

    def apply(self, x: Tensor) -> Tensor:
        mean, std = (x.new_tensor(values)[:, None, None] for values in USUAL[x.shape[1]])
        return pinned((x - mean) / std, 0, 1)


@dataclass(frozen=True)
class Noise(Transform):
    """Add one of the seven noises of `skimage.util.random_noise`, independent for each number.

    With the defaults of scikit-image, "localvar" (a variance for each pixel) is distributed as
    "gaussian". "poisson" counts as many photons for white as the image has distinct values, rounded
    up to a power of two; its noise is drawn for the image that `sample` sees and is then constant.

    Args:
        kind: gaussian, localvar or speckle, of variance 0.01; poisson; salt, pepper or salt_pepper,
            on a twentieth of the pixels.
    """

    kind: NoiseKind

    def sample(self, x: Tensor, generator: Generator = None) -> tuple[Tensor, Tensor]:
        """(gain [B, C, H, W], offset [B, C, H, W] in pixel units)."""
        if self.kind in ("salt", "pepper", "salt_pepper"):
            hit = uniform(x, *x.shape[1:], generator=generator) < 0.05
            white = torch.full_like(hit, self.kind == "salt")
            if self.kind == "salt_pepper":
                white = uniform(x, *x.shape[1:], generator=generator) < 0.5
            return (~hit).to(x), (hit & white).to(x)
        ones, zeros = torch.ones_like(x), torch.zeros_like(x)
        if self.kind == "poisson":
            clean = x.detach()
            distinct = torch.tensor([len(image.unique()) for image in clean], device=x.device)
            # As `skimage.util.random_noise`: the distinct values, rounded up to a power of two.
            photons = (2 ** distinct.log2().ceil()).to(x)[:, None, None, None]
            u = uniform(x, *x.shape[1:], generator=generator)
            return ones, poisson_quantile(u, clean.clamp_min(0) * photons) / photons - clean
        noise = 0.1 * normal(x, *x.shape[1:], generator=generator)
        return (1 + noise, zeros) if self.kind == "speckle" else (ones, noise)

    def apply(self, x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
        return gain * x + offset


@dataclass(frozen=True)
class CompressJPEG(Transform):
    """Compress as JPEG of a fixed quality, by soft rounding, which has a gradient.

    On digits a pixel is on average 0.6 to 1.5 of 255 levels away from Pillow's files, which are
    themselves 2 to 8 levels away from the image.
    """

    quality: int
    channels = (1, 3)
    limits = (("quality", 1, 100),)

    def apply(self, x: Tensor) -> Tensor:
        quality = x.new_full((len(x),), self.quality)
        return jpeg(x, quality, transposed=False)


@dataclass(frozen=True)
class CompressPNG(Transform):
    """Round to eight bits: PNG loses nothing else, at any level of compression from 0 to 9."""

    level: int
    differentiable = False
    limits = (("level", 0, 9),)

    def apply(self, x: Tensor) -> Tensor:
        return round_8bit(x)
