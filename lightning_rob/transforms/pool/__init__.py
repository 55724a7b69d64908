"""The pool of 72 transformations of Athena (Meng et al. 2020), for ensembles of transformed images.

14 of them are reversible. Their parameters are those that the authors use for MNIST. Where the
authors' code slips, this one follows the paper and the textbooks; the docstrings say where.
"""

import re
from collections.abc import Sequence
from typing import get_args

import torch

from lightning_rob.randomness import generator_of
from lightning_rob.runtime.errors import nearest
from lightning_rob.transforms.base import Transform
from lightning_rob.transforms.pool.filters import (
    Cartoon,
    DenoiseMeans,
    DenoiseVariation,
    DenoiseWavelet,
    Edges,
    Entropy,
    Gaussian,
    Morphology,
    Operation,
    Rank,
    SegmentBorders,
)
from lightning_rob.transforms.pool.intensity import (
    CompressJPEG,
    CompressPNG,
    Noise,
    NoiseKind,
    NormalizeFeature,
    NormalizeImage,
    Quantize,
)
from lightning_rob.transforms.pool.spatial import (
    CentralSwirl,
    Distort,
    Flip,
    Identity,
    RadonReconstruction,
    Rotate,
    Shift,
    ThreePointAffine,
)

SHARE = 0.15  # of the image's side: the length of a shift

GROUPS: dict[str, dict[str, Transform]] = {
    "rotate": {"rotate_90": Rotate(1), "rotate_180": Rotate(2), "rotate_270": Rotate(3)},
    "shift": {
        "shift_left": Shift(columns=-SHARE),
        "shift_right": Shift(columns=SHARE),
        "shift_up": Shift(rows=-SHARE),
        "shift_down": Shift(rows=SHARE),
        "shift_top_left": Shift(-SHARE, -SHARE),
        "shift_top_right": Shift(-SHARE, SHARE),
        "shift_bottom_left": Shift(SHARE, -SHARE),
        "shift_bottom_right": Shift(SHARE, SHARE),
    },
    "flip": {
        "flip_horizontal": Flip(horizontal=True),
        "flip_vertical": Flip(vertical=True),
        "flip_both": Flip(horizontal=True, vertical=True),
    },
    "affine": {
        "affine_vertical_compress": ThreePointAffine((0.25, 0.32), (0.25, 0.48), (0.5, 0.32)),
        "affine_vertical_stretch": ThreePointAffine((0.25, 0.2), (0.25, 0.55), (0.5, 0.2)),
        "affine_horizontal_compress": ThreePointAffine((0.32, 0.25), (0.32, 0.5), (0.43, 0.25)),
        "affine_horizontal_stretch": ThreePointAffine((0.2, 0.25), (0.2, 0.5), (0.55, 0.25)),
        "affine_both_compress": ThreePointAffine((0.28, 0.28), (0.28, 0.47), (0.47, 0.28)),
        "affine_both_stretch": ThreePointAffine((0.22, 0.22), (0.22, 0.55), (0.55, 0.22)),
    },
    "morph": {f"morph_{name}": Morphology(name) for name in get_args(Operation)},
    "augment": {
        "augment_samplewise_std_norm": NormalizeImage(),
        "augment_featurewise_std_norm": NormalizeFeature(),
    },
    "cartoon": {
        "cartoon_mean_type1": Cartoon(0, 3, 9, 9),
        "cartoon_mean_type2": Cartoon(1, 100, 3, 9),
        "cartoon_mean_type3": Cartoon(2, 0, 9, 7, color=100),
        "cartoon_mean_type4": Cartoon(0, 3, 5, 5),
        "cartoon_gaussian_type1": Cartoon(1, 10, 9, 9, gaussian=True),
        "cartoon_gaussian_type2": Cartoon(1, 100, 3, 9, gaussian=True),
        "cartoon_gaussian_type3": Cartoon(2, 0, 9, 7, gaussian=True, color=100),
        "cartoon_gaussian_type4": Cartoon(1, 10, 5, 5, gaussian=True),
    },
    "quantize": {f"quantize_{colors}_colors": Quantize(colors) for colors in (4, 8)},
    "distort": {"distort_x": Distort("x"), "distort_y": Distort("y")},
    "noise": {f"noise_{kind}": Noise(kind) for kind in get_args(NoiseKind)},
    "filter": {
        "filter_sobel": Edges("sobel"),
        "filter_gaussian": Gaussian(),
        "filter_rank": Rank(5),
        "filter_median": Rank(4),
        "filter_minimum": Rank(0),
        "filter_maximum": Rank(8),
        "filter_roberts": Edges("roberts"),
        "filter_scharr": Edges("scharr"),
        "filter_entropy": Entropy(),
        "filter_prewitt": Edges("prewitt"),
    },
    "compress": {
        **{f"compress_jpeg_quality_{q}": CompressJPEG(q) for q in (80, 50, 30, 10)},
        **{f"compress_png_compression_{level}": CompressPNG(level) for level in (1, 8, 5)},
    },
    "denoise": {
        "denoise_tv_chambolle": DenoiseVariation("chambolle", 0.4),
        "denoise_tv_bregman": DenoiseVariation("bregman", 2.0),
        "denoise_wavelet": DenoiseWavelet(),
        "denoise_nl_means": DenoiseMeans(0.8),
        "denoise_nl_means_fast": DenoiseMeans(0.6, fast=True),
    },
    "geometric": {
        "geometric_swirl": CentralSwirl(),
        "geometric_iradon": RadonReconstruction(-100, 128),
        "geometric_iradon_sart": RadonReconstruction(-150, 150, algebraic=True),
    },
    "segment": {"seg_gradient": SegmentBorders()},
}


