"""Checkpoints as this package writes and reads them: whole, with a manifest, weights only."""

from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_rob.files import save_whole
from lightning_rob.manifest import SUFFIX, write_manifest
from lightning_rob.nets.weights import read_file
from lightning_rob.reasons import InputError

RECIPE = "lightning_rob_recipe"


def read_checkpoint(path: str) -> dict[str, Any]:
    """Load a checkpoint without running code from it.

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


class Checkpoints(TorchCheckpointIO):
    """Writes whole checkpoints, each with a manifest, and reads weights only."""

    loaded: dict[str, Any] | None = None  # when the last one that was read was written

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write to the disk, then rename; a kill never leaves a manifest of another file."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(f"{path}{SUFFIX}").unlink(missing_ok=True)
        save_whole(checkpoint, Path(path))
        write_manifest(Path(path))

    def load_checkpoint(self, path: Any, *_: Any, **options: Any) -> dict[str, Any]:
        """The content, on the CPU; code in it is refused whoever asks for it."""
        content = read_checkpoint(str(path))
        known = {"epoch": "epoch", "step": "global_step"}
        self.loaded = {name: content[key] for name, key in known.items() if key in content}
        return content

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it with its manifest."""
        super().remove_checkpoint(path)
        Path(f"{path}{SUFFIX}").unlink(missing_ok=True)
