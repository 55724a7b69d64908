"""Configuration files of a command line."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_rob.recipes.plugins import CONFIG_OPTIONS
from lightning_rob.recipes.safe_yaml import load_file
from lightning_rob.recipes.shipped import find_recipe, shipped_folder
from lightning_rob.runtime.errors import InputError, nearest

NAMED = ("best", "last", "hpc")  # checkpoints that Lightning finds


def config_file(arg: str) -> str:
    """Return the value of an argument `--config=VALUE`; "" for any other argument."""
    option, _, value = arg.partition("=")
    return value if option in CONFIG_OPTIONS else ""


def is_inline(path: str) -> bool:
    """Whether the value of --config is YAML in place of a file."""
    return not find_recipe(path) and bool(re.search(r"\n|: |^\s*\{", path))


def check_configs(args: Sequence[str]) -> None:
    """Refuse an unreadable configuration file, or one whose `callbacks:` drops earlier ones."""
    if any(re.match(r"--trainer\.callbacks(=|$)", arg) for arg in args):
        raise InputError("write --trainer.callbacks+=…: without + it drops those before it")
    for path in filter(None, map(config_file, args)):
        content = {} if is_inline(path) else read_config(path)
        if "callbacks" in content or "callbacks" in (content.get("trainer") or {}):
            raise InputError(
                f"{path}: write `callbacks+:` under `trainer:`; "
                "a plain `callbacks:` silently drops those that came before it"
            )


def read_config(path: str) -> dict[str, Any]:
    """Return the content of a configuration file, given by path or short name.

    Raises:
        InputError: it cannot be read, or is not a mapping.
    """
    file = find_recipe(path) or Path(path)
    if not file.exists():
        known = [path.stem for path in (shipped_folder() / "configs").rglob("*.yaml")]
        hint = nearest(file.stem, known, ": lightning-rob recipes lists those by name")
        raise InputError(f"there is no recipe {path}{hint}")
    content = load_file(file, "a configuration file")
    if not isinstance(content, dict):
        start = file.read_text(encoding="utf-8")[:40]
        raise InputError(f"{path} must hold keys such as model and trainer, got {start!r}")
    if not isinstance(content.get("trainer") or {}, dict):
        raise InputError(f"{path}: trainer must hold keys, got {content['trainer']!r:.40}")
    return content
