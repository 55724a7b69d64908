"""Checkpoints and plug-ins from Python."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import yaml
from lightning.pytorch import Callback, LightningModule

from lightning_rob.cli.errors import name_old_recipe
from lightning_rob.cli.lightning_cli import build
from lightning_rob.commands.checkpoints import config_in_checkpoint, load_weights, read_checkpoint
from lightning_rob.defenses import Defense
from lightning_rob.evaluation.evaluate import as_defense
from lightning_rob.nets.hub import CONFIG, HUB, WEIGHTS, hub_folder
from lightning_rob.nets.hugging_face import PROCESSOR, TransformersNet, is_classifier
from lightning_rob.recipes.plugins import expand
from lightning_rob.recipes.safe_yaml import reading_recipes
from lightning_rob.recipes.shipped import find_checkpoint
from lightning_rob.recipes.trust import allow_imports
from lightning_rob.runtime.errors import InputError


def load(path: str | os.PathLike[str], allow_import: str | Sequence[str] = ()) -> Defense:
    """Return the defense of a checkpoint that `lightning-rob fit` wrote, in eval mode, on the CPU.

    No code in the file is run: it names classes of this package, and others only if allowed.

    Args:
        path: the checkpoint; a folder that `lightning-rob export --format safetensors` wrote, or
            one of an image classifier of transformers (`lightning_rob.nets.TransformersNet`);
            "hf-hub:org/name" or "hf-hub:org/name@revision", such a folder on the Hugging Face hub,
            of which only the named files are fetched; or "zoo:digits_robust", a trained network of
            this package.
        allow_import: packages of yours that it may name, as of `--allow-import`.
    """
    place = str(path)
    folder = _fetched(place) if place.startswith(HUB) else Path(place)
    if is_classifier(folder):
        folder = _fetched(place, PROCESSOR) if place.startswith(HUB) else folder
        return as_defense(TransformersNet(folder)).eval()
    return as_defense(load_module(path, allow_import)).eval()


def _fetched(place: str, *more: str) -> Path:
    """Return the folder of a repository on the hub, with the files that every one has, and more."""
    try:
        return hub_folder(place.removeprefix(HUB), (CONFIG, WEIGHTS, *more))
    except (OSError, ValueError) as error:
        raise InputError(str(error)) from error


def load_module(
    path: str | os.PathLike[str], allow_import: str | Sequence[str] = ()
) -> LightningModule:
    """Return the module of a checkpoint that `lightning-rob fit` wrote, with its weights.

    Arguments and errors are those of `load`.
    """
    place = str(path)
    found = _fetched(place) if place.startswith(HUB) else find_checkpoint(place)
    checkpoint = read_checkpoint(str(found))
    recipe = config_in_checkpoint(checkpoint, str(path))
    if recipe is None:
        raise ValueError(
            f"{path} does not say what it is a checkpoint of: build the module, load its weights "
            "and give it to lightning_rob.evaluate"
        )
    try:
        module = _built(LightningModule, yaml.safe_load(recipe)["model"], allow_import)
    except InputError as error:
        raise InputError(name_old_recipe(str(error), path)) from error
    load_weights(module, checkpoint)
    return cast(LightningModule, module)


def load_callbacks(
    names: str | Sequence[str], allow_import: str | Sequence[str] = ()
) -> list[Callback]:
    """Return the callbacks of plug-in files, by path or by short name such as "arc".

    A suite stands for several callbacks; `allow_import` is as of `load`.
    """
    entries = expand([names] if isinstance(names, str) else list(names), Path.cwd())
    return [_built(Callback, entry, allow_import) for entry in entries]


def _built(kind: type, spec: Any, allow_import: str | Sequence[str]) -> Any:
    prefixes = [allow_import] if isinstance(allow_import, str) else allow_import
    with allow_imports(prefixes), reading_recipes():
        return build(kind, spec)
