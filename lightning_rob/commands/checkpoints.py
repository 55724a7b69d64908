"""Checkpoints as commands read them: content, weights and the recipe stored in them."""

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from lightning_rob.defenses import Ensemble
from lightning_rob.nets.hub import CONFIG, ENTRY, WEIGHTS
from lightning_rob.nets.hugging_face import TransformersNet, is_classifier
from lightning_rob.nets.weights import read_file
from lightning_rob.recipes.safe_yaml import load
from lightning_rob.runtime.errors import InputError

RECIPE = "lightning_rob_recipe"  # key of a checkpoint
SAVED = "saved_state"  # first component of a folder's tensors that are not of the state dict


def read_checkpoint(path: str) -> dict[str, Any]:
    """Load a checkpoint, or a folder of `export`, on the CPU without running code from it."""
    if not Path(path).exists():
        raise InputError(f"there is no checkpoint {path}")
    try:
        checkpoint = _read_folder(Path(path)) if Path(path).is_dir() else read_file(path)
    except (ValueError, OSError) as error:
        raise InputError(str(error)) from error
    if not (isinstance(checkpoint, dict) and isinstance(checkpoint.get("state_dict"), dict)):
        raise InputError(
            f"{path} is not a Lightning checkpoint: it has no state_dict. Of weights alone build "
            "the network in Python and read them by load_weights(net, FILE), or name both in a "
            "recipe such as `assembled` (docs/commands.md, Networks from elsewhere)"
        )
    return checkpoint


def _read_folder(folder: Path) -> dict[str, Any]:
    """Return the files that `lightning-rob export --format safetensors` wrote as a checkpoint."""
    try:
        config = json.loads((folder / CONFIG).read_text("utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{folder} is a folder without {CONFIG}: name a checkpoint") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{folder / CONFIG} is no JSON: {error}") from error
    if is_classifier(folder):
        return _of_transformers(folder)
    entry = config.get(ENTRY) if isinstance(config, dict) else None
    if not (isinstance(entry, dict) and isinstance(entry.get("checkpoint"), dict)):
        raise ValueError(
            f"{folder} is not of lightning-rob export: its {CONFIG} has no {ENTRY!r}; a network of "
            "timm is lightning_rob.nets.ZooNet('hf-hub:org/name')"
        )
    tensors = read_file(folder / WEIGHTS)
    state = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{SAVED}.")}
    saved = {key: _with_tensors(part, tensors) for key, part in entry["checkpoint"].items()}
    return saved | {"state_dict": state, RECIPE: yaml.safe_dump({"model": entry["model"]})}


def _of_transformers(folder: Path) -> dict[str, Any]:
    """Return an image classifier of transformers as the checkpoint of a trained network."""
    names = ("lightning_rob.nets.TransformersNet", "lightning_rob.modules.PretrainedEnsemble")
    net = {"class_path": names[0], "init_args": {"folder": str(folder)}}
    model = {"class_path": names[1], "init_args": {"nets": [net]}}
    state = {f"defense.{k}": v for k, v in Ensemble([TransformersNet(folder)]).state_dict().items()}
    written_by = {"pytorch-lightning_version": version("lightning")}
    return {**written_by, "state_dict": state, RECIPE: yaml.safe_dump({"model": model})}


def _with_tensors(tree: Any, tensors: Mapping[str, Any]) -> Any:
    """Return nested dicts and lists with tensors in place of {"tensor": name}."""
    if isinstance(tree, list):
        return [_with_tensors(part, tensors) for part in tree]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {"tensor"}:
        if str(tree["tensor"]) not in tensors:
            raise ValueError(f"{WEIGHTS} has no {tree['tensor']!r}, which {CONFIG} names")
        return tensors[str(tree["tensor"])]
    return {key: _with_tensors(part, tensors) for key, part in tree.items()}


def load_weights(model: Any, checkpoint: dict[str, Any]) -> None:
    """Give a module the weights of a checkpoint."""
    model.on_load_checkpoint(checkpoint)
    model.load_state_dict(checkpoint["state_dict"], strict=model.strict_loading)


def config_in_checkpoint(checkpoint: dict[str, Any], path: str) -> str | None:
    """Return the model and data of a checkpoint's recipe as YAML; None without a recipe."""
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
