"""Misspelt options, classes and recipes, refused with the nearest name before torch is imported.

The arguments of classes are read from source files, because importing a class imports torch.
"""

import ast
import os
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_rob.recipes.shipped import shipped_folder
from lightning_rob.recipes.trust import TRUSTED_PARTS, VARIABLE
from lightning_rob.runtime.errors import InputError, nearest

SUGGESTED = ("modules", "data", "attacks", "callbacks", "nets", "defenses", "transforms", "loggers")
PLACES = ("model", "data", "trainer.callbacks", "trainer.logger")  # of a class by its name
OF_TORCH = ("OptimizerCallable", "LRSchedulerCallable")  # types: `Adam` is not the attack's
PARTS = {"model": "modules", "data": "data", "trainer": ""}  # of a recipe, and their folders
BESIDE = ("class_path", "dict_kwargs")  # keys of an object beside its arguments


def refuse_unknown(args: Sequence[str], known: Iterable[str]) -> None:
    """Refuse the first option that does not exist; `known` are names up to the first dot."""
    options = {f"--{name}" for name in known}
    for arg in args:
        name = arg.partition("=")[0].rstrip("+")
        if arg.startswith("-") and name.partition(".")[0] not in {*options, "-c", "-h"}:
            hint = nearest(name.partition(".")[0], options, "; try --help")
            if name in ("--eps", "--norm"):
                hint = f": that of a plug-in is --trainer.callbacks.{name[2:]}, after the plug-in"
            raise InputError(f"there is no option {name}{hint}")


def check_recipe(parts: Iterable[dict[str, Any]], allowed: Sequence[str] = ()) -> None:
    """Refuse the first class or argument of a recipe that does not exist, and say the nearest one.

    Later parts override; where other packages are allowed, any class may be meant.
    """
    recipe: dict[str, Any] = {"trainer": "Trainer"}
    for part in parts:
        recipe = _merged(recipe, part)
    foreign = bool(allowed or os.environ.get(VARIABLE))
    for place, folder in PARTS.items():
        content = recipe.get(place)
        if isinstance(content, dict) and "class_path" not in content and not foreign:
            # The class is named by a checkpoint, which is read later.
            homes = {name: {f.parts[-2] for f in files} for name, files in _files().items()}
            names = (name for name, folders in homes.items() if folder in folders)
            known = {argument for name in names for argument in arguments_of(name) or ()}
            _check_keys(content, known, f"no {place} has an option", place)
        _check(content, place, "", foreign)


def _merged(old: Any, new: Any) -> Any:
    """Return a value of a recipe after a later file or option; `init_args` are a class's own."""
    if isinstance(old, list) and isinstance(new, dict) and old:
        return [*old[:-1], _merged(old[-1], new)]  # an option of the callback named last
    if not isinstance(new, dict):
        return new
    arguments = new.get("init_args")
    new = {k: v for k, v in new.items() if k != "init_args"}
    new |= arguments if isinstance(arguments, dict) else {}
    old = {"class_path": old} if isinstance(old, str) else old
    merged = dict(_merged(None, old)) if isinstance(old, dict) else {}
    if new.get("class_path", merged.get("class_path")) != merged.get("class_path"):
        merged = {}  # another class: the arguments of the old one do not fit
    for key, value in new.items():
        name = str(key).rstrip("+")
        before = merged.get(name)
        if name == key:
            merged[name] = _merged(before, value)
        else:
            listed = value if isinstance(value, list) else [value]
            merged[name] = [*(before if isinstance(before, list) else []), *listed]
    return merged


def _check(value: Any, place: str, annotation: str, foreign: bool) -> None:
    """Refuse the first class or argument in a part of a recipe that does not exist."""
    if isinstance(value, list):
        for part in value:
            _check(_merged(None, part), place, annotation, foreign)
    elif isinstance(value, str):
        # A text is the name of a class where the type is one.
        words = {*re.findall(r"\w+", annotation)}
        is_class = not {"str", "Literal"} & words and words & {"Callable", *_files()}
        if (place in PLACES or is_class) and value not in ("true", "false", "null"):
            _check_class(value, foreign)
    elif isinstance(value, dict):
        name = value.get("class_path")
        if name is None and annotation:
            # A dataclass, such as Threat, needs no class_path.
            plain = annotation.removesuffix(" | None")
            nodes = _definitions(plain)
            name = plain if nodes and _is_dataclass(nodes[0]) and not nodes[0].bases else None
        elif isinstance(name, str):
            _check_class(name, foreign)
        arguments: dict[str, str] | None = None
        if values := re.fullmatch(r"(?:dict|Mapping)\[str, (\w+)\].*", annotation):
            arguments = dict.fromkeys(value, values[1])
        elif annotation not in OF_TORCH and isinstance(name, str):
            arguments = arguments_of(name)
        if arguments is not None:
            short = str(name).rpartition(".")[2]
            _check_keys(value, arguments, f"{short} has no option", place)
        for key, part in value.items():
            if key not in BESIDE:
                _check(part, f"{place}.{key}", (arguments or {}).get(key, ""), foreign)


