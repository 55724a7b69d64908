"""Plug-ins by short name, and suites: plug-in files that list other plug-ins."""

from pathlib import Path
from typing import Any

from lightning_rob.recipes.safe_yaml import load_file
from lightning_rob.recipes.shipped import find
from lightning_rob.runtime.errors import InputError


def expand_recipe(recipe: Any, folder: Path) -> Any:
    """Return a recipe with the plug-ins under `callbacks+:` replaced by their callbacks."""
    trainer = recipe.get("trainer") if isinstance(recipe, dict) else None
    if not isinstance(trainer, dict) or not (entries := trainer.get("callbacks+")):
        return recipe
    return recipe | {"trainer": trainer | {"callbacks+": expand(entries, folder)}}


def expand(entry: Any, folder: Path, opened: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """Return the callbacks, mappings with class_path, that an entry of `callbacks+:` stands for.

    An entry is a path or short name of a plug-in file, {name: options} to change options of its
    callbacks, the name of a class, a callback itself, or a list of such entries. Paths are relative
    to the folder; `opened` are the files that list the entry, outermost first.
    """
    if isinstance(entry, list):
        return [callback for part in entry for callback in expand(part, folder, opened)]
    if isinstance(entry, dict) and "class_path" in entry:
        return [entry]
    named = isinstance(entry, dict) and len(entry) == 1
    name, options = next(iter(entry.items())) if named else (entry, {})
    if not (isinstance(name, str) and isinstance(options, dict)):
        raise InputError(f"a plug-in must be a callback with class_path, got {entry!r:.60}")
    callbacks: list[dict[str, Any]] = [{"class_path": name}]
    if file := find(name, "callbacks", folder=folder):
        file = file.resolve()
        if file in opened:
            circle = " -> ".join(path.name for path in (*opened, file))
            raise InputError(f"a plug-in file lists itself: {circle}")
        content = load_file(file, "a plug-in")
        callbacks = expand(content, file.parent, (*opened, file))
        if isinstance(content, list):
            callbacks = _joined(callbacks, file)
    elif opened and ("/" in name or name.endswith(".yaml")):
        raise InputError(f"{opened[-1]}: there is no file {name}")
    return [_with_options(one, options) for one in callbacks] if options else callbacks


def _with_options(callback: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return callback | {"init_args": {**(callback.get("init_args") or {}), **options}}


def _joined(callbacks: list[dict[str, Any]], file: Path) -> list[dict[str, Any]]:
    """Join callbacks that differ in their attacks alone, so that a suite is one evaluation."""
    # A later option, `--trainer.callbacks.eps`, then reaches all attacks of the suite.
    joined: list[tuple[dict[str, Any], dict[str, Any]]] = []  # without attacks; attacks by name
    found: list[dict[str, Any]] = []
    for callback in callbacks:
        attacks = (callback.get("init_args") or {}).get("attacks") or {}
        # The module of a class need not be written.
        name = str(callback["class_path"]).rpartition(".")[2]
        rest = _with_options(callback | {"class_path": name}, {"attacks": {}})
        same = next((known for other, known in joined if other == rest), None)
        if attacks and same is not None:
            for label, attack in attacks.items():
                if same.setdefault(label, attack) != attack:
                    raise InputError(f"{file}: two attacks are called {label!r}")
            continue
        own = dict(attacks)
        found.append(_with_options(callback, {"attacks": own} if attacks else {}))
        if attacks:
            joined.append((rest, own))
    return found
