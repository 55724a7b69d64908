"""JPEG with a gradient (Shin and Song 2017): all of the lossy part, by smooth rounding."""

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, pad

from lightning_rob.transforms.smooth import smooth_round

# ITU-T T.81, tables K.1 and K.2; the rows are vertical frequencies
LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)
TO_YCBCR = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))
FROM_YCBCR = ((1.0, 0.0, 1.402), (1.0, -0.344136, -0.714136), (1.0, 1.772, 0.0))
WHITE, SMALLEST = 255, 0.01


@cache
def cosines() -> Tensor:
    """[frequency, place] of the orthonormal 8-point DCT, float64 on the CPU."""
    with torch.inference_mode(False):
        place = torch.arange(8, dtype=torch.float64)
        waves = torch.cos(place[:, None] * (2 * place + 1) * math.pi / 16) / 2
        return torch.cat([waves[:1] / math.sqrt(2), waves[1:]])


def table_factor(quality: Tensor, released_code: bool = False) -> Tensor:
    """By how much the standard tables are multiplied at a quality from 1 to 100; [B] -> [B].

    5000 / q percent below quality 50, 200 - 2q from there on, as in libjpeg. The authors' code
    puts the result of the first formula into the second.
    """
    coarse = 50 / quality
    return torch.where(quality < 50, 2 - 2 * coarse if released_code else coarse, 2 - quality / 50)


def quantise(plane: Tensor, table: Tensor) -> Tensor:
    """Planes [B, C, 8h, 8w] after rounding their DCT coefficients to multiples of [B, 8, 8]."""
    count, channels, height, width = plane.shape
    blocks = plane.view(count, channels, height // 8, 8, width // 8, 8).transpose(3, 4)
    dct, steps = cosines().to(plane), table[:, None, None, None]
    waves = smooth_round(dct @ blocks @ dct.T / steps) * steps
    return (dct.T @ waves @ dct).transpose(3, 4).reshape(plane.shape)


def jpeg(
    x: Tensor, quality: Tensor, released_code: bool = False, transposed: bool = True
) -> Tensor:
    """Compress and decompress, chroma at half the resolution.

    Args:
        x: [B, C, H, W] in [0, 1], C = 1 (luma alone) or 3; padded to a multiple of 16 by its edge.
        quality: [B] from 1 to 100.
        released_code: see `table_factor`.
        transposed: exchange the horizontal and vertical frequencies of the standard's tables.

    Returns:
        [B, C, H, W], not clamped.
    """
    height, width = x.shape[2:]
    padded = pad(x, [0, -width % 16, 0, -height % 16], mode="replicate") * WHITE
    factor = table_factor(quality, released_code).abs().clamp_min(SMALLEST)[:, None, None]
    # the zero point of 128 is luma's alone: chroma is left without the offset that files give it
    tables = x.new_tensor([LUMA, CHROMA])
    luma, chroma = (factor * t for t in (tables.mT if transposed else tables))
    if x.shape[1] == 1:
        whole = quantise(padded - 128, luma) + 128
    else:
        ycc = torch.einsum("ij,bjhw->bihw", x.new_tensor(TO_YCBCR), padded)
        y = quantise(ycc[:, :1] - 128, luma) + 128
        halved = quantise(avg_pool2d(ycc[:, 1:], 2), chroma)
        ycc = torch.cat([y, interpolate(halved, scale_factor=2, mode="nearest")], 1)
        whole = torch.einsum("ij,bjhw->bihw", x.new_tensor(FROM_YCBCR), ycc)
    return whole[..., :height, :width] / WHITE
