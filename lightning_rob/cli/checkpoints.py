"""Lightning checkpoints, written atomically and read without running code."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_rob.commands.checkpoints import read_checkpoint
from lightning_rob.nets.weights import read_file
from lightning_rob.runtime.errors import InputError
from lightning_rob.runtime.files import atomic_write

HANDED_OVER = ".temp.ckpt"  # by Lightning, from a process that it has spawned: weights alone


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically, and reads them by `weights_only=True`."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] | None = None  # epoch and step of the last one

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        # `load_checkpoint` would refuse objects among the hyper-parameters: the recipe builds them.
        content, buffer = _without_objects(checkpoint), io.BytesIO()
        torch.save(content, buffer)
        if objects := _objects_in(buffer):
            key = next((k for k, value in content.items() if not _is_plain(value)), "?")
            raise InputError(
                f"nothing could read the checkpoint {path}: its {key!r} holds a {objects[0]}, "
                "which torch.load(weights_only=True) refuses; let on_save_checkpoint "
                "and state_dict return tensors, numbers, texts, lists and dicts"
            )
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(content, path, storage_options)
            return
        # Python 3.13 warns of a `getbuffer` that the traceback of a failed write still holds.
        atomic_write(Path(path), lambda draft: draft.write_bytes(buffer.getvalue()))

    def load_checkpoint(self, path: Any, *_: Any, **options: Any) -> dict[str, Any]:
        if Path(path).name == HANDED_OVER:
            return dict(read_file(path))
        content = read_checkpoint(str(path))
        names = {"epoch": "epoch", "step": "global_step"}
        self.loaded = {name: content[key] for name, key in names.items() if key in content}
        return content


def _without_objects(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    content = dict(checkpoint)
    for kind in (LightningModule, LightningDataModule):
        found = content.get(kind.CHECKPOINT_HYPER_PARAMS_KEY)
        if found is None or _is_plain(found):
            continue
        content.pop(kind.CHECKPOINT_HYPER_PARAMS_TYPE, None)  # a container of another package
        plain = {key: value for key, value in found.items() if _is_plain(value)}
        content[kind.CHECKPOINT_HYPER_PARAMS_KEY] = plain
    return content


def _is_plain(value: Any) -> bool:
    """Whether a value can be saved, and read by `weights_only=True`."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception:  # an object may raise any when it is pickled
        return False
    return not _objects_in(buffer)


def _objects_in(buffer: io.BytesIO) -> list[str]:
    """Return the classes and functions in a saved file that `weights_only=True` refuses."""
    buffer.seek(0)
    return sorted(get_unsafe_globals_in_checkpoint(buffer))
