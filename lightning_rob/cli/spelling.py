"""Misspelt classes and arguments, refused with the nearest name before torch is imported.

Names are read from source files, because importing a class imports torch. An argument that only
another class has is refused later, by jsonargparse.
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_rob.recipes.shipped import shipped_folder
from lightning_rob.runtime.errors import InputError, nearest

SOURCES = {  # packages, and their files that define what a recipe names
    "lightning_rob": ("*/**/*.py", "threat.py"),
    "lightning": ("pytorch/trainer/trainer.py", "pytorch/callbacks/*.py", "pytorch/loggers/*.py"),
}
PARTS = ("model", "data", "trainer")  # of a recipe
PLACES = ("model", "data", "trainer.callbacks", "trainer.logger")  # of a class by its name
FIRST = re.compile(r"(?:model|data|trainer(?:\.callbacks|\.logger)?)\.(\w+)")
BESIDE = ("class_path", "init_args", "dict_kwargs", "help")  # keys of an object


def check_option(option: str, value: str) -> None:
    """Refuse an argument of model, data or trainer that no class has, and a class unknown here."""
    place = option.rstrip("+").removesuffix(".class_path")
    first = FIRST.match(place)
    if first and first[1] not in (*arguments(), *BESIDE):
        raise InputError(unknown_option(place))
    if place in PLACES and value.isidentifier() and value not in ("true", "false", "null"):
        check_content(value, place)


def check_content(content: Any, place: str = "") -> None:
    """Refuse the same in a part of a recipe."""
    if isinstance(content, str):
        is_own = content.startswith("lightning_rob.") or ("." not in content and place in PLACES)
        known = {*classes(), *plugins()} if place in PLACES else classes()
        name = content.rpartition(".")[2]
        if is_own and (name[:1].isupper() or place in PLACES) and name not in known:
            raise InputError(unknown_class(content))
    elif isinstance(content, list):
        for part in content:
            check_content(part, place)
    elif isinstance(content, dict):
        name = str(content.get("class_path", "")).rpartition(".")[2]
        # Adam is an optimizer of torch there, and of attacks elsewhere.
        of_torch = place.rpartition(".")[2] in ("optimizer", "lr_scheduler")
        if (name in classes() and not of_torch) or (place in PARTS and not name):
            inner = content.get("init_args")
            for key in (*content, *(inner if isinstance(inner, dict) else ())):
                if str(key).rstrip("+") not in (*arguments(), *BESIDE):
                    raise InputError(unknown_option(f"{place}.{key}".removeprefix(".")))
        for key, value in content.items():
            inside = f"{place}.{str(key).rstrip('+')}".removeprefix(".")
            check_content(value, place if key in BESIDE else inside)


def unknown_class(name: str) -> str:
    """Return the error for a class or plug-in that does not exist."""
    if "/" in name or name.endswith(".yaml"):
        return f"there is no file {name}"
    known, short = {*classes(), *plugins()}, name.rpartition(".")[2]
    if short in known and name in (short, f"lightning_rob.{short}"):
        return f"{short} is of another kind than what is wanted here"
    hint = nearest(short, known, ": lightning-rob recipes lists plug-ins")
    return f"nothing here is called {name!r}{hint}"


def unknown_option(name: str) -> str:
    """Return the error for an argument that a class does not have."""
    wrong = next((part for part in name.split(".") if part not in (*arguments(), *PARTS)), name)
    others = arguments() - {wrong}  # another class may have it
    return f"there is no option {name}{nearest(wrong, others, '; try --help all')}"


@cache
def _text() -> str:
    text = ""
    for package, patterns in SOURCES.items():
        spec = find_spec(package)
        for pattern in patterns:
            files = sorted(Path(spec.origin).parent.glob(pattern)) if spec and spec.origin else []
            text += "\n".join(file.read_text("utf-8") for file in files)
    return text


@cache
def classes() -> set[str]:
    """Return the names of classes."""
    return {*re.findall(r"^class ([A-Za-z]\w*)", _text(), re.M)}


@cache
def arguments() -> set[str]:
    """Return the names of annotated arguments and fields, of any class."""
    return {*re.findall(r"\b([a-z]\w*): [\w\"]", _text())}


def plugins() -> set[str]:
    """Return the short names of the plug-ins that come with the package."""
    return {path.stem for path in (shipped_folder() / "callbacks").glob("*.yaml")}
