"""What a user may ask of `lightning-rob bpda`; nothing heavy is imported."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightning_rob.sweep.options import Arguments

ALL, NONDIFFERENTIABLE = "all", "nondifferentiable"
HELP = """usage: lightning-rob bpda --data CLASS --out FOLDER [options]

Train a network on each transform (BPDA); its gradient can stand in for the
transform's: RandomTransforms(…, gradients="bpda", approximations=FOLDER).

  --data CLASS       the images, such as Digits5k, and --data.NAME=VALUE
  --config RECIPE    or the data and transforms of a recipe
  --out FOLDER       for the networks
  --transforms LIST  names such as Affine,Swirl; all; nondifferentiable; or with
                     arguments, YAML or a file of it: '{Affine: {alpha: 0.2}}'
                     (default: those of the recipe, or else all)
  --epochs N         passes over the images (default: 10)
  --max_images N     (default: the whole training set)
  --device NAME      (default: cuda where there is one, or else cpu)
  --seed N           (default: 0)

  lightning-rob bpda --data Digits5k --out bpda_nets --max_images 2000

The same command again goes on where it was stopped. What is there is not
trained again; a file is named after transform, arguments and image shape."""


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Args:
        out: the folder of the networks.
        transforms: the arguments of each by its name; or "all", or "nondifferentiable".
        epochs: passes over the images.
        max_images: None for all.
        device: None for the fastest there is.
        seed: names the chance in training.
    """

    out: Path
    transforms: Mapping[str, Mapping[str, Any]] | str = ALL
    epochs: int = 10
    max_images: int | None = None
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("max_images", 2)):
            number = getattr(self, name)
            if number is not None and number < least:
                raise ValueError(f"--{name} must be at least {least}, got {number}")


def help_text() -> str:
    """What `lightning-rob bpda --help` prints."""
    return HELP


def parse(args: Sequence[str]) -> tuple[Request, list[str]]:
    """What is asked for, and the arguments that are about data.

    Raises:
        ValueError: it cannot be meant.
    """
    options = Arguments(add_help=False, allow_abbrev=False)
    for name in ("--out", "--transforms", "--config", "--device"):
        options.add_argument(name)
    for name, default in (("--epochs", 10), ("--max_images", None), ("--seed", 0)):
        options.add_argument(name, type=int, default=default)
    own, rest = options.parse_known_args(list(args))
    if not own.out:
        raise ValueError("say where the networks go to: --out FOLDER")
    recipe = _recipe(own.config) if own.config else {}
    if "data" in recipe:
        rest = ["--data", yaml.safe_dump(recipe["data"], default_flow_style=True), *rest]
    chosen = _chosen(own.transforms) if own.transforms else _transforms_in(recipe) or ALL
    out = Path(own.out)
    return Request(out, chosen, own.epochs, own.max_images, own.device, own.seed), rest


def _recipe(path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} is no recipe: it has no data and no model")
    return content


def _transforms_in(content: Any) -> dict[str, Any] | None:
    """The first mapping called transforms, however deep."""
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("transforms"), dict):
        return dict(content["transforms"])
    found = (_transforms_in(part) for part in content.values())
    return next((part for part in found if part), None)


def _chosen(text: str) -> dict[str, Any] | str:
    """What `--transforms` stands for."""
    if text in (ALL, NONDIFFERENTIABLE):
        return text
    try:
        content = yaml.safe_load(Path(text).read_text() if Path(text).is_file() else text)
    except yaml.YAMLError as error:
        raise ValueError(f"--transforms takes names or YAML, got {text!r}: {error}") from error
    if isinstance(content, dict):
        return _transforms_in(content) or content
    names = [name.strip() for name in str(content).split(",") if name.strip()]
    return {name: {} for name in names}
