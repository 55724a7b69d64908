"""The 33 random transforms of Sitawarin et al. (ICML 2022), each with a gradient."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lightning_rob.runtime.errors import nearest
from lightning_rob.transforms.base import Transform as Transform
from lightning_rob.transforms.blur import Bilateral as Bilateral
from lightning_rob.transforms.blur import BoxBlur as BoxBlur
from lightning_rob.transforms.blur import GaussianBlur as GaussianBlur
from lightning_rob.transforms.blur import MedianBlur as MedianBlur
from lightning_rob.transforms.blur import MotionBlur as MotionBlur
from lightning_rob.transforms.color import HSV as HSV
from lightning_rob.transforms.color import LAB as LAB
from lightning_rob.transforms.color import XYZ as XYZ
from lightning_rob.transforms.color import YUV as YUV
from lightning_rob.transforms.color import Gray as Gray
from lightning_rob.transforms.color import GrayMix as GrayMix
from lightning_rob.transforms.color import GrayOneChannel as GrayOneChannel
from lightning_rob.transforms.color import GrayTwoChannels as GrayTwoChannels
from lightning_rob.transforms.compress import FFT as FFT
from lightning_rob.transforms.compress import JPEG as JPEG
from lightning_rob.transforms.compress import ColorPrecision as ColorPrecision
from lightning_rob.transforms.edge import Laplacian as Laplacian
from lightning_rob.transforms.edge import Sobel as Sobel
from lightning_rob.transforms.from_kornia import FromKornia as FromKornia
from lightning_rob.transforms.geometric import Affine as Affine
from lightning_rob.transforms.geometric import Crop as Crop
from lightning_rob.transforms.geometric import HorizontalFlip as HorizontalFlip
from lightning_rob.transforms.geometric import Swirl as Swirl
from lightning_rob.transforms.geometric import VerticalFlip as VerticalFlip
from lightning_rob.transforms.noise import Erase as Erase
from lightning_rob.transforms.noise import GaussianNoise as GaussianNoise
from lightning_rob.transforms.noise import Pepper as Pepper
from lightning_rob.transforms.noise import PoissonNoise as PoissonNoise
from lightning_rob.transforms.noise import Salt as Salt
from lightning_rob.transforms.noise import SpeckleNoise as SpeckleNoise
from lightning_rob.transforms.noise import UniformNoise as UniformNoise
from lightning_rob.transforms.nondifferentiable import ALL as NONDIFFERENTIABLE
from lightning_rob.transforms.stylize import ColorJitter as ColorJitter
from lightning_rob.transforms.stylize import Gamma as Gamma
from lightning_rob.transforms.stylize import Sharpen as Sharpen
from lightning_rob.transforms.stylize import Solarize as Solarize

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
    """Return all 33 classes by name, in the order of the groups."""
    return {kind.__name__: kind for kinds in GROUPS.values() for kind in kinds}


def named(
    transforms: Sequence[Transform | nn.Module] | Mapping[str, Mapping[str, Any]],
) -> dict[str, Transform]:
    """Return transforms by their names.

    Args:
        transforms: instances, modules of `kornia.augmentation` among them, or the arguments of each
            by its name. Names are those of the 33, `Bilateral`, and those of
            `lightning_rob.transforms.nondifferentiable`.
    """
    if isinstance(transforms, Mapping):
        return {name: _build(name, options) for name, options in transforms.items()}
    given = [FromKornia(one) if isinstance(one, nn.Module) else one for one in transforms]
    found = {transform.class_name: transform for transform in given}
    if len(found) != len(given):
        names = [transform.class_name for transform in given]
        twice = {name for name in names if names.count(name) > 1}
        raise ValueError(f"each transform can be there once, got two of {', '.join(sorted(twice))}")
    return found


def _build(name: str, options: Mapping[str, Any]) -> Transform:
    others: tuple[type[Transform], ...] = (Bilateral, *NONDIFFERENTIABLE)
    kinds = catalogue() | {kind.__name__: kind for kind in others}
    if name not in kinds:
        hint = nearest(name, kinds, f", there are {', '.join(kinds)}")
        raise ValueError(f"no transform {name!r}{hint}")
    if isinstance(options, Transform | nn.Module):
        raise TypeError(f"{name} must have arguments: give transforms themselves as a list")
    known = kinds[name].__dataclass_fields__
    if odd := set(options or {}) - set(known):
        raise ValueError(f"{name} has no argument {', '.join(odd)}: it takes {', '.join(known)}")
    return kinds[name](**options or {})
