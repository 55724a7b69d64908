"""Whose code a recipe may name: that of `TRUSTED`, and what `--allow-import` adds.

jsonargparse asks before it imports anything that a recipe, a checkpoint or the command line names,
and again where the thing it got was defined.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jsonargparse

import lightning_rob

OPTION, VARIABLE = "--allow-import", "LIGHTNING_ROB_ALLOW_IMPORT"
# Classes and functions that compute. Left out is what loads, downloads, starts or writes as told
# by arguments: torch.load, torch.hub, torch.utils.cpp_extension, torch.fx, torchvision.datasets,
# timm.create_model (ZooNet builds timm's networks), torchmetrics.text …
TRUSTED = (
    *(
        f"lightning_rob.{name}"
        for name in (
            *("threat", "rules", "objectives", "nets", "transforms", "defenses", "attacks"),
            *("metrics", "modules", "callbacks", "data", "evaluation.protocol"),
            *(noun for noun in lightning_rob.__all__ if noun.isidentifier()),
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
def allowing(args: Sequence[str]) -> Iterator[list[str]]:
    """Arguments without `--allow-import`, whose prefixes hold here and in processes started here.

    Args:
        args: a command line.
    """
    rest, given = _split(args)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join([before or "", *given])
    try:
        yield rest
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def _split(args: Sequence[str]) -> tuple[list[str], list[str]]:
    rest: list[str] = []
    given: list[str] = []
    words = iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name == OPTION:
            given.append((value if equals else next(words, "")) or "nothing at all")
        else:
            rest.append(word)
    return rest, given


def allowed() -> set[str]:
    """The prefixes that the user has added.

    Raises:
        ValueError: one of them is no prefix of names.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    for name in filter(None, names):
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f"{OPTION} takes names such as mypackage.nets, got {name!r}")
        if name.split(".")[0] == "jsonargparse":
            raise ValueError(f"{OPTION} {name} would let a recipe change what is allowed")
    return {*filter(None, names)}


def restrict() -> None:
    """From here on import only what is trusted or allowed, whoever names it.

    Raises:
        ValueError: something was allowed that is no prefix of names.
    """
    granted = allowed()
    jsonargparse.set_parsing_settings(
        import_path_denylist=["*", *(_granted - granted)],
        import_path_allowlist=[*TRUSTED, *granted],
        instantiate_subclass_spec_in_any=False,
    )
    _granted.update(granted)


def refusal(message: str) -> str | None:
    """What jsonargparse says of a name that is not trusted, in words; None if it says no such."""
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
