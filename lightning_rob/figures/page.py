"""What all figures share: the look, and how they become files and TensorBoard images."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

# Okabe and Ito (2008): told apart by the colour-blind, and in grey by their order.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
MARKERS = "os^DvP*X"
STYLE: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def blank(width: float = 4.8, height: float = 3.2) -> Figure:
    """An empty figure of so many inches, laid out so that no label is cut off."""
    with rc_context(STYLE):
        return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path, dpi: int = 160) -> Path:
    """Write the figure, by its suffix a PNG, PDF or SVG; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path


def pixels(figure: Figure, dpi: int = 120) -> Tensor:
    """The figure as an image [3, H, W] in [0, 1], for TensorBoard."""
    figure.set_dpi(dpi)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    rgb = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    return torch.from_numpy(rgb).permute(2, 0, 1).float() / 255
