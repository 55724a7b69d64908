"""Filters of small windows: edges, ranks, morphology, segmentation, denoising, cartoons."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from skimage import filters, restoration  # they load their functions at the first call
from torch import Tensor
from torch.nn.functional import pad

from lightning_rob.transforms.base import NumpyImage, NumpyTransform, Transform, map_images
from lightning_rob.transforms.blur import gather_pixels
from lightning_rob.transforms.pool.intensity import WHITE, round_8bit, to_levels

KERNELS = {  # the derivative downwards, as correlated; across is its transpose, except Roberts
    "sobel": ((-1, -2, -1), (0, 0, 0), (1, 2, 1)),
    "scharr": ((-3, -10, -3), (0, 0, 0), (3, 10, 3)),
    "prewitt": ((-1, -1, -1), (0, 0, 0), (1, 1, 1)),
    "roberts": ((0, 0, 0), (0, -1, 0), (0, 0, 1)),
}
Operation = Literal["erosion", "dilation", "opening", "closing", "gradient"]
MIN_SQUARE = 1e-12  # under the root, whose slope would be infinite for an image without edges


@dataclass(frozen=True)
class Edges(Transform):
    """Compute the length of the gradient, at most 1 on a step from black to white, as scikit-image.

    Each channel by itself, where Athena's code makes color images grey; the border is repeated.
    """

    kind: Literal["sobel", "scharr", "prewitt", "roberts"]

    def apply(self, x: Tensor) -> Tensor:
        from kornia.filters import filter2d

        down = x.new_tensor(KERNELS[self.kind])
        down = down / down.clamp_min(0).sum()
        # Roberts' other diagonal: the second and third column exchanged
        across = down[:, [0, 2, 1]] if self.kind == "roberts" else down.T
        slopes = [filter2d(x, kernel[None], "replicate") for kernel in (down, across)]
        return ((slopes[0] ** 2 + slopes[1] ** 2) / 2 + MIN_SQUARE).sqrt()


class Gaussian(Transform):
    """Blur with a Gaussian of deviation 1 out to 4 pixels; the border is a mirror with the edge.

    As `scipy.ndimage.gaussian_filter`, which Athena's code calls. Each channel by itself, where
    that code also blurs the colors of a pixel into each other.
    """

    def apply(self, x: Tensor) -> Tensor:
        from kornia.filters import filter2d_separable, get_gaussian_kernel1d

        reach = 4
        kernel = get_gaussian_kernel1d(2 * reach + 1, 1.0, device=x.device, dtype=x.dtype)
        for dim in (2, 3):  # pixel -1 is pixel 0 again, -2 is pixel 1, also on smaller images
            side = x.shape[dim]
            place = torch.arange(-reach, side + reach, device=x.device) % (2 * side)
            x = x.index_select(dim, torch.minimum(place, 2 * side - 1 - place))
        return filter2d_separable(x, kernel, kernel, padding="valid")


@dataclass(frozen=True)
class Rank(Transform):
    """Take the value of a given rank among the 3x3 around each pixel, each channel by itself.

    The border is repeated. Athena's rank 15 is that of a cube through the channels: among the 27
    values of a grey image, each of them three times, it is the sixth of nine.
    """

    place: int  # from 0, the smallest, to 8, the largest
    limits = (("place", 0, 8),)

    def apply(self, x: Tensor) -> Tensor:
        padded = pad(x, [1] * 4, mode="replicate")
        # only the index is found without a gradient: it goes to the pixel of that rank
        squares = padded.detach().unfold(2, 3, 1).unfold(3, 3, 1).flatten(-2)
        return gather_pixels(padded, squares.kthvalue(self.place + 1).indices, 3)


def _disk(radius: int) -> NumpyImage:
    """Return `skimage.morphology.disk`, whose module takes a second to import."""
    squares = np.arange(-radius, radius + 1) ** 2
    return (squares[:, None] + squares <= radius**2).astype("uint8")


class Entropy(NumpyTransform):
    """Compute the entropy of the 8-bit values within two pixels of each, each channel by itself.

    1 is the maximum: as many values as pixels. Athena's code maps half a bit to 1 (or, in another
    version, a quarter) and adds 0.5, which turns most of the image white.
    """

    def apply(self, x: Tensor) -> Tensor:
        return map_images(to_levels(x.clamp(0, 1)), self.transform_image)

    def transform_image(self, image: NumpyImage) -> NumpyImage:
        window = _disk(2)[None]
        bits: NumpyImage = filters.rank.entropy(image.astype("uint8"), window)  # type: ignore[no-untyped-call]
        return bits / math.log2(window.sum())


@dataclass(frozen=True)
class Morphology(Transform):
    """Apply grey-scale morphology with a flat 2x2 square; pixels outside the image are ignored.

    Erosion is the minimum over the square that reaches up and left, dilation the maximum over its
    mirror image, so that opening and closing keep the picture in place, as in Serra (1982), scipy
    and kornia. OpenCV, which Athena calls, takes the same square for both: its openings and
    closings move the picture by a pixel.
    """

    operation: Operation

    def apply(self, x: Tensor) -> Tensor:
        from kornia import morphology

        operation: Callable[..., Tensor] = getattr(morphology, self.operation)
        return operation(x, x.new_ones(2, 2))


class SegmentBorders(NumpyTransform):
    """Compute the range of the 8-bit values within a pixel, after a median within two pixels.

    Each channel by itself. Athena's code uses the 255 levels as numbers in [0, 1], which makes its
    images black and white.
    """

    def apply(self, x: Tensor) -> Tensor:
        return map_images(to_levels(x.clamp(0, 1)), self.transform_image) / WHITE

    def transform_image(self, image: NumpyImage) -> NumpyImage:
        large, small = (_disk(radius)[None] > 0 for radius in (2, 1))
        smooth = filters.rank.median(image.astype("uint8"), large)  # type: ignore[no-untyped-call]
        return filters.rank.gradient(smooth, small)  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class DenoiseVariation(NumpyTransform):
    """Reduce the total variation (Chambolle 2004; Goldstein and Osher 2009)."""

    method: Literal["chambolle", "bregman"]
    weight: float  # Chambolle's grows with the smoothness, Bregman's with the fidelity

    def transform_image(self, image: NumpyImage) -> NumpyImage:
        if self.method == "chambolle":
            return _call(restoration.denoise_tv_chambolle, image, weight=self.weight)
        options: dict[str, Any] = {"max_num_iter": 50, "eps": 1e-6}  # as Athena
        return _call(restoration.denoise_tv_bregman, image, weight=self.weight, **options)


class DenoiseWavelet(NumpyTransform):
    """Shrink small coefficients of Haar's wavelet (db1): VisuShrink, soft (Donoho 1994).

    The noise's deviation is estimated for each image; without noise, the image is unchanged.
    """

    def transform_image(self, image: NumpyImage) -> NumpyImage:
        if not (sigma := estimate_noise(image)):
            return image
        options: dict[str, Any] = {"method": "VisuShrink", "mode": "soft", "wavelet": "db1"}
        return _call(restoration.denoise_wavelet, image, sigma=sigma, **options)


@dataclass(frozen=True)
class DenoiseMeans(NumpyTransform):
    """Average pixels whose 5x5 surroundings are alike: non-local means (Buades et al. 2005).

    The noise's deviation is estimated for each image; without noise, the image is unchanged.
    """

    strength: float  # h, how much the surroundings may differ, in deviations of the noise
    fast: bool = False  # weigh all pixels of a patch equally, else by a Gaussian

    def transform_image(self, image: NumpyImage) -> NumpyImage:
        if not (sigma := estimate_noise(image)):
            return image
        options: dict[str, Any] = {"patch_size": 5, "patch_distance": 6, "fast_mode": self.fast}
        denoise = restoration.denoise_nl_means
        return _call(denoise, image, h=self.strength * sigma, sigma=sigma, **options)


def _call(denoise: Callable[..., NumpyImage], image: NumpyImage, **options: Any) -> NumpyImage:
    if len(image) == 1:  # some of them return [1, H, W] as [W, H] (scikit-image 0.26)
        return denoise(image[0], **options)[None]
    return denoise(image, channel_axis=0, **options)


def estimate_noise(image: NumpyImage) -> float:
    """Estimate the deviation of the noise in [C, H, W], averaged over the channels."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice|invalid value", RuntimeWarning)
        sigmas = restoration.estimate_sigma(image, channel_axis=0)  # type: ignore[no-untyped-call]
    # A channel without any detail has no estimate.
    known = [0.0 if math.isnan(sigma) else sigma for sigma in sigmas]
    return sum(known) / len(known)


