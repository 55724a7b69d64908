"""Perturbed images on the disk, without loss."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_rob.runtime.files import atomic_write


def save_images(folder: Path, index: Tensor, x: Tensor) -> None:
    """Write each of the images [B, C, H, W] in [0, 1] as a file named after its index."""
    from PIL import Image

    for number, image in zip(index.tolist(), x.detach().cpu().float(), strict=True):
        levels = (image * 255).round()
        # Where a pixel is no whole 255th, rounding could undo the perturbation or leave the ball.
        if image.shape[0] in (1, 3) and bool((levels / 255 == image).all()):
            pixels = levels.to(torch.uint8).permute(1, 2, 0).numpy()
            png = Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels)
            atomic_write(folder / f"{number}.png", partial(png.save, format="PNG"))
        else:
            atomic_write(folder / f"{number}.npz", partial(_write_array, image))


def _write_array(image: Tensor, path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, image=image.numpy())
