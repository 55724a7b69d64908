"""Configuration files of a command line, and the recipe stored in a checkpoint."""

import os
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lightning_rob.cli.plugins import find_recipe
from lightning_rob.commands.checkpoints import config_in_checkpoint
from lightning_rob.errors import InputError
from lightning_rob.safe_yaml import load

NAMED = ("best", "last", "hpc")  # checkpoints that Lightning finds


def config_files(args: Sequence[str]) -> list[str]:
    """Return the values of all `--config` options, in order."""
    joined = [
        (place, match[1])
        for place, arg in enumerate(args)
        if (match := re.match(r"(?:--config|-c)=(.*)", arg, flags=re.S))
    ]
    split = [
        (place, value)
        for place, (arg, value) in enumerate(pairwise(args))
        if arg in ("--config", "-c")
    ]
    return [value for _, value in sorted([*joined, *split])]


def check_configs(args: Sequence[str]) -> None:
    """Refuse an unreadable configuration file, or one whose `callbacks:` drops earlier ones."""
    if any(re.match(r"--trainer\.callbacks(=|$)", arg) for arg in args):
        raise InputError("write --trainer.callbacks+=…: without + it drops those before it")
    for path in config_files(args):
        is_file = find_recipe(path) is not None or os.path.isdir(path)  # a folder is refused
        content = read_config(path) if is_file else {}
        if "callbacks" in content or "callbacks" in (content.get("trainer") or {}):
            raise InputError(
                f"{path}: write `callbacks+:` under `trainer:`; "
                "a plain `callbacks:` silently drops those that came before it"
            )


def read_config(path: str) -> dict[str, Any]:
    """Return the content of a configuration file.

    Args:
        path: its path, or the short name of a shipped one.

    Raises:
        InputError: it cannot be read, or is not a mapping.
    """
    try:
        text = (find_recipe(path) or Path(path)).read_text(encoding="utf-8")
        content = load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a configuration file: {error}") from error
    except (InputError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {str(error).removeprefix('YAML: ')}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold keys such as model and trainer, got {text[:40]!r}")
    if not isinstance(content.get("trainer") or {}, dict):
        raise InputError(f"{path}: trainer must hold keys, got {content['trainer']!r:.40}")
    return content


def inject_checkpoint_config(
    args: Sequence[str], read: Callable[[str], dict[str, Any]]
) -> list[str]:
    """Insert the recipe of `--ckpt_path` before the other arguments, which may override it.

    Args:
        args: a command line, the subcommand first.
        read: reads a checkpoint.

    Raises:
        InputError: neither a configuration nor a checkpoint says what to run.
    """
    given = any(re.match(r"--(model|config|help|print_config)|-c|-h", arg) for arg in args)
    for i, arg in enumerate(args):
        path = arg.partition("=")[2] or (args[i + 1] if len(args) > i + 1 else "")
        if re.match(r"--ckpt_path(=|$)", arg) and path not in (*NAMED, "null", ""):
            recipe = config_in_checkpoint(read(path), path)
            if not (recipe or given):
                raise InputError(f"{path} does not say what it is a checkpoint of: add --config")
            return [args[0], "--config", recipe, *args[1:]] if recipe else list(args)
    if not given and args:
        raise InputError(
            "say what to run: --config RECIPE, or --ckpt_path CHECKPOINT of such a run"
        )
    return list(args)
