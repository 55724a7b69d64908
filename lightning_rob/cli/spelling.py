"""Misspelt classes and arguments, refused with the nearest name before torch is imported.

Names are read from source files, because importing a class imports torch. An argument that only
another class has, and names inside a recipe, are refused later, by jsonargparse.
"""

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lightning_rob.recipes.shipped import shipped_folder
from lightning_rob.runtime.errors import InputError, nearest

SOURCES = {  # packages, and their files that define what a recipe names
    "lightning_rob": ("*/**/*.py", "threat.py"),
    "lightning": ("pytorch/trainer/trainer.py", "pytorch/callbacks/*.py", "pytorch/loggers/*.py"),
}
PARTS = ("model", "data", "trainer")  # of a recipe
PLACES = ("model", "data", "trainer.callbacks", "trainer.logger")  # of a class by its name
FIRST = re.compile(r"(?:model|data|trainer(?:\.callbacks|\.logger)?)\.(\w+)")
LIST = "; try --help all"
BESIDE = ("class_path", "init_args", "dict_kwargs", "help")  # keys of an object


def check_option(option: str, value: str) -> None:
    """Refuse an argument of model, data or trainer that no class has, and a class unknown here."""
    place = option.rstrip("+").removesuffix(".class_path")
    first = FIRST.match(place)
    known = trainer_arguments() if re.fullmatch(r"trainer\.\w+", place) else arguments()
    if first and first[1] not in (*known, *BESIDE):
        raise InputError(f"there is no option {place}{nearest(first[1], known, LIST)}")
    if place in PLACES and value.isidentifier() and value not in ("true", "false", "null"):
        check_class(value)


def check_class(name: str) -> None:
    """Refuse the name of a class or plug-in of this package, or a short name, that is unknown."""
    own = name.startswith("lightning_rob.") or "." not in name
    if own and name.rpartition(".")[2] not in (*classes(), *plugins()):
        raise InputError(unknown_class(name))


def unknown_class(name: str) -> str:
    """Return the error for a class or plug-in that does not exist."""
    if "/" in name or name.endswith(".yaml"):
        short = Path(name).stem
        hint = f"; write {short} for the package's own" if short in plugins() else ""
        return f"there is no file {name}{hint}"
    known, short = {*classes(), *plugins()}, name.rpartition(".")[2]
    if short in known and name in (short, f"lightning_rob.{short}"):
        return f"{short} is of another kind than what is wanted here"
    for module in ("rules", "objectives"):
        source = (Path(__file__).parents[1] / f"{module}.py").read_text("utf-8")
        if re.search(rf"^def {re.escape(short)}\(", source, re.M):
            return f"{name!r} is written lightning_rob.{module}.{short}"
    hint = nearest(short, known, ": lightning-rob recipes lists plug-ins")
    return f"nothing here is called {name!r}{hint}"


def unknown_option(name: str) -> str:
    """Return the error for an argument that a class does not have."""
    wrong = next((part for part in name.split(".") if part not in (*arguments(), *PARTS)), name)
    others = arguments() - {wrong}  # another class may have it
    return f"there is no option {name}{nearest(wrong, others, LIST)}"


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
    """Return the names before a colon in the sources: all arguments and fields, and some words."""
    return {*re.findall(r"\b([a-z]\w*): [\w\"]", _text())}


@cache
def trainer_arguments() -> set[str]:
    """Return the arguments of `Trainer`, and words that its file writes like them."""
    spec = find_spec("lightning")
    file = Path(str(spec and spec.origin)).parent / SOURCES["lightning"][0]
    return {*re.findall(r"^        ([a-z]\w*): ", file.read_text("utf-8"), re.M)}


def plugins() -> set[str]:
    """Return the short names of the plug-ins that come with the package."""
    return {path.stem for path in (shipped_folder() / "callbacks").glob("*.yaml")}
