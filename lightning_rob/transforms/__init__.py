"""The 33 random transforms of Sitawarin et al. (ICML 2022), each with a gradient."""

from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.blur import BoxBlur, GaussianBlur, MedianBlur, MotionBlur
from lightning_rob.transforms.color import (
    HSV,
    LAB,
    XYZ,
    YUV,
    Gray,
    GrayMix,
    GrayOneChannel,
    GrayTwoChannels,
)
from lightning_rob.transforms.compress import FFT, JPEG, ColorPrecision
from lightning_rob.transforms.edge import Laplacian, Sobel
from lightning_rob.transforms.geometric import Affine, Crop, HorizontalFlip, Swirl, VerticalFlip
from lightning_rob.transforms.noise import (
    Erase,
    GaussianNoise,
    Pepper,
    PoissonNoise,
    Salt,
    SpeckleNoise,
    UniformNoise,
)
from lightning_rob.transforms.stylize import ColorJitter, Gamma, Sharpen, Solarize

GROUPS: dict[str, tuple[type[Transform], ...]] = {
    "noise": (GaussianNoise, UniformNoise, SpeckleNoise, PoissonNoise, Salt, Pepper, Erase),
    "blur": (BoxBlur, GaussianBlur, MedianBlur, MotionBlur),
    "color": (HSV, LAB, XYZ, YUV, Gray, GrayMix, GrayTwoChannels, GrayOneChannel),
    "edge": (Laplacian, Sobel),
    "compress": (JPEG, ColorPrecision, FFT),
    "geometric": (Affine, Crop, HorizontalFlip, VerticalFlip, Swirl),
    "stylize": (ColorJitter, Gamma, Sharpen, Solarize),
}


def catalogue() -> dict[str, type[Transform]]:
    """All 33 by name, in the order of the groups."""
    return {kind.__name__: kind for kinds in GROUPS.values() for kind in kinds}


__all__ = [
    "FFT",
    "HSV",
    "JPEG",
    "LAB",
    "XYZ",
    "YUV",
    "Affine",
    "BoxBlur",
    "ColorJitter",
    "ColorPrecision",
    "Crop",
    "Erase",
    "Gamma",
    "GaussianBlur",
    "GaussianNoise",
    "Gray",
    "GrayMix",
    "GrayOneChannel",
    "GrayTwoChannels",
    "HorizontalFlip",
    "Laplacian",
    "MedianBlur",
    "MotionBlur",
    "Pepper",
    "PoissonNoise",
    "Salt",
    "Sharpen",
    "Sobel",
    "Solarize",
    "SpeckleNoise",
    "Swirl",
    "Transform",
    "UniformNoise",
    "VerticalFlip",
    "catalogue",
]
