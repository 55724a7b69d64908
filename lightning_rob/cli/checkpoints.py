"""Lightning checkpoints, written atomically with a manifest and read without running code."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO

from lightning_rob.cli.configs import NAMED
from lightning_rob.commands.checkpoints import config_in_checkpoint, read_checkpoint
from lightning_rob.errors import InputError
from lightning_rob.files import MANIFEST_SUFFIX, Stamp, atomic_save, stamp_of, write_manifest


class SafeCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically, each with a manifest, and reads weights only.

    Attributes:
        loaded: epoch and global step of the checkpoint that was loaded last.
    """

    def __init__(self) -> None:
        self.loaded: dict[str, Any] | None = None
        self._kept: tuple[str, Stamp, dict[str, Any]] | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None
    ) -> None:
        """Write to the disk, then rename; a kill never leaves the manifest of another file."""
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(f"{path}{MANIFEST_SUFFIX}").unlink(missing_ok=True)
        atomic_save(checkpoint, Path(path))
        write_manifest(Path(path))

    def peek(self, path: str) -> dict[str, Any]:
        """Read a checkpoint, and keep it for the `load_checkpoint` that follows.

        The recipe is needed before the trainer exists, the weights after it.

        Raises:
            InputError: missing, or not a checkpoint.
        """
        stamp = stamp_of(Path(path))
        content = read_checkpoint(path)
        if stamp is not None:
            self._kept = (path, stamp, content)
        return content

    def load_checkpoint(self, path: Any, *_: Any, **options: Any) -> dict[str, Any]:
        """Return the content, on the CPU, refusing code even if Lightning would allow it."""
        content = self._take(str(path)) or read_checkpoint(str(path))
        names = {"epoch": "epoch", "step": "global_step"}
        self.loaded = {name: content[key] for name, key in names.items() if key in content}
        return content

    def _take(self, path: str) -> dict[str, Any] | None:
        """Hand over the content kept by `peek`, unless the file has changed since."""
        kept, self._kept = self._kept, None
        return kept[2] if kept and kept[:2] == (path, stamp_of(Path(path))) else None

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it with its manifest."""
        super().remove_checkpoint(path)
        Path(f"{path}{MANIFEST_SUFFIX}").unlink(missing_ok=True)


def inject_checkpoint_config(
    args: Sequence[str], read: Callable[[str], dict[str, Any]]
) -> list[str]:
    """Insert the recipe of `--ckpt_path` before the other arguments, which may override it.

    Args:
        args: a command line with joined values, the subcommand first.
        read: reads a checkpoint.

    Raises:
        InputError: neither a configuration nor a checkpoint says what to run.
    """
    given = any(re.match(r"--(model|config|help|print_config)|-c|-h", arg) for arg in args)
    paths = [arg.partition("=")[2] for arg in args if arg.startswith("--ckpt_path=")]
    for path in paths:
        if path not in (*NAMED, "null", ""):
            recipe = config_in_checkpoint(read(path), path)
            if not (recipe or given):
                raise InputError(f"{path} does not say what it is a checkpoint of: add --config")
            return [args[0], f"--config={recipe}", *args[1:]] if recipe else list(args)
    if not given and args:
        raise InputError(
            "say what to run: --config RECIPE, or --ckpt_path CHECKPOINT of such a run"
        )
    return list(args)
