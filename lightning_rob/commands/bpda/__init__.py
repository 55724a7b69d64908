"""`lightning-rob bpda`: networks whose gradients stand in for those of transforms."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from lightning_rob.commands.config import CommandConfig, at_least


def find_transforms(content: Any) -> dict[str, Any] | None:
    """Return the first mapping under a key `transforms`, at any depth."""
    if not isinstance(content, Mapping):
        return None
    if isinstance(content.get("transforms"), Mapping):
        return dict(content["transforms"])
    found = (find_transforms(part) for part in content.values())
    return next((part for part in found if part), None)


@dataclass(frozen=True)
class BpdaConfig(CommandConfig):
    """Train a network on each transform (BPDA), whose gradient can replace the transform's.

    It is used by RandomTransforms(…, gradients="bpda", approximations=FOLDER).

      lightning-rob bpda --data Digits5k --out bpda_nets --max_images 2000

    With --config, data and transforms are those of a recipe. The same command again
    resumes: a finished network is not trained again. Its file is named after the
    transform, its arguments and the image shape.

    Args:
        out: folder for the networks
        transforms: names such as Affine,Swirl; all; nondifferentiable; else the recipe's with
            their arguments, or all
        epochs: passes over the images
        max_images: the first N training images; else all
        device: cpu, cuda; else cuda where there is one
        seed: of the training
    """

    positional: ClassVar[str] = ""
    usage: ClassVar[str] = "--data CLASS --out FOLDER [--data.NAME=VALUE] [options]"
    module: ClassVar[str] = "training"

    out: Path | None = None
    transforms: str | None = None
    epochs: int = 10
    max_images: int | None = None
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.out is None:
            raise ValueError("say where the networks go to: --out FOLDER")
        at_least(1, epochs=self.epochs)
        at_least(2, max_images=self.max_images)