@dataclass(frozen=True)
class Cartoon(Transform):
    """Smooth by many bilateral filters and blacken pixels darker than their surroundings.

    The image is rounded to eight bits between all steps. Athena's configurations ask for windows of
    7 to 250 pixels, its code uses the same small one for all, and so does this class. kornia's
    pyramid and square window replace OpenCV's: on digits the difference is 0.02 on average or less.
    """

    halvings: int  # how often the image is halved before smoothing, and doubled after it
    smoothings: int  # number of bilateral filters, one after the other
    block: int  # side in pixels, odd, of the surroundings
    darker: float  # by how many of 255 levels an outline is below the mean of its surroundings
    gaussian: bool = False  # weigh the surroundings by a Gaussian, else equally
    color: float = 300.0  # standard deviation of the bilateral filters in levels
    channels = (1, 3)
    differentiable = False

    def apply(self, x: Tensor) -> Tensor:
        return self._smooth(x)[..., : x.shape[2], : x.shape[3]] * ~self._outlines(x)

    def _smooth(self, x: Tensor) -> Tensor:
        from kornia.filters import bilateral_blur
        from kornia.geometry.transform import pyrdown, pyrup

        # Padded to a multiple, for each halving needs even sides.
        step = 2**self.halvings
        y = round_8bit(pad(x, [0, -x.shape[3] % step, 0, -x.shape[2] % step], mode="replicate"))
        for _ in range(self.halvings):
            y = round_8bit(pyrdown(y))
        active = torch.arange(len(y), device=y.device)
        for _ in range(self.smoothings):
            before = y[active]
            after = round_8bit(bilateral_blur(before, 7, self.color / WHITE, (30.0, 30.0)))
            y[active] = after
            # an image that one filter does not change is finished
            active = active[(after != before).flatten(1).any(1)]
            if not len(active):
                break
        for _ in range(self.halvings):
            y = round_8bit(pyrup(y))
        return y

    def _outlines(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, 1, H, W] bool."""
        from kornia.color import rgb_to_grayscale
        from kornia.filters import box_blur, gaussian_blur2d, median_blur

        grey = round_8bit(x if x.shape[1] == 1 else rgb_to_grayscale(x))
        smooth = median_blur(grey, 3, "replicate")
        if self.gaussian:
            std = 0.3 * ((self.block - 1) / 2 - 1) + 0.8  # OpenCV's default
            mean = gaussian_blur2d(smooth, self.block, (std, std), "replicate")
        else:
            mean = box_blur(smooth, self.block, "replicate")
        return to_levels(smooth) <= to_levels(mean) - self.darker
