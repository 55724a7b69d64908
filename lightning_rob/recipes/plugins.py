"""Recipes and plug-ins by short name, and suites: plug-in files that list other plug-ins."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_rob.recipes.safe_yaml import load, load_file
from lightning_rob.recipes.shipped import find, find_checkpoint, find_recipe
from lightning_rob.runtime.errors import InputError

CONFIG_OPTIONS = ("--config", "-c")


def resolve_names(args: Sequence[str]) -> list[str]:
    """Replace short names of what is shipped by files, and suites by their callbacks.

    Args:
        args: a command line with joined values.

    Raises:
        InputError: a plug-in file is missing, unreadable, or lists itself; no such network.
    """
    resolved = []
    for arg in args:
        option, equals, value = arg.partition("=")
        if equals and option in CONFIG_OPTIONS:
            arg = f"{option}={find_recipe(value) or value}"
        elif equals and option == "--trainer.callbacks+":
            arg = f"{option}={_plugged(value)}"
        elif equals and option == "--ckpt_path":
            arg = f"{option}={find_checkpoint(value)}"
        resolved.append(arg)
    return resolved


def _plugged(value: str) -> str:
    """Return the value of a `--trainer.callbacks+` with its names replaced."""
    entry = load(value) if value.startswith(("{", "[")) else value
    found = expand(entry, Path())
    if found == [entry]:
        return value
    return found[0] if isinstance(found[0], str) and len(found) == 1 else json.dumps(found)


def expand_recipe(text: str, folder: Path) -> str:
    """Return a recipe, given as YAML, with the plug-ins under `callbacks+:` replaced.

    Args:
        text: the recipe.
        folder: folder that paths are relative to.

    Raises:
        InputError: a plug-in file is missing, unreadable, or lists itself.
    """
    content = load(text)
    trainer = content.get("trainer") if isinstance(content, dict) else None
    if not isinstance(trainer, dict) or not (entries := trainer.get("callbacks+")):
        return text
    found = expand(entries, folder)
    if found == entries:
        return text
    return str(yaml.safe_dump(content | {"trainer": trainer | {"callbacks+": found}}))


def expand(entry: Any, folder: Path, opened: tuple[Path, ...] = ()) -> list[Any]:
    """Return the callbacks that an entry of `callbacks+:`, or a list of entries, stands for.

    Args:
        entry: path or short name of a plug-in file, {name: options} to change options of its
            callbacks, a callback itself, or a list of such entries.
        folder: folder that paths are relative to.
        opened: the files that list the entry, outermost first.

    Returns:
        Callbacks; a file of a single callback, or a class, stays a text.

    Raises:
        InputError: a file is missing, unreadable, or lists itself.
    """
    if isinstance(entry, list):
        return [callback for part in entry for callback in expand(part, folder, opened)]
    if isinstance(entry, str):
        file = find(entry, "callbacks", folder=folder)
        if file is None:
            if opened and ("/" in entry or entry.endswith(".yaml")):
                raise InputError(f"{opened[-1]}: there is no file {entry}")
            return [entry]
        content = _read(file.resolve(), opened)
        return content if isinstance(content, list) else [str(file.resolve())]
    if isinstance(entry, dict) and "class_path" not in entry and len(entry) == 1:
        ((name, options),) = entry.items()
        if isinstance(options, dict) and isinstance(name, str):
            callbacks = _mappings(expand(name, folder, opened), opened)
            return [_with_options(callback, options) for callback in callbacks]
    return [entry]


def _read(file: Path, opened: tuple[Path, ...]) -> Any:
    """Return the content of a plug-in file; of a suite, its callbacks."""
    if file in opened:
        circle = " -> ".join(path.name for path in (*opened, file))
        raise InputError(f"a plug-in file lists itself: {circle}")
    content = load_file(file, "a plug-in")
    if not isinstance(content, list):
        return content
    opened = (*opened, file)
    return _joined(_mappings(expand(content, file.parent, opened), opened), file)


def _mappings(callbacks: list[Any], opened: tuple[Path, ...]) -> list[dict[str, Any]]:
    """Return callbacks as mappings: files are read, classes have no options."""
    found = []
    for callback in callbacks:
        if isinstance(callback, str):
            file = Path(callback)
            callback = _read(file, opened) if file.is_absolute() else {"class_path": callback}
        if not isinstance(callback, dict) or "class_path" not in callback:
            raise InputError(f"a plug-in must be a callback with class_path, got {callback!r:.60}")
        found.append(callback)
    return found


def _with_options(callback: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return callback | {"init_args": {**(callback.get("init_args") or {}), **options}}


def _joined(callbacks: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """Join callbacks that differ in their attacks alone, so that a suite is one evaluation."""
    joined: list[dict[str, Any]] = []
    for callback in callbacks:
        attacks = callback.get("init_args", {}).get("attacks") or {}
        same = (one for one in joined if _without_attacks(one) == _without_attacks(callback))
        if not attacks or (other := next(same, None)) is None:
            joined.append(_with_options(callback, {"attacks": dict(attacks)} if attacks else {}))
            continue
        for name, attack in attacks.items():
            if other["init_args"]["attacks"].setdefault(name, attack) != attack:
                raise InputError(f"{file}: two attacks are called {name!r}")
    return joined


def _without_attacks(callback: dict[str, Any]) -> dict[str, Any]:
    """Return a callback by the name of its class, whose module need not be written."""
    name = callback["class_path"].rpartition(".")[2]
    return _with_options(callback | {"class_path": name}, {"attacks": {}})
