"""Checkpoints as commands read them: content, weights and the recipe stored in them."""

from pathlib import Path
from typing import Any

import yaml

from lightning_rob.errors import InputError
from lightning_rob.nets.weights import read_file
from lightning_rob.safe_yaml import load

RECIPE = "lightning_rob_recipe"  # key of a checkpoint


def read_checkpoint(path: str) -> dict[str, Any]:
    """Load a checkpoint on the CPU without running code from it.

    Raises:
        InputError: missing, or not a checkpoint.
    """
    if not Path(path).exists():
        raise InputError(f"there is no checkpoint {path}")
    try:
        checkpoint = read_file(path)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    if not (isinstance(checkpoint, dict) and isinstance(checkpoint.get("state_dict"), dict)):
        raise InputError(
            f"{path} is not a Lightning checkpoint: it has no state_dict; weights alone go into "
            "a recipe of Assembled (configs/assembled.yaml)"
        )
    return checkpoint


def load_weights(model: Any, checkpoint: dict[str, Any]) -> None:
    """Give a module the weights of a checkpoint.

    Raises:
        RuntimeError: they are of another architecture.
        ValueError: they are of another kind of module.
    """
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"], strict=model.strict_loading)


def config_in_checkpoint(checkpoint: dict[str, Any], path: str) -> str | None:
    """Return the model and data of a checkpoint's recipe as YAML; None without a recipe.

    Args:
        checkpoint: its content.
        path: its file, for errors.

    Raises:
        InputError: the recipe is not YAML of a mapping.
    """
    recipe = checkpoint.get(RECIPE)
    if recipe is None:
        return None
    try:
        content = load(recipe) if isinstance(recipe, str) else None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: its recipe is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path}: its recipe must be text of model and data, got {recipe!r:.40}")
    return str(yaml.safe_dump({key: content[key] for key in ("model", "data") if key in content}))
