"""Callbacks for every Trainer, named by an environment variable."""

import os
from importlib import import_module
from typing import Any

VARIABLE = "LIGHTNING_ROB_CALLBACKS"


def callbacks() -> list[Any]:
    """Return the plug-ins that LIGHTNING_ROB_CALLBACKS names, such as "adaptive_pgd,arc".

    Lightning asks for them whenever a `Trainer` is built. Without the variable nothing is imported.

    Raises:
        InputError: there is no such plug-in.
    """
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    if not any(names):
        return []
    load: Any = import_module("lightning_rob.cli.load")
    found: list[Any] = load.load_callbacks([name for name in names if name])
    return found
