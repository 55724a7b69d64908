"""Why a command cannot be run, in words of one line."""

import re
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import TypeVar

from lightning_rob.processes import lost
from lightning_rob.trust import refusal

Arguments = TypeVar("Arguments")
Wish = TypeVar("Wish")


class InputError(Exception):
    """What the user gave cannot be run; the message says what would be right."""


def asked(parse: Callable[[Arguments], Wish], args: Arguments) -> Wish:
    """What a command line asks for, by a parser that needs nothing heavy.

    Raises:
        InputError: it asks for something else.
    """
    try:
        return parse(args)
    except ValueError as error:
        raise InputError(str(error)) from error


NOISE = re.compile(
    r"\s*(Does not validate against|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|"
    r"Not a valid subclass of|Subclass types expect|a class path \(str\)|a dict with).*"
    r"|Expected a path but .* either not accessible or invalid"
)
WORDS = {
    "Expected a <class 'int'>": "expected a whole number",
    "Expected a <class 'float'>": "expected a number",
    "Expected a <class 'bool'>": "expected true or false",
    "Expected a <class 'dict'>": "expected keys with values",
    "unhashable type: 'list'": "",
}


def innermost(message: str) -> str:
    """Jsonargparse's tree of reasons without the types that were tried and the values given."""
    if refused := refusal(message):
        return refused
    kept = [NOISE.sub("", re.sub(r"^\s*(- )*", "", line)).strip() for line in message.splitlines()]
    text = " ".join(dict.fromkeys(line for line in kept if line)) or message
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    text = re.sub(
        r"(?:Expected a dot import path string|Unexpected import path format): (\S+)",
        _unknown,
        text,
    )
    missing = " must name a class: its name, or class_path and init_args"
    return text.strip() + (missing if text.strip().endswith(":") else "")


def _unknown(found: re.Match[str]) -> str:
    """What to say of a name that stands for nothing."""
    if "/" in found[1] or found[1].endswith(".yaml"):
        return f"there is no file {found[1]}"
    parts = ("modules", "data", "attacks", "callbacks", "nets", "defenses")
    known = [n for part in parts for n in import_module(f"lightning_rob.{part}").__all__]
    close = ", ".join(dict.fromkeys(get_close_matches(found[1], known)))
    hint = f", did you mean {close}?" if close else ": write package.module.Class for others"
    return f"nothing here is called {found[1]!r}{hint}"


def readable(error: RuntimeError) -> Exception:
    """A checkpoint of another architecture in one line; any other error as it is."""
    message = str(error)
    if fault := lost(error):
        return fault
    if "Error(s) in loading state_dict" not in message:
        return error
    shapes = re.findall(r"size mismatch for ([^:]+): ", message)
    kinds = {
        "missing": _keys(message, "Missing"),
        "unexpected": _keys(message, "Unexpected"),
        "of another shape": shapes,
    }
    told = [
        f"{len(names)} weights {kind} (e.g. {names[0]})" for kind, names in kinds.items() if names
    ]
    return InputError(
        "the checkpoint is of another architecture than the model: " + ", ".join(told)
    )


def _keys(message: str, kind: str) -> list[str]:
    match = re.search(rf"{kind} key\(s\) in state_dict: (.*)", message)
    return re.findall(r'"([^"]+)"', match.group(1)) if match else []
