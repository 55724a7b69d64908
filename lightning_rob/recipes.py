"""What a command line says, and the files it names: recipes, fractions, checkpoints' recipes."""

import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonargparse
import yaml

from lightning_rob.checkpoints import RECIPE, read_checkpoint
from lightning_rob.plain import check_plain
from lightning_rob.reasons import InputError

FRACTION = re.compile(r"(\d+(?:\.\d+)?)\s*/\s*(?!0+(?:\.0+)?$)(\d+(?:\.\d+)?)")  # not by zero
NAMED = ("best", "last", "hpc")  # checkpoints that Lightning finds


def fractions(value: Any) -> Any:
    """Every "8/255" in a parsed configuration as a number."""
    if isinstance(value, dict):
        return {key: fractions(part) for key, part in value.items()}
    if isinstance(value, list):
        return [fractions(part) for part in value]
    if isinstance(value, str) and (parts := FRACTION.fullmatch(value.strip())):
        return float(Fraction(parts[1]) / Fraction(parts[2]))
    return value


_load_yaml = jsonargparse.get_loader("yaml")


def load_plain(text: str) -> Any:
    """YAML as jsonargparse reads it, with fractions as numbers.

    Raises:
        InputError: not plain data of a sane size.
    """
    try:
        check_plain(text)
    except ValueError as error:
        raise InputError(f"YAML: {error}") from error
    return fractions(_load_yaml(text))


jsonargparse.set_loader("yaml", load_plain, exceptions=(yaml.YAMLError,))


def numbers(arg: str) -> str:
    """An argument whose value is a fraction, such as `--eps=8/255`, with the number instead."""
    option, sign, value = re.findall(r"^((?:--[^=]+=)?)(-?)(.*)", arg, flags=re.S)[0]
    match = FRACTION.fullmatch(value)
    return f"{option}{sign}{float(Fraction(match[1]) / Fraction(match[2]))}" if match else arg


def check_configs(args: Sequence[str]) -> None:
    """Refuse a configuration file that is none, or whose `callbacks:` would drop those before."""
    if any(re.match(r"--trainer\.callbacks(=|$)", arg) for arg in args):
        raise InputError("write --trainer.callbacks+=…: without + it drops those before it")
    given = [a.partition("=")[2] for a in args if re.match(r"(--config|-c)=", a)]
    given += [b for a, b in pairwise(args) if a in ("--config", "-c")]
    for path in given:
        content = read_config(path) if "\n" not in path and Path(path).exists() else {}
        if "callbacks" in content or "callbacks" in (content.get("trainer") or {}):
            raise InputError(
                f"{path}: write `callbacks+:` under `trainer:`; "
                "a plain `callbacks:` silently drops those that came before it"
            )


def read_config(path: str) -> dict[str, Any]:
    """A configuration file's content.

    Raises:
        InputError: it cannot be read, or is no mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        check_plain(text)
        content = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read as a configuration file: {error}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold keys such as model and trainer, got {text[:40]!r}")
    if not isinstance(content.get("trainer") or {}, dict):
        raise InputError(f"{path}: trainer must hold keys, got {content['trainer']!r:.40}")
    return content


def recipe_in(path: str) -> str | None:
    """The model and data a checkpoint was made by, as YAML; None where it says nothing."""
    recipe = read_checkpoint(path).get(RECIPE)
    if recipe is None:
        return None
    try:
        whole = load_plain(recipe) if isinstance(recipe, str) else None
    except yaml.YAMLError as error:
        raise InputError(f"{path}: its recipe is no YAML: {error}") from error
    if not isinstance(whole, dict):
        raise InputError(f"{path}: its recipe must be text of model and data, got {recipe!r:.40}")
    return str(yaml.safe_dump({key: whole[key] for key in ("model", "data") if key in whole}))


def with_recipe(args: Sequence[str]) -> list[str]:
    """Put the recipe of `--ckpt_path` before the other arguments, which may override it."""
    told = any(re.match(r"--(model|config|help|print_config)|-c|-h", arg) for arg in args)
    for i, arg in enumerate(args):
        path = arg.partition("=")[2] or (args[i + 1] if len(args) > i + 1 else "")
        if re.match(r"--ckpt_path(=|$)", arg) and path not in (*NAMED, "null", ""):
            recipe = recipe_in(path)
            if not (recipe or told):
                raise InputError(f"{path} does not say what it is a checkpoint of: add --config")
            return [args[0], "--config", recipe, *args[1:]] if recipe else list(args)
    if not told and args:
        raise InputError(
            "say what to run: --config RECIPE, or --ckpt_path CHECKPOINT of such a run"
        )
    return list(args)
