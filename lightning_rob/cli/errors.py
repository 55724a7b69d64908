"""Errors of jsonargparse and torch, shortened to one line that says what would be right."""

import re
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from lightning_rob.cli.trust import explain
from lightning_rob.errors import InputError
from lightning_rob.processes import as_fault
from lightning_rob.shipped import shipped_folder

NOISE = re.compile(
    r"\s*(Does not validate against|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|"
    r"Not a valid subclass of|Subclass types expect|a class path \(str\)|a dict with).*"
    r"|Expected a path but .* either not accessible or invalid"
)
PHRASES = {
    "Expected a <class 'int'>": "expected a whole number",
    "Expected a <class 'float'>": "expected a number",
    "Expected a <class 'bool'>": "expected true or false",
    "Expected a <class 'dict'>": "expected keys with values",
    "unhashable type: 'list'": "",
}


def shorten_jsonargparse_error(message: str) -> str:
    """Reduce jsonargparse's tree of reasons to the innermost ones, without tried types."""
    if refused := explain(message):
        return refused
    kept = [NOISE.sub("", re.sub(r"^\s*(- )*", "", line)).strip() for line in message.splitlines()]
    text = " ".join(dict.fromkeys(line for line in kept if line)) or message
    for original, phrase in PHRASES.items():
        text = text.replace(original, phrase)
    text = re.sub(
        r"(?:Expected a dot import path string|Unexpected import path format): (\S+)",
        _unknown_name,
        text,
    )
    text = re.sub(r"Parser key \"config\": File does not exist: '(.+)'", _unknown_recipe, text)
    missing = " must name a class: its name, or class_path and init_args"
    return text.strip() + (missing if text.strip().endswith(":") else "")


def _unknown_name(found: re.Match[str]) -> str:
    """Suggest the nearest names for one that cannot be imported."""
    if "/" in found[1] or found[1].endswith(".yaml"):
        return f"there is no file {found[1]}"
    folders = ("modules", "data", "attacks", "callbacks", "nets", "defenses")
    known = [name for f in folders for name in import_module(f"lightning_rob.{f}").__all__]
    known += [path.stem for path in (shipped_folder() / "callbacks").glob("*.yaml")]
    close = ", ".join(dict.fromkeys(get_close_matches(found[1], known)))
    hint = f", did you mean {close}?" if close else ": lightning-rob recipes lists plug-ins"
    return f"nothing here is called {found[1]!r}{hint}"


def _unknown_recipe(found: re.Match[str]) -> str:
    """Suggest the nearest recipes for a file that does not exist."""
    known = [path.stem for path in (shipped_folder() / "configs").rglob("*.yaml")]
    close = ", ".join(get_close_matches(Path(found[1]).stem, known))
    hint = f", did you mean {close}?" if close else ": lightning-rob recipes lists those by name"
    return f"there is no recipe {found[1]}{hint}"


def shorten_state_dict_error(error: RuntimeError) -> Exception:
    """Shorten torch's error for weights of another architecture, or for a lost rank.

    Any other error is returned unchanged.
    """
    message = str(error)
    if fault := as_fault(error):
        return fault
    if "Error(s) in loading state_dict" not in message:
        return error
    kinds = {
        "missing": _keys(message, "Missing"),
        "unexpected": _keys(message, "Unexpected"),
        "of another shape": re.findall(r"size mismatch for ([^:]+): ", message),
    }
    counts = [f"{len(keys)} weights {k} (e.g. {keys[0]})" for k, keys in kinds.items() if keys]
    return InputError(
        "the checkpoint is of another architecture than the model: " + ", ".join(counts)
    )


def _keys(message: str, kind: str) -> list[str]:
    match = re.search(rf"{kind} key\(s\) in state_dict: (.*)", message)
    return re.findall(r'"([^"]+)"', match.group(1)) if match else []
