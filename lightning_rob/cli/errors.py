"""Errors of jsonargparse and torch, shortened to one line that says what would be right."""

import re
from pathlib import Path

from lightning_rob.cli.spelling import unknown_class, unknown_option
from lightning_rob.recipes.trust import explain
from lightning_rob.runtime.errors import InputError, is_of_shape

NOISE = re.compile(
    r"\s*(Does not validate against|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|"
    r"Not a valid subclass of|Subclass types expect|a class path \(str\)|a dict with|"
    r"Problem with given class_path|Importing).*"
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
    # An option that a callback lacks, or whose value is of another type, is tried as one of
    # `Callback`, which may not be imported.
    wrong = r"key \"[\w.]+\": \S(?s:.*)'lightning.Callback'"
    if not re.search(f"is not accepted|there is no option|{wrong}", message):
        if own := re.search(r"Importing '(lightning_rob\.\w+)' is not allowed", message):
            return unknown_class(own[1])
        if refused := explain(message):
            return refused
    kept = [NOISE.sub("", re.sub(r"^\s*(- )*", "", line)).strip() for line in message.splitlines()]
    text = " ".join(dict.fromkeys(line for line in kept if line)) or message
    for original, phrase in PHRASES.items():
        text = text.replace(original, phrase)
    text = re.sub(
        r"(?:Expected a dot import path string|Unexpected import path format): (\S+)",
        lambda found: unknown_class(found[1]),
        text,
    )
    text = re.sub(
        r"Option '([\w.]+)' is not accepted|unrecognized arguments: --([\w.]+)\S*",
        lambda found: unknown_option(found[1] or found[2]),
        text,
    ).strip()
    given = re.search(r"Given value: (?!NestedArg)(.+)", message)
    if given and "expected " in text and "Got value" not in text:
        text += f". Got value: {given[1]:.60}"
    absent = re.search(r"No module named '(\w+)'", text)
    here = absent and any(Path(absent[1] + ending).exists() for ending in (".py", "/__init__.py"))
    if here and "PYTHONPATH" not in text:
        text += ": it is in this folder, so set PYTHONPATH=."
    text = re.sub(r"Expected a typing.Literal\[(.*?)\]", r"expected one of \1", text)
    text = re.sub(r"the following arguments are required: (model|data)$", r"give --\1 CLASS", text)
    text = re.sub(r'Parser key "object(\.\w+)*": ', "", text)  # of `build`, not of a command
    missing = " must name a class: its name, or class_path and init_args"
    return text + (missing if text.endswith(":") else "")


def name_old_recipe(message: str, path: object, given: str = "") -> str:
    """Say of an option that nothing has, and that was not given, that a checkpoint has it."""
    from lightning_rob.commands.checkpoints import RECIPE  # imports torch

    option = re.search(r"there is no option ([\w.]+)", message)
    if not option or option[1] in given:
        return message
    return (
        f"the recipe in {path} is perhaps of another version: {message}; it is text under the key "
        f"{RECIPE!r} of the checkpoint"
    )


def shorten_state_dict_error(error: RuntimeError) -> Exception:
    """Shorten torch's error for weights or images of another shape, or a lost rank; else as is."""
    from lightning_rob.runtime.processes import as_fault  # imports torch

    message = str(error)
    if fault := as_fault(error):
        return fault
    if is_of_shape(error):
        return InputError(f"the network does not take images of this shape: {message}")
    if "Error(s) in loading state_dict" not in message:
        return error
    kinds = {"of another shape": re.findall(r"size mismatch for ([^:]+): ", message)}
    for kind in ("missing", "unexpected"):
        listed = re.search(rf"{kind.capitalize()} key\(s\) in state_dict: (.*)", message)
        kinds[kind] = re.findall(r'"([^"]+)"', listed[1]) if listed else []
    counts = [f"{len(keys)} weights {k} (e.g. {keys[0]})" for k, keys in kinds.items() if keys]
    return InputError(
        f"the checkpoint is of another architecture than the model: {', '.join(counts)}"
    )
