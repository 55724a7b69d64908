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

from lightning_rob.cli.configs import NAMED, check_configs, config_file, is_inline, read_config
from lightning_rob.recipes.plugins import expand_recipe, resolve_names
from lightning_rob.recipes.safe_yaml import load, load_file
from lightning_rob.recipes.shipped import shipped_folder
from lightning_rob.recipes.trust import OPTION, TRUSTED_PARTS, VARIABLE
from lightning_rob.runtime.errors import InputError, nearest

SUGGESTED = ("modules", "data", "attacks", "callbacks", "nets", "defenses", "transforms", "loggers")
PLACES = ("model", "data", "trainer.callbacks", "trainer.logger")  # of a class by its name
OF_TORCH = ("OptimizerCallable", "LRSchedulerCallable")  # types: `Adam` is not the attack's
CLASSES = {"model": "modules", "data": "data", "trainer": ""}  # folder of each part of a recipe


def refuse_unknown(args: Sequence[str], known: Iterable[str]) -> None:
    """Refuse the first option of a command line that does not exist.

    Args:
        args: a command line with joined values.
        known: names of the options, without hyphens and up to the first dot.

    Raises:
        InputError: there is no option of this name; says the nearest one.
    """
    options = {f"--{name}" for name in known}
    for arg in args:
        name = arg.partition("=")[0].rstrip("+")
        if arg.startswith("-") and name.partition(".")[0] not in {*options, "-c", "-h"}:
            hint = nearest(name.partition(".")[0], options, "; try --help")
            raise InputError(f"there is no option {name}{hint}")


def refuse_misspelt(args: Sequence[str], known: Iterable[str]) -> None:
    """Refuse the first option, class, plug-in or recipe of a command line that does not exist.

    Args:
        args: a command line with joined values, without the command.
        known: names of the options beside those of model, data and trainer.

    Raises:
        InputError: there is nothing of this name; says the nearest one.
    """
    known = {*known, *CLASSES}
    refuse_unknown(args, known)
    args = resolve_names(args)
    check_configs(args)
    recipe: dict[str, Any] = {"trainer": "Trainer"}
    for arg in args:
        _check_file(*arg.partition("=")[::2])
        recipe = _merged(recipe, _content(arg, known))
    foreign = bool(os.environ.get(VARIABLE)) or any(arg.startswith(OPTION) for arg in args)
    for part, folder in CLASSES.items():
        content = recipe.get(part)
        if isinstance(content, dict) and "class_path" not in content and not foreign:
            _check_keys(content, _of_folder(folder), f"no {part} has an option", part)
        _check(content, part, "", foreign)


def _check_file(option: str, path: str) -> None:
    """Refuse a checkpoint that does not exist."""
    if option == "--ckpt_path" and path not in (*NAMED, "null", "") and not Path(path).exists():
        folder = Path(path).parent
        known = [str(file) for file in folder.iterdir()] if folder.is_dir() else []
        raise InputError(f"there is no checkpoint {path}{nearest(path, known)}")


def _content(arg: str, known: set[str]) -> dict[str, Any]:
    """Return what an argument adds to the recipe; {} for an option of the command itself."""
    option, equals, value = arg.partition("=")
    content: Any
    if path := config_file(arg):
        content = load(path) if is_inline(path) else read_config(path)
        for key in content if isinstance(content, dict) else ():
            if key not in known:
                hint = nearest(str(key), known)
                raise InputError(f"{path:.200}: there is no key {key!r}{hint}")
        if not is_inline(path):
            folder = Path(path).resolve().parent
            content = load(expand_recipe(Path(path).read_text("utf-8"), folder))
        return content if isinstance(content, dict) else {}
    keys = [key for key in option.removeprefix("--").split(".") if key != "init_args"]
    if keys[0].rstrip("+") not in CLASSES or not equals:
        return {}
    content = load(value) if re.search(r"[\n{[]|: ", value) else value
    for key in reversed(keys[:-1] if keys[-1] == "help" else keys):
        content = {key: content}
    return dict(content)


def _merged(old: Any, new: Any) -> Any:
    """Return a value of a recipe after a later file or option; `init_args` are a class's own."""
    if isinstance(old, list) and isinstance(new, dict) and old:
        return [*old[:-1], _merged(old[-1], new)]  # an option of the callback named last
    if not isinstance(new, dict):
        return new
    arguments = new.get("init_args")
    new = {k: v for k, v in new.items() if k != "init_args"}
    new |= arguments if isinstance(arguments, dict) else {}
    if isinstance(old, str):  # the file of a plug-in, or a class
        old = load_file(Path(old), "a plug-in") if Path(old).is_file() else {"class_path": old}
    old = _merged(None, old) if isinstance(old, dict) else {}
    if new.get("class_path", old.get("class_path")) != old.get("class_path"):
        old = {}
    merged = dict(old)
    for key, value in new.items():
        name = str(key).rstrip("+")
        before = merged.get(name)
        if name != key:
            listed = value if isinstance(value, list) else [value]
            merged[name] = [*(before if isinstance(before, list) else []), *listed]
        else:
            merged[name] = _merged(before, value)
    return merged


