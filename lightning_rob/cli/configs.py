"""Configuration files of a command line, and the recipe stored in a checkpoint."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_rob.cli.plugins import CONFIG_OPTIONS
from lightning_rob.commands.checkpoints import config_in_checkpoint
from lightning_rob.errors import InputError
from lightning_rob.safe_yaml import load_file
from lightning_rob.shipped import find_recipe

NAMED = ("best", "last", "hpc")  # checkpoints that Lightning finds


def config_file(arg: str) -> str:
    """Return the value of an argument `--config=VALUE`; "" for any other argument."""
    option, _, value = arg.partition("=")
    return value if option in CONFIG_OPTIONS else ""


def check_configs(args: Sequence[str]) -> None:
    """Refuse an unreadable configuration file, or one whose `callbacks:` drops earlier ones."""
    if any(re.match(r"--trainer\.callbacks(=|$)", arg) for arg in args):
        raise InputError("write --trainer.callbacks+=…: without + it drops those before it")
    for path in filter(None, map(config_file, args)):
        inline = "\n" in path or not (find_recipe(path) or Path(path).exists())
        content = {} if inline else read_config(path)
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
    content = load_file(file, "a configuration file")
    if not isinstance(content, dict):
        start = file.read_text(encoding="utf-8")[:40]
        raise InputError(f"{path} must hold keys such as model and trainer, got {start!r}")
    if not isinstance(content.get("trainer") or {}, dict):
        raise InputError(f"{path}: trainer must hold keys, got {content['trainer']!r:.40}")
    return content


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
            return [args[0], "--config", recipe, *args[1:]] if recipe else list(args)
    if not given and args:
        raise InputError(
            "say what to run: --config RECIPE, or --ckpt_path CHECKPOINT of such a run"
        )
    return list(args)
