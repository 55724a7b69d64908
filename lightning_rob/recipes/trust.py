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
from lightning_rob.runtime.errors import InputError

OPTION, VARIABLE = "--allow-import", "LIGHTNING_ROB_ALLOW_IMPORT"
# Classes and functions that compute. Excluded is code that loads, downloads, starts or writes as
# its arguments say: torch.load, torch.hub, torch.utils.cpp_extension, torch.fx,
# torchvision.datasets, timm.create_model (ZooNet builds timm's networks), torchmetrics.text …
TRUSTED_PARTS = {
    "lightning_rob": (
        *("threat", "rules", "objectives", "nets", "transforms", "defenses", "attacks"),
        *("metrics", "modules", "callbacks", "data", "evaluation.protocol"),
        *(n for n in dir(lightning_rob) if n.isidentifier() and not n.startswith("load")),
    ),
    "torch": ("nn", "optim"),
    "torchvision": ("transforms", "models"),
    "lightning.pytorch": (
        *("accelerators", "callbacks", "loggers", "plugins", "profilers", "strategies"),
        "cli.ReduceLROnPlateau",
    ),
    "lightning.fabric": ("plugins",),
    "torchmetrics": ("classification",),
    "timm": ("optim",),
    "kornia": ("augmentation", "color", "enhance", "filters", "geometry", "morphology"),
}
TRUSTED = [f"{package}.{part}" for package, parts in TRUSTED_PARTS.items() for part in parts]
OWNERS = {name.split(".")[0] for name in TRUSTED}
_granted: set[str] = set()


@contextmanager
def allow_imports(prefixes: Sequence[str]) -> Iterator[None]:
    """Allow prefixes of module names in this process and in those it starts."""
    # In the environment, which the ranks of a run and the parts of a command inherit.
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ",".join([before or "", *(p or "nothing at all" for p in prefixes)])
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def allowed() -> set[str]:
    """Return the prefixes that the user has allowed."""
    names = {name.strip() for name in os.environ.get(VARIABLE, "").split(",")} - {""}
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise InputError(f"{OPTION} takes names such as mypackage.nets, got {name!r}")
        if name.split(".")[0] == "jsonargparse":
            raise InputError(f"{OPTION} {name} would let a recipe change what is allowed")
    return names


def install() -> None:
    """Let jsonargparse import only trusted and allowed names from now on."""
    granted = allowed()
    jsonargparse.set_parsing_settings(
        # Names that an earlier block allowed are denied again after it.
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
    if name in ("lightning.LightningModule", "lightning.LightningDataModule"):
        return f"a {name.rpartition('.')[2]} needs its class: class_path is missing"
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
        f"trusts runs only with {OPTION} {prefix}, if you trust it, or in a script of yours with "
        f"{VARIABLE}={prefix}"
    )
