"""A trained module as a folder, as the Hugging Face hub holds it: weights, recipe, model card."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from lightning_rob.commands.base import Run
from lightning_rob.commands.checkpoints import RECIPE, SAVED, read_checkpoint
from lightning_rob.commands.model_card import model_card
from lightning_rob.evaluation.records import versions
from lightning_rob.nets.hub import CONFIG, ENTRY, WEIGHTS
from lightning_rob.runtime.files import atomic_write, atomic_write_text
from lightning_rob.runtime.identity import fingerprint

FORMAT = 1
# Entries of a Lightning checkpoint that only a resumed training needs.
TRAINING = re.compile(
    "state_dict|loops|callbacks|optimizer_states|lr_schedulers|averaging_state|current_model_state|"
    f"(datamodule_)?hyper_parameters|(datamodule_)?hparams_(name|type)|.*Precision|{RECIPE}"
)


def write_model_folder(run: Run, folder: Path) -> None:
    """Write model.safetensors, config.json and README.md of a run's checkpoint.

    Args:
        run: with a checkpoint.
        folder: created if there is none; files of these names are replaced.

    Raises:
        ValueError: the folder would not be the whole defense.
        OSError: it cannot be written.
    """
    _check_whole(run)
    content = read_checkpoint(str(run.checkpoint))
    data = type(run.data).__qualname__  # under which Lightning saves the state of the data module
    kept = {k: v for k, v in content.items() if not TRAINING.fullmatch(k) and k != data}
    tensors = {**content["state_dict"], **dict(_tensors(kept, SAVED))}
    others = [name for name, entry in tensors.items() if not isinstance(entry, Tensor)]
    if others:
        raise ValueError(f"safetensors hold tensors alone, {', '.join(others)} are none")
    entry = {"format": FORMAT, "model": run.recipe["model"], "checkpoint": _described(kept, SAVED)}
    entry |= {"fingerprint": fingerprint(run.defense), "versions": versions()}
    config = json.dumps({"library_name": "lightning-rob", ENTRY: entry}, indent=1)
    # Copies: safetensors refuse tensors that share their memory.
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    weights = save(copies, metadata={"format": "pt"})  # `save_file` would hide it from other users
    atomic_write(folder / WEIGHTS, lambda draft: draft.write_bytes(weights))
    atomic_write_text(folder / CONFIG, config + "\n")
    atomic_write_text(folder / "README.md", model_card(run))


def _check_whole(run: Run) -> None:
    """Refuse a run whose defense depends on more than the folder holds."""
    if run.inputs.preprocess is not None:
        raise ValueError(
            "preprocess is an option of a plug-in, which the folder does not hold: normalize "
            "inside the network, or leave the plug-in out"
        )
    for key, path in _files_in(run.recipe["model"], "model"):
        raise ValueError(
            f"{key} is a file, {path!r}, that the folder does not hold: if the checkpoint has these"
            f" weights, add --{key}=null"
        )


def _files_in(spec: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the places in a recipe that name an existing file or folder."""
    items = spec.items() if isinstance(spec, Mapping) else ()
    for name, part in enumerate(spec) if isinstance(spec, list) else items:
        yield from _files_in(part, f"{key}.{name}")
    is_path = isinstance(spec, str) and re.fullmatch(r".{,200}[./\\].{,200}", spec)
    if is_path and Path(spec).exists():
        yield key, spec


def _tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts and lists under dotted names."""
    if isinstance(tree, Tensor):
        yield name, tree
    items = tree.items() if isinstance(tree, Mapping) else ()
    for key, part in enumerate(tree) if isinstance(tree, list | tuple) else items:
        yield from _tensors(part, f"{name}.{key}")


def _described(tree: Any, name: str) -> Any:
    """Return nested dicts and lists with {"tensor": its name} for each tensor."""
    if isinstance(tree, Tensor):
        return {"tensor": name}
    if isinstance(tree, Mapping):
        return {str(key): _described(part, f"{name}.{key}") for key, part in tree.items()}
    if isinstance(tree, list | tuple):
        return [_described(part, f"{name}.{i}") for i, part in enumerate(tree)]
    return tree