def _check(value: Any, place: str, annotation: str, foreign: bool) -> None:
    """Refuse the first class or argument in a part of a recipe that does not exist.

    Args:
        value: the part, merged.
        place: its option without hyphens.
        annotation: source of the type that it must have; "" if unknown.
        foreign: whether classes of other packages may be meant.
    """
    if isinstance(value, list):
        for part in value:
            _check(_merged(None, part), place, annotation, foreign)
    elif isinstance(value, str):
        if place == "trainer.callbacks" and Path(value).is_file():
            _check(_merged(None, load_file(Path(value), "a plug-in")), place, "", foreign)
        elif place in PLACES or _wants_class(annotation):
            if value not in ("true", "false", "null"):
                _check_class(value, foreign)
        elif (choices := _choices(annotation)) and value not in choices:
            wanted = ", ".join(choices)
            raise InputError(f"--{place} must be one of {wanted}, got {value!r}")
    elif isinstance(value, dict):
        name = value.get("class_path")
        if isinstance(name, str):
            _check_class(name, foreign)
        if values := re.fullmatch(r"(?:dict|Mapping)\[str, (\w+)\].*", annotation):
            arguments: dict[str, str] | None = dict.fromkeys(value, values[1])
        elif annotation in OF_TORCH:
            arguments = None
        else:
            arguments = arguments_of(name if isinstance(name, str) else _plain(annotation))
        if arguments is not None:
            short = str(name or _plain(annotation)).rpartition(".")[2]
            _check_keys(value, arguments, f"{short} has no option", place)
        for key, part in value.items():
            if key not in ("class_path", "dict_kwargs"):
                _check(part, f"{place}.{key}", (arguments or {}).get(key, ""), foreign)


def _check_keys(value: dict[str, Any], known: Iterable[str], reason: str, place: str) -> None:
    for key in value:
        if key not in (*known, "class_path", "dict_kwargs"):
            hint = nearest(str(key), known, "; --help all lists them")
            raise InputError(f"--{place}.{key}: {reason} {key!r}{hint}")


def _check_class(name: str, foreign: bool) -> None:
    """Refuse a name that no trusted package defines."""
    own = name.startswith("lightning_rob.")
    is_path = "/" in name or name.endswith(".yaml")
    # Names of other packages need their module, unless something has imported it.
    if not is_path and not own and (foreign or not name.isidentifier() or "torch" in sys.modules):
        return
    short = name.rpartition(".")[2]
    if is_path or (short not in _files() and short not in _trusted_names()):
        raise InputError(unknown_class(name))


def unknown_class(name: str) -> str:
    """Return the error for a class or plug-in that does not exist."""
    if "/" in name or name.endswith(".yaml"):
        return f"there is no file {name}"
    known = [k for k, files in _files().items() if any(f.parts[-2] in SUGGESTED for f in files)]
    known += [path.stem for path in (shipped_folder() / "callbacks").glob("*.yaml")]
    hint = nearest(name.rpartition(".")[2], known, ": lightning-rob recipes lists plug-ins")
    return f"nothing here is called {name!r}{hint}"


def _choices(annotation: str) -> tuple[str, ...]:
    """Return the texts that a type allows; none if it allows others too."""
    listed = re.fullmatch(r"Literal\[([^]]*)\](?: \| None)?", annotation)
    return tuple(map(str, ast.literal_eval(f"({listed[1]},)"))) if listed else ()


def _wants_class(annotation: str) -> bool:
    """Return whether a text for an argument of this type is the name of a class."""
    words = re.findall(r"\w+", annotation)
    return not {"str", "Literal"} & {*words} and any(
        word == "Callable" or word in _files() for word in words
    )


def _folder(package: str) -> Path:
    """Return the folder of a package without importing it; an empty one if it is not there."""
    spec = find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else Path(os.devnull)


@cache
def _trusted_names() -> set[str]:
    """Return all names that a trusted package defines."""
    found = {path.stem for path in (shipped_folder() / "callbacks").glob("*.yaml")}
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


def arguments_of(path: str | None) -> dict[str, str] | None:
    """Return the type of each argument of a class, as source; None if that cannot be known.

    Args:
        path: import path of the class, or its name.
    """
    if not path or ("." in path and not path.startswith(("lightning_rob.", "lightning."))):
        return None
    arguments = [_arguments(node) for node in _definitions(path.rpartition(".")[2])]
    if not arguments or None in arguments:
        return None
    return {name: kind for own in arguments for name, kind in (own or {}).items()}


def _arguments(node: ast.ClassDef) -> dict[str, str] | None:
    """Return the arguments of a definition, those that it passes on to its bases included."""
    found, passes_on = {}, True
    init = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    if init:
        given = init[0].args
        listed = [*given.posonlyargs, *given.args, *given.kwonlyargs][1:]
        found = {a.arg: ast.unparse(a.annotation) if a.annotation else "" for a in listed}
        passes_on = given.kwarg is not None
    elif _is_dataclass(node):
        fields = [part for part in node.body if isinstance(part, ast.AnnAssign)]
        pairs = ((ast.unparse(field.target), ast.unparse(field.annotation)) for field in fields)
        found = {name: kind for name, kind in pairs if not kind.startswith("ClassVar")}
    for base in node.bases if passes_on else ():
        name = ast.unparse(base).partition("[")[0]
        inherited = {} if name in ("ABC", "Protocol") else arguments_of(name)
        if inherited is None:
            return None
        found = inherited | found
    return found


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)


def _plain(annotation: str) -> str | None:
    """Return the dataclass that a type is, which needs no `class_path`; None for other types."""
    name = annotation.removesuffix(" | None")
    nodes = _definitions(name)
    return name if nodes and _is_dataclass(nodes[0]) and not nodes[0].bases else None


def _of_folder(folder: str) -> set[str]:
    """Return the arguments of all classes of a folder of this package."""
    names = [name for name, files in _files().items() if any(f.parts[-2] == folder for f in files)]
    return {argument for name in names for argument in arguments_of(name) or ()}