def pool() -> dict[str, Transform]:
    """Return all 72 by name, in the paper's order."""
    return {name: one for group in GROUPS.values() for name, one in group.items()}


REVERSIBLE = tuple(name for name, one in pool().items() if one.reversible)
IRREVERSIBLE = tuple(name for name, one in pool().items() if not one.reversible)
WORDS = {"reversible": REVERSIBLE, "irreversible": IRREVERSIBLE, "all": tuple(pool())}
COMPOSITION = re.compile(r"(?=\d)(?:(?P<r>\d+)r)?(?:(?:(?<=r)\+|^)(?P<i>\d+)i)?")


def chosen(names: str | Sequence[str], seed: int = 0) -> dict[str, Transform]:
    """Select some of the pool.

    Args:
        names: "reversible", "irreversible", "all", "clean" (the unchanged image), a name, several
            of these, or a composition such as "14r+28i": the given numbers of reversible and
            irreversible ones, drawn without replacement.
        seed: of the draw. With the same seed a larger draw contains the smaller one.

    Returns:
        The transformations by name: those drawn in the paper's order, each once.
    """
    requested = [names] if isinstance(names, str) else list(names)
    if not requested:
        raise ValueError('no transformations asked for: name some, or "all"')
    known = {"clean": Identity(), **pool()}
    return {name: known[name] for one in requested for name in _expand(one, seed)}


def _expand(name: str, seed: int) -> Sequence[str]:
    if name == "clean" or name in pool():
        return [name]
    if name in WORDS:
        return WORDS[name]
    if composition := COMPOSITION.fullmatch(name.replace(" ", "")):
        counts = {"reversible": composition["r"], "irreversible": composition["i"]}
        return [one for word, count in counts.items() for one in _draw(word, count, seed)]
    hint = nearest(name, ["clean", *WORDS, *pool()], ', nor a composition as "14r+28i"')
    raise ValueError(f"no transformation {name!r}{hint}")


def _draw(word: str, count: str | None, seed: int) -> list[str]:
    """Draw `count` names of a group: a prefix of one permutation, returned in the group's order."""
    names, wanted = WORDS[word], int(count or 0)
    if wanted > len(names):
        raise ValueError(f"there are {len(names)} {word} ones to draw from, got {wanted}")
    order = torch.randperm(len(names), generator=generator_of(seed, len(names)))
    taken = set(order[:wanted].tolist())
    return [name for index, name in enumerate(names) if index in taken]
