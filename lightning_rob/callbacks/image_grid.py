"""Pictures of adversarial images: clean, perturbation, adversarial, with the predictions."""

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor

TILE = 96
CAPTION = 14


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
