"""The run's folder under any logger, and pictures for the loggers that take them."""

from pathlib import Path

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from torch import Tensor
from torchvision.utils import make_grid

TILE = 96  # pixels


def run_folder(trainer: Trainer) -> Path | None:
    """Return the folder of the run's `checkpoints`; None on a trial run or without logger.

    Every process has to call it: the first one decides.
    """
    if trainer.fast_dev_run or not trainer.loggers:  # type: ignore[attr-defined]
        return None
    logger = trainer.loggers[0]
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    parent = logger.save_dir
    if parent is None or "://" in str(parent):
        parent = trainer.default_root_dir
    return trainer.strategy.broadcast(Path(parent) / str(logger.name) / version)


def writing_folder(trainer: Trainer) -> Path | None:
    """Return `run_folder` on the process that writes to it, None elsewhere."""
    folder = run_folder(trainer)
    return folder if trainer.is_global_zero else None


def log_picture(trainer: Trainer, name: str, picture: Tensor) -> None:
    """Log a picture [C, H, W] in [0, 1] with TensorBoard and W&B."""
    for logger in trainer.loggers:
        match logger:
            case TensorBoardLogger():
                logger.experiment.add_image(name, picture, trainer.global_step)
            case WandbLogger():
                # As bytes: of a tensor W&B would stretch the contrast.
                pixels = (255 * picture.clamp(0, 1)).round().byte().movedim(0, -1).cpu().numpy()
                logger.log_image(name, [pixels], trainer.global_step)


def image_grid(x: Tensor, x_adv: Tensor) -> Tensor:
    """Return rows of clean images, amplified perturbations and adversarial images, [3, H', W'].

    The perturbation is grey where nothing changed.
    """
    delta = x_adv - x
    amplified = 0.5 + 0.5 * delta / delta.abs().amax().clamp_min(1e-12)
    tiles = torch.cat([x, amplified, x_adv]).detach().float().clamp(0, 1)
    tiles = torch.nn.functional.interpolate(tiles, size=(TILE, TILE), mode="nearest")
    return make_grid(tiles, nrow=len(x), padding=0).cpu()