def _check_keys(value: dict[str, Any], known: Iterable[str], reason: str, place: str) -> None:
    for key in value:
        if key not in (*known, *BESIDE):
            hint = nearest(str(key), known, "; --help all lists them")
            raise InputError(f"--{place}.{key}: {reason} {key!r}{hint}")


def _check_class(name: str, foreign: bool) -> None:
    """Refuse a name that no trusted package defines."""
    is_file = "/" in name or name.endswith(".yaml")
    own = name.startswith("lightning_rob.")
    # Names of other packages need their module, unless something has imported it.
    if not is_file and not own and (foreign or not name.isidentifier() or "torch" in sys.modules):
        return
    short = name.rpartition(".")[2]
    if is_file or (short not in _files() and short not in _trusted_names()):
        raise InputError(unknown_class(name))


def unknown_class(name: str) -> str:
    """Return the error for a class or plug-in that does not exist."""
    if "/" in name or name.endswith(".yaml"):
        return f"there is no file {name}"
    known = [k for k, files in _files().items() if any(f.parts[-2] in SUGGESTED for f in files)]
    known += [path.stem for path in (shipped_folder() / "callbacks").glob("*.yaml")]
    hint = nearest(name.rpartition(".")[2], known, ": lightning-rob recipes lists plug-ins")
    return f"nothing here is called {name!r}{hint}"


def _folder(package: str) -> Path:
    """Return the folder of a package without importing it; an empty one if it is not there."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else Path(os.devnull)


@cache
def _trusted_names() -> set[str]:
    found = set()
    for package, parts in TRUSTED_PARTS.items():
        package, _, folder = package.partition(".")
        for part in parts if package != "lightning_rob" else [""]:
            place = _folder(package) / folder / part.replace(".", "/")
            for file in (*place.rglob("*.py"), *place.parent.glob(f"{place.name}.py")):
                found |= {*re.findall(r"^(?:class |def )?(\w+)", file.read_text("utf-8"), re.M)}
    return found


@cache
def _files() -> dict[str, list[Path]]:
    """Return the files that define each class of this package, and of a part of Lightning."""
    lightning = _folder("lightning") / "pytorch"
    found: dict[str, list[Path]] = {}
    paths = [lightning / "trainer/trainer.py", *_folder("lightning_rob").rglob("*.py")]
    for path in (*paths, *lightning.glob("callbacks/*.py"), *lightning.glob("loggers/*.py")):
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text("utf-8"), re.M):
            found.setdefault(name, []).append(path)
    return found


@cache
def _definitions(name: str) -> list[ast.ClassDef]:
    """Return the definitions of a class; several where a defense and its training share a name."""
    files = _files().get(name, ())
    nodes = (node for file in files for node in ast.parse(file.read_text("utf-8")).body)
    return [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == name]


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def arguments_of(path: str) -> dict[str, str] | None:
    """Return the type of each argument of a class, as source; None if that cannot be known."""
    nodes = _definitions(path.rpartition(".")[2])
    if ("." in path and not path.startswith(("lightning_rob.", "lightning."))) or not nodes:
        return None
    found: dict[str, str] = {}
    for node in nodes:
        init = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
        passes_on = True
        if init:
            given = init[0].args
            listed = [*given.posonlyargs, *given.args, *given.kwonlyargs][1:]
            found |= {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in listed}
            passes_on = given.kwarg is not None  # as **options, to the base class
        elif _is_dataclass(node):
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and "ClassVar" not in ast.unparse(part):
                    found[ast.unparse(part.target)] = ast.unparse(part.annotation)
        for base in node.bases if passes_on else ():
            name = ast.unparse(base).partition("[")[0]
            inherited = {} if name in ("ABC", "Protocol") else arguments_of(name)
            if inherited is None:
                return None
            found = inherited | found
    return found
