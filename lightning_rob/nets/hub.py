"""Repositories of the Hugging Face hub: their folder in the local cache."""

from collections.abc import Sequence
from pathlib import Path

HUB = "hf-hub:"  # timm's prefix of a repository's name
CONFIG, WEIGHTS = "config.json", "model.safetensors"
ENTRY = "lightning_rob"  # key of `config.json` under which this package describes a defense


def hub_folder(name: str, files: Sequence[str]) -> Path:
    """Return the folder of a repository in the hub's cache, with files that are fetched if missing.

    The name is "org/name", or at a revision "org/name@revision". With HF_HUB_OFFLINE=1 in the
    environment only the cache is read.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            'hf-hub: names need huggingface_hub: pip install "lightning-rob[hub]"'
        ) from error
    repository, _, revision = name.partition("@")
    try:
        folder = Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=list(files))
        )
    except OSError as error:
        raise FileNotFoundError(f"{HUB}{name} cannot be fetched: {error}") from error
    # The hub passes over patterns that no file fits.
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        held = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.*"))
        raise FileNotFoundError(
            f"{HUB}{name} has no {' and no '.join(missing)} (found: {', '.join(held) or 'nothing'})"
        )
    return folder
