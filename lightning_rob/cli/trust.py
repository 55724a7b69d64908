"""Import policy: a recipe may name code of `TRUSTED` packages and of those that the user allows.

jsonargparse asks the policy before it imports any name in a recipe, a checkpoint or on the command
line, and again for the module in which the imported object was defined.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jsonargparse

import lightning_rob

OPTION, VARIABLE = "--allow-import", "LIGHTNING_ROB_ALLOW_IMPORT"
# Classes and functions that compute. Excluded is code that loads, downloads, starts or writes as
# its arguments say: torch.load, torch.hub, torch.utils.cpp_extension, torch.fx,
# torchvision.datasets, timm.create_model (ZooNet builds timm's networks), torchmetrics.text …
TRUSTED = (
    *(
        f"lightning_rob.{name}"
        for name in (
            *("threat", "rules", "objectives", "nets", "transforms", "defenses", "attacks"),
            *("metrics", "modules", "callbacks", "data", "evaluation.protocol"),
            *(name for name in lightning_rob.__all__ if name.isidentifier()),
        )
    ),
    *("torch.nn", "torch.optim", "torchvision.transforms", "torchvision.models"),
    *(
        f"lightning.pytorch.{name}"
        for name in ("accelerators", "callbacks", "loggers", "plugins", "profilers", "strategies")
    ),
    *("lightning.fabric.plugins", "torchmetrics.classification", "timm.optim"),
    *(
        f"kornia.{name}"
        for name in ("augmentation", "color", "enhance", "filters", "geometry", "morphology")
    ),
)
OWNERS = {name.split(".")[0] for name in TRUSTED}
_granted: set[str] = set()


@contextmanager
def allow_imports(args: Sequence[str]) -> Iterator[list[str]]:
    """Allow the prefixes of `--allow-import` in this process and in those it starts.

    Args:
        args: a command line.

    Yields:
        The command line without `--allow-import`.
    """
    rest, prefixes = _split(args)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join([before or "", *prefixes])
    try:
        yield rest
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate the other arguments from the values of `--allow-import`."""
    rest: list[str] = []
    prefixes: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name == OPTION:
            prefixes.append((value if equals else next(words, "")) or "nothing at all")
        else:
            rest.append(word)
    return rest, prefixes


def allowed() -> set[str]:
    """Prefixes that the user has allowed.

    Raises:
        ValueError: one of them is not a prefix of module names.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    for name in filter(None, names):
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{OPTION} takes names such as mypackage.nets, got {name!r}")
        if name.split(".")[0] == "jsonargparse":
            raise ValueError(f"{OPTION} {name} would let a recipe change what is allowed")
    return {*filter(None, names)}


def install() -> None:
    """Let jsonargparse import only trusted and allowed names from now on.

    Raises:
        ValueError: an allowed prefix is not a prefix of module names.
    """
    granted = allowed()
    jsonargparse.set_parsing_settings(
        import_path_denylist=["*", *(_granted - granted)],
        import_path_allowlist=[*TRUSTED, *granted],
        instantiate_subclass_spec_in_any=False,
    )
    _granted.update(granted)


def explain(message: str) -> str | None:
    """Rephrase jsonargparse's refusal of an untrusted name; None for any other message."""
    match = re.search(r"Importing '([\w.]+)' is not allowed", message)
    if match is None:
        return None
    name = match[1]
    if name == "lightning.Callback":  # the type of `trainer.callbacks`, where no class fits
        return (
            "an option --trainer.callbacks.NAME is of the callback named last before it: none was "
            "named, or it has no option of this name"
        )
    package, parent = name.split(".")[0], name.rpartition(".")[0]
    inside = parent if "." in parent else name
    prefix = inside if package in OWNERS else package
    return (
        f"{name} was not imported: code that is neither of lightning-rob nor of the packages it "
        f"trusts runs only with {OPTION} {prefix}, if you trust it"
    )
