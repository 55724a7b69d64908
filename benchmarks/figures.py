"""Figures of the documentation: transforms of an image, an attack, and the rejection curves.

    python benchmarks/figures.py transforms docs/images/transforms.png
    python benchmarks/figures.py pool docs/images/pool.png
    python benchmarks/figures.py attack docs/images/attack.png

`rejection` is drawn by benchmarks/rejection.py, which measures the curves.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from textwrap import wrap

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import lightning_rob
from lightning_rob import PGD, Threat
from lightning_rob.data import Digits5k
from lightning_rob.data.embedded import photo as photograph
from lightning_rob.plots import COLORS, MARKERS, blank, save
from lightning_rob.randomness import Streams
from lightning_rob.transforms import Transform, catalogue
from lightning_rob.transforms.pool import GROUPS

STRENGTHS = (0.1, 0.3, 0.5)
COLUMNS, SIDE, TEXT, POOL_TEXT = 12, 0.64, 0.34, 0.46  # images a row; inches of image and text
LETTERS = 11  # of a line below a picture of the pool
EPS = 0.1  # of the attack that is shown
PANEL = (2.7, 3.0)  # inches of a panel of rejection curves
MARKS = 9  # of a rejection curve, spread evenly

Block = tuple[str, list[tuple[str, Tensor]]]


def transforms(x: Tensor, seed: int = 0) -> Figure:
    """Draw an image unchanged and under each of the 33 transforms.

    All strengths of a transform share their randomness, to show the effect of the strength.
    Transforms without a strength are drawn three times if they are random, else once.

    Args:
        x: [3, H, W] in [0, 1].
        seed: of the randomness.
    """
    blocks: list[Block] = [("the image", [("", x)])]
    blocks += [(name, examples(kind, x, seed)) for name, kind in catalogue().items()]
    return grid(blocks, TEXT)


def examples(kind: type[Transform], x: Tensor, seed: int) -> list[tuple[str, Tensor]]:
    """Return a transform's labels and pictures [3, H, W]."""
    if "alpha" in kind.__dataclass_fields__:
        cases = [(f"alpha {a:g}", kind(**{"alpha": a}), 0) for a in STRENGTHS]
    else:
        cases = [("", kind(), draw) for draw in range(3 if kind().sample(x[None]) else 1)]
    return [(label, transformed(transform, x, seed, draw)) for label, transform, draw in cases]


def pool(x: Tensor, seed: int = 0) -> Figure:
    """Draw an image unchanged and under each of the pool's 72 transformations, by group.

    Args:
        x: [C, H, W] in [0, 1], C = 1 or 3.
        seed: of the randomness.
    """
    blocks: list[Block] = [("clean", [("", x.expand(3, -1, -1))])]
    for group, members in GROUPS.items():
        blocks.append((group, [(label(n), transformed(t, x, seed)) for n, t in members.items()]))
    return grid(blocks, POOL_TEXT)


def attack() -> Figure:
    """Draw the first test image of each digit, and PGD on the two networks of the package."""
    parts = digits_by_class()
    x = torch.stack([image for image, _ in parts])
    y = torch.tensor([digit for _, digit in parts])
    rows = [("clean", x, [f"{digit}" for digit in y.tolist()], ["black"] * len(x))]
    pgd = PGD(Threat("linf", EPS), 50, EPS / 10)
    for name in ("digits_standard", "digits_robust"):
        defense = lightning_rob.load(f"zoo:{name}")
        x_adv = pgd(defense, x, y, torch.Generator().manual_seed(0))
        with torch.no_grad():
            found = defense(x_adv).argmax(-1)
        pairs = zip(y.tolist(), found.tolist(), strict=True)
        texts = [f"{a}" if a == b else f"{a} \N{RIGHTWARDS ARROW} {b}" for a, b in pairs]
        colors = ["#0b6e2e" if right else "#b3261e" for right in (found == y).tolist()]
        change = f"change \N{MULTIPLICATION SIGN} {0.5 / EPS:g}"
        rows.append((change, 0.5 + (x_adv - x) / (2 * EPS), [""] * len(x), colors))
        rows.append((name, x_adv, texts, colors))
    figure = blank(8.6, 4.8)
    axes = figure.subplots(len(rows), len(x))
    for line, (title, images, texts, colors) in zip(axes, rows, strict=True):
        line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=9)
        for axis, image, text, color in zip(line, images, texts, colors, strict=True):
            axis.imshow(image[0].numpy(), cmap="gray", vmin=0, vmax=1)
            axis.set(xticks=[], yticks=[])
            axis.set_xlabel(text, color=color, fontsize=10, fontweight="bold", labelpad=2)
    return figure


def label(name: str) -> str:
    """Return a name without its group, in short lines."""
    words = name.partition("_")[2].replace("_", " ")
    return "\n".join(wrap(words, LETTERS, break_long_words=False))


def transformed(transform: Transform, x: Tensor, seed: int, draw: int = 0) -> Tensor:
    streams = Streams.from_index(torch.tensor([draw]), seed)
    return transform(x[None], *transform.sample(x[None], streams))[0].expand(3, -1, -1)


def grid(blocks: Sequence[Block], text: float) -> Figure:
    """Draw blocks of pictures one after the other, each under its name.

    Args:
        blocks: their names, and the labels and pictures [3, H, W] in [0, 1] of each.
        text: inches for the lines of text of a row.
    """
    places = arranged([len(pictures) for _, pictures in blocks])
    rows = places[-1][0] + 1
    figure = blank(COLUMNS * SIDE, rows * (SIDE + text))
    figure.set_layout_engine("constrained", w_pad=0.03, h_pad=0.01, wspace=0, hspace=0)
    cells = figure.subplots(rows, COLUMNS, squeeze=False)
    for axes in cells.flat:
        axes.set_axis_off()
    for (row, column), (name, pictures) in zip(places, blocks, strict=True):
        draw_block(list(cells[row, column : column + len(pictures)]), name, pictures)
    return figure


