"""The run's folder under any logger, and pictures and texts for the loggers that take them."""

from pathlib import Path

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from PIL import Image, ImageDraw
from torch import Tensor

TILE, CAPTION = 96, 14  # pixels


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


def image_grid(x: Tensor, x_adv: Tensor, y: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """Draw clean images, amplified perturbations and adversarial images, and return [3, H', W'].

    The perturbation is grey where nothing changed. Captions read "label: before > after", each with
    its probability where that is below one.
    """
    delta = x_adv - x
    amplified = 0.5 + 0.5 * delta / delta.abs().amax().clamp_min(1e-12)
    rows = []
    for part in (x, amplified, x_adv):
        part = part.detach().float().expand(-1, 3, -1, -1).clamp(0, 1)
        tiles = torch.nn.functional.interpolate(part, size=(TILE, TILE), mode="nearest")
        rows.append(torch.cat(list(tiles), -1))
    picture = torch.cat(rows, -2).permute(1, 2, 0).mul(255).round().byte().cpu().numpy()
    page = Image.new("RGB", (picture.shape[1], picture.shape[0] + CAPTION), "white")
    page.paste(Image.fromarray(picture), (0, CAPTION))
    pen = ImageDraw.Draw(page)
    for i in range(len(x)):
        caption = f"{int(y[i])}: {_prediction(before[i])} > {_prediction(after[i])}"
        pen.text((i * TILE + 3, 1), caption, fill="black")
    return torch.from_numpy(np.asarray(page).copy()).permute(2, 0, 1).float() / 255


def _prediction(probabilities: Tensor) -> str:
    share, k = probabilities.max(0)
    if share <= 0:
        return "none"
    return f"{int(k)}" if share > 0.995 else f"{int(k)} ({float(share):.0%})"
