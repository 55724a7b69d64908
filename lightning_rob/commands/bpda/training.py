"""`lightning-rob bpda`: train the networks that a folder lacks, and print the errors of all."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from lightning_rob.commands.bpda import BpdaConfig
from lightning_rob.data import ImageData
from lightning_rob.data.base import IndexedSubset
from lightning_rob.randomness import derive_seed
from lightning_rob.transforms import Bilateral, Transform, catalogue, named
from lightning_rob.transforms.bpda import (
    load_approximation,
    place_of,
    save_approximation,
    train_bpda,
)
from lightning_rob.transforms.nondifferentiable import ALL as NONDIFFERENTIABLE


def run(config: BpdaConfig, data: ImageData, implied: Mapping[str, Any] | None) -> None:
    """Train the missing networks, and print the table; a recipe implies its transforms."""
    transforms = build_transforms(config.transforms or implied or "all")
    device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    data.setup("fit")
    train: Any = data.parts["train"]
    part = IndexedSubset(train.source, train.indices[: config.max_images], data.preprocessing())
    images = torch.stack([x for x, *_ in map(part.__getitem__, range(len(part)))]).to(device)
    skipped = {}
    for name, transform in transforms.items():  # some take images of certain shapes only
        try:
            with torch.no_grad():
                transform(images[:1], *transform.sample(images[:1], torch.Generator()))
        except (ValueError, RuntimeError) as error:
            skipped[name] = str(error).splitlines()[0]
    folder = config.out or Path()  # which the config has checked
    usable = {name: t for name, t in transforms.items() if name not in skipped}
    paths = {name: place_of(folder, t, images.shape[1:]) for name, t in usable.items()}
    missing = {name: usable[name] for name, path in paths.items() if not path.exists()}
    for name, transform in tqdm(missing.items(), "networks", disable=not missing):
        began = time.perf_counter()
        # Each network has its own stream, so it does not depend on the others of the run.
        seed = derive_seed(config.seed, *paths[name].name.encode())
        generator = torch.Generator().manual_seed(seed)
        trained = train_bpda(transform, images, config.epochs, generator=generator)
        save_approximation(
            folder,
            transform,
            images.shape[1:],
            trained.net.cpu(),
            error=trained.error,
            identity=trained.identity,
            seconds=time.perf_counter() - began,
            epochs=config.epochs,
            images=len(images),
            seed=config.seed,
        )
    print_table({name: load_approximation(path)[1] for name, path in paths.items()})
    for reason in skipped.values():
        print(f"Skipped: {reason}")
    print(f"Networks are in {folder}, {len(usable) - len(missing)} of them from before")


def build_transforms(chosen: Mapping[str, Any] | str) -> dict[str, Transform]:
    """Return the transforms of `--transforms` by name."""
    kinds: list[type[Transform]] = [*NONDIFFERENTIABLE]
    if chosen == "all":
        kinds = [*catalogue().values(), Bilateral, *kinds]
    if chosen in ("all", "nondifferentiable"):
        return named([kind() for kind in kinds])
    if isinstance(chosen, str):
        chosen = {name.strip(): {} for name in chosen.split(",") if name.strip()}
    return named(chosen)


def print_table(networks: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the errors of networks, given what their files say of them by name."""
    table = Table(title="Mean squared errors on images held out, in squared pixel units")
    for title in ("transform", "network", "identity", "images", "epochs", "seconds"):
        table.add_column(title, justify="left" if title == "transform" else "right")
    worse = {name for name, about in networks.items() if about["error"] >= about["identity"]}
    for name, about in networks.items():
        errors = [f"{about['error']:.5f}{'*' * (name in worse)}", f"{about['identity']:.5f}"]
        counts = [f"{about[key]:.0f}" for key in ("images", "epochs", "seconds")]
        table.add_row(name, *errors, *counts)
    Console().print(table)
    if worse:
        print("* worse than the identity: more images or epochs may help")
