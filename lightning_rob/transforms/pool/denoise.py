"""Noise taken away by scikit-image."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from skimage import restoration  # which loads its functions as they are called
from torch import Tensor

from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.one_by_one import Picture, each

METHODS: dict[str, tuple[str, dict[str, float]]] = {
    "chambolle": ("denoise_tv_chambolle", {}),
    "bregman": ("denoise_tv_bregman", {"max_num_iter": 50, "eps": 1e-6}),  # as Athena
}


@dataclass(frozen=True)
class DenoiseVariation(Transform):
    """Less total variation (Chambolle 2004; Goldstein and Osher 2009).

    Args:
        method: "chambolle" or "bregman".
        weight: Chambolle's grows with the smoothness, Bregman's with the fidelity.
    """

    method: Literal["chambolle", "bregman"]
    weight: float

    differentiable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method not in METHODS:
            raise ValueError(f"method must be of {tuple(METHODS)}, got {self.method!r}")

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return each(x, self._denoised)

    def _denoised(self, image: Picture) -> Picture:
        name, options = METHODS[self.method]
        return called(getattr(restoration, name), image, weight=self.weight, **options)


@dataclass(frozen=True)
class DenoiseWavelet(Transform):
    """Small coefficients of Haar's wavelet (db1) shrunk: VisuShrink, soft (Donoho 1994).

    The noise's deviation is estimated for each image; without any, the image stays as it is.
    """

    differentiable: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return each(x, _shrunk)


@dataclass(frozen=True)
class DenoiseMeans(Transform):
    """Non-local means: pixels averaged whose 5x5 surroundings are alike (Buades et al. 2005).

    The noise's deviation is estimated for each image; without any, the image stays as it is.

    Args:
        strength: h, how unlike they may be, in deviations of the noise.
        fast: with patches whose pixels all weigh the same, else a Gaussian's.
    """

    strength: float
    fast: bool = False

    differentiable: ClassVar[bool] = False

    def apply(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C, H, W]."""
        return each(x, self._denoised)

    def _denoised(self, image: Picture) -> Picture:
        if not (sigma := noise_of(image)):
            return image
        options: dict[str, Any] = {"patch_size": 5, "patch_distance": 6, "fast_mode": self.fast}
        return called(
            restoration.denoise_nl_means, image, h=self.strength * sigma, sigma=sigma, **options
        )


def _shrunk(image: Picture) -> Picture:
    if not (sigma := noise_of(image)):
        return image
    options: dict[str, Any] = {"method": "VisuShrink", "mode": "soft", "wavelet": "db1"}
    return called(restoration.denoise_wavelet, image, sigma=sigma, **options)


def called(denoise: Callable[..., Picture], image: Picture, **options: Any) -> Picture:
    """A function of scikit-image on [C, H, W]; a single channel, which it may turn, goes without.

    `denoise_tv_bregman` and `denoise_nl_means` give [1, H, W] back as [W, H] (scikit-image 0.26).
    """
    if len(image) == 1:
        return denoise(image[0], **options)[None]
    return denoise(image, channel_axis=0, **options)


def noise_of(image: Picture) -> float:
    """The estimated deviation of the noise in [C, H, W], mean over the channels; 0 if none.

    A channel without any detail has no estimate and counts as one without noise.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mean of empty slice|invalid value", RuntimeWarning)
        sigmas = restoration.estimate_sigma(image, channel_axis=0)  # type: ignore[no-untyped-call]
    known = [0.0 if math.isnan(sigma) else sigma for sigma in sigmas]
    return sum(known) / len(known)
