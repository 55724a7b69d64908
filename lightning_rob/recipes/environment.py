"""Callbacks for every Trainer, named by an environment variable."""

import os
from importlib import import_module
from typing import Any

VARIABLE = "LIGHTNING_ROB_CALLBACKS"


def callbacks() -> list[Any]:
    """Return the plug-ins that LIGHTNING_ROB_CALLBACKS names, such as "adaptive_pgd,arc"."""
    # Lightning asks whenever a `Trainer` is built: without the variable nothing is imported.
    names = [name.strip() for name in os.environ.get(VARIABLE, "").split(",")]
    if not any(names):
        return []
    load: Any = import_module("lightning_rob.cli.load")
    return load.load_callbacks([name for name in names if name])


def none_for_pytorch_lightning() -> list[Any]:
    """Return nothing to a `Trainer` of pytorch_lightning, which takes no callbacks of lightning."""
    if os.environ.get(VARIABLE, "").strip(" ,"):
        raise ImportError(
            f"{VARIABLE} is for trainers of the package lightning, this one is of "
            "pytorch_lightning: write `import lightning.pytorch as pl` in the script"
        )
    return []
