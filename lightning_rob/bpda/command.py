"""`lightning-rob bpda`: train what is not in the folder yet, and tell how well all of it learnt."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from tqdm import tqdm

from lightning_rob.bpda.options import ALL, Request, parse
from lightning_rob.data import ImageData
from lightning_rob.data.base import IndexedSubset
from lightning_rob.randomness import derive_seed
from lightning_rob.reasons import InputError
from lightning_rob.recipes import fractions, numbers
from lightning_rob.run import USER_ERRORS, Parser
from lightning_rob.transforms import Bilateral, Transform, catalogue, named
from lightning_rob.transforms.bpda import (
    held_out,
    load_approximation,
    place_of,
    save_approximation,
    train_bpda,
)
from lightning_rob.transforms.nondifferentiable import ALL as NONDIFFERENTIABLE


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Args:
        name: of the transform.
        about: what its file says of its network; None if it has none.
        note: why it has none.
        there: it was trained before.
    """

    name: str
    about: dict[str, Any] | None
    note: str = ""
    there: bool = False


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: the command line without `bpda`.

    Raises:
        InputError: what is asked for cannot be run.
    """
    try:
        request, rest = parse(args)
        transforms = _transforms(request)
        images = _images(_data(rest), request.max_images)
        show(train_all(request, transforms, images), request.out)
    except (*USER_ERRORS, OSError) as error:
        raise InputError(str(error)) from error


def _transforms(request: Request) -> dict[str, Transform]:
    if not isinstance(request.transforms, str):
        return named(fractions(request.transforms))
    kinds: list[type[Transform]] = [*NONDIFFERENTIABLE]
    if request.transforms == ALL:
        kinds = [*catalogue().values(), Bilateral, *kinds]
    return named([kind() for kind in kinds])


def _data(args: Sequence[str]) -> ImageData:
    """The data module that `--data …` stands for."""
    parser = Parser(prog="lightning-rob bpda")
    parser.add_lightning_class_args(ImageData, "data", subclass_mode=True)
    config = parser.parse_args([numbers(arg) for arg in args])
    data: ImageData = parser.instantiate_classes(config).data
    return data


def _images(data: ImageData, most: int | None) -> Tensor:
    """The training images as they are, without augmentation: [N, C, H, W]."""
    data.setup("fit")
    train: Any = data.parts["train"]
    part = IndexedSubset(train.source, train.indices[:most], data.preprocessing())
    return torch.stack([x for x, *_ in map(part.__getitem__, range(len(part)))])


def train_all(request: Request, transforms: dict[str, Transform], images: Tensor) -> list[Row]:
    """Train what is not there.

    Args:
        request: what is asked for.
        transforms: by name.
        images: [N, C, H, W] in [0, 1].

    Returns:
        A row for each transform.
    """
    device = request.device or ("cuda" if torch.cuda.is_available() else "cpu")
    images = images.to(device)
    why_not = {name: _unfit(t, images) for name, t in transforms.items()}
    paths = {n: place_of(request.out, t, images.shape[1:]) for n, t in transforms.items()}
    missing = [n for n, path in paths.items() if not (why_not[n] or path.exists())]
    steps = request.epochs * (len(images) - held_out(len(images)))
    rows = []
    with tqdm(total=len(missing) * steps, unit="img", disable=not missing) as bar:
        for name, transform in transforms.items():
            if why_not[name]:
                rows.append(Row(name, None, why_not[name]))
                continue
            if name in missing:
                bar.set_description(name)
                _train(request, transform, images, bar)
            about = load_approximation(paths[name])[1]
            rows.append(Row(name, about, there=name not in missing))
    return rows


def _unfit(transform: Transform, images: Tensor) -> str:
    """Why a transform is not for such images; empty if it is."""
    try:
        with torch.no_grad():
            transform(images[:1], *transform.sample(images[:1], torch.Generator()))
    except (ValueError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return ""


def _train(request: Request, transform: Transform, images: Tensor, bar: Any) -> None:
    began = time.perf_counter()
    path = place_of(request.out, transform, images.shape[1:])
    chance = torch.Generator().manual_seed(derive_seed(request.seed, *path.name.encode()))
    trained = train_bpda(transform, images, request.epochs, generator=chance, progress=bar.update)
    save_approximation(
        request.out,
        transform,
        images.shape[1:],
        trained.net.cpu(),
        error=trained.error,
        identity=trained.identity,
        seconds=time.perf_counter() - began,
        epochs=request.epochs,
        images=len(images),
        seed=request.seed,
    )


def show(rows: Sequence[Row], folder: Path) -> None:
    """Print the table, and what it cannot say."""
    table = Table(title="Mean squared errors on images held out, in squared pixel units")
    for title in ("transform", "network", "identity", "images", "epochs", "seconds"):
        table.add_column(title, justify="left" if title == "transform" else "right")
    skipped = [row for row in rows if row.about is None]
    for name, about in ((row.name, row.about) for row in rows if row.about):
        errors = [f"{about['error']:.5f}{_star(about)}", f"{about['identity']:.5f}"]
        counts = [f"{about[key]:.0f}" for key in ("images", "epochs", "seconds")]
        table.add_row(name, *errors, *counts)
    Console().print(table)
    if any(_star(row.about) for row in rows if row.about):
        print("* worse than the identity: more images or epochs may help")
    for row in skipped:
        print(f"Skipped: {row.note}")
    there = sum(row.there for row in rows)
    print(f"Networks are in {folder}, {there} of them from before")


def _star(about: dict[str, Any]) -> str:
    return "*" if about["error"] >= about["identity"] else ""