def arranged(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return row and column at which each block starts, if none is broken over two rows."""
    row, column, places = 0, 0, []
    for length in lengths:
        if column + length > COLUMNS:
            row, column = row + 1, 0
        places.append((row, column))
        column += length
    return places


def draw_block(axes: Sequence[Axes], name: str, pictures: list[tuple[str, Tensor]]) -> None:
    """Draw a block: its name over a line as long as its pictures, and a label below each."""
    for place, (words, image) in zip(axes, pictures, strict=True):
        pixels = image.permute(1, 2, 0).detach().cpu().numpy()
        place.imshow((255 * pixels).round().astype(np.uint8), interpolation="nearest")
        place.text(0.5, -0.05, words, fontsize=6, ha="center", va="top", transform=place.transAxes)
        end = 1.0 if place is axes[-1] else 1.24
        place.plot([0, end], [1.05] * 2, "k", lw=0.7, transform=place.transAxes, clip_on=False)
    axes[len(axes) // 2].set_title(name, fontsize=5.7, pad=5)


@dataclass(frozen=True)
class Setting:
    """One panel of rejection curves.

    Args:
        label: title of the panel: how x~ was made.
        thresholds: [T] ascending, in [0, 1].
        rejected: [T] share of x~ that is rejected.
        rejected_clean: [T] share of z that is rejected.
        error: [T] share that is accepted and misclassified.
    """

    label: str
    thresholds: Sequence[float]
    rejected: Sequence[float]
    rejected_clean: Sequence[float]
    error: Sequence[float]


def rejection(
    settings: Sequence[Setting], tau: float | None = None, error: str = "error"
) -> Figure:
    """Draw the rejection curves of a selective classifier side by side, in per cent.

    Args:
        settings: at least one.
        tau: a threshold to mark; None marks none.
        error: name of the error: a share of x~ or of the accepted images.
    """
    figure = blank(PANEL[0] * len(settings) + 0.6, PANEL[1] + 0.5)
    panels = figure.subplots(1, len(settings), sharex=True, sharey=True, squeeze=False)[0]
    for axes, setting in zip(panels, settings, strict=True):
        draw_setting(axes, setting, error)
        axes.set_title(setting.label, fontsize=9)
        if tau is not None:
            axes.axvline(tau, color="0.5", linewidth=0.8, label=f"threshold {tau:g}", zorder=0)
    panels[0].set(ylabel="%", xlim=(-0.02, 1.02), ylim=(-3, 103))
    figure.supxlabel("rejection threshold on the probability of being a test image", fontsize=9)
    lines, names = panels[0].get_legend_handles_labels()
    columns = len(names) if len(settings) > 1 else 2
    figure.legend(
        lines, names, loc="outside upper left", ncols=columns, frameon=False, handlelength=3.4
    )
    return figure


def draw_setting(axes: Axes, setting: Setting, error: str) -> None:
    lines = {
        "rejected of x\N{COMBINING TILDE} (z and attacked)": setting.rejected,
        "rejected of z": setting.rejected_clean,
        error: setting.error,
    }
    looks = zip(lines.items(), COLORS, cycle(MARKERS), ("-", "--", "-."), strict=False)
    step = max(1, len(setting.thresholds) // MARKS)
    for place, ((name, shares), color, marker, dashes) in enumerate(looks):
        axes.plot(
            setting.thresholds,
            [100 * share for share in shares],
            color=color,
            marker=marker,
            linestyle=dashes,
            markevery=(place * step // 3, step),
            markersize=4.5,
            markeredgecolor="white",
            markeredgewidth=0.5,
            linewidth=1.4,
            label=name,
            zorder=3 - 0.1 * place,
        )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.87", linewidth=0.6)
    axes.set_axisbelow(True)


def photo() -> Tensor:
    cat = Image.fromarray(photograph("cat").permute(1, 2, 0).numpy())
    small = cat.crop((110, 20, 366, 276)).resize((64, 64), Image.Resampling.BOX)
    pixels = torch.frombuffer(bytearray(small.tobytes()), dtype=torch.uint8).view(64, 64, 3)
    return pixels.permute(2, 0, 1) / 255


def digits_by_class() -> list[tuple[Tensor, int]]:
    """Return the first test image of each digit."""
    data = Digits5k()
    data.setup()
    first: dict[int, tuple[Tensor, int]] = {}
    for i in range(100):
        image, digit, *_ = data.parts["test"][i]
        first.setdefault(int(digit), (image, int(digit)))
    return [first[k] for k in sorted(first)]


def digit() -> Tensor:
    data = Digits5k()
    data.setup()
    return data.parts["test"][7][0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("figure", choices=("transforms", "pool", "attack"))
    parser.add_argument("path", type=Path)
    options = parser.parse_args()
    draw = {
        "transforms": lambda: transforms(photo(), seed=7),
        "pool": lambda: pool(digit()),
        "attack": attack,
    }
    figure = draw[options.figure]()
    save(figure, options.path, dpi=140)
    if options.figure == "transforms":  # noise makes large files
        with Image.open(options.path) as image:
            image.convert("RGB").quantize(256).save(options.path, optimize=True)


if __name__ == "__main__":
    main()
