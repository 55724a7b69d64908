"""Train adversarially robust classifiers and evaluate them with adaptive attacks."""

import ast
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

# isort: off
if TYPE_CHECKING:  # types for editors and checkers; at run time a name is imported on first use
    from lightning_rob.callbacks import *  # noqa: F403
    from lightning_rob.modules import *  # noqa: F403
    from lightning_rob.evaluation import *  # noqa: F403
    from lightning_rob.metrics import *  # noqa: F403
    from lightning_rob.attacks import *  # noqa: F403
    from lightning_rob.defenses import *  # type: ignore[assignment]  # noqa: F403
    from lightning_rob.cli.load import load as load
    from lightning_rob.cli.load import load_callbacks as load_callbacks
    from lightning_rob.cli.load import load_module as load_module
    from lightning_rob.threat import Threat as Threat
# isort: on

try:
    __version__ = version("lightning-rob")
except PackageNotFoundError:  # in a clone, as `torch.hub` takes it
    __version__ = "unknown"

# Where two folders have a name in common, the earlier one's is public: DANN is the defense.
_FOLDERS = ("defenses", "attacks", "metrics", "evaluation", "modules", "callbacks")

_LOADERS = ("load", "load_callbacks", "load_module")


@cache
def _homes() -> dict[str, str]:
    """Return the module of each public name: what a folder imports, read without importing it.

    The command line prints its help before torch is loaded.
    """
    homes = {"Threat": "threat", **dict.fromkeys(_LOADERS, "cli.load")}
    for folder in _FOLDERS:
        tree = ast.parse((Path(__file__).parent / folder / "__init__.py").read_text("utf-8"))
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                for name in node.names:
                    homes.setdefault(name.name, folder)
    return homes


def __dir__() -> list[str]:
    return sorted(["__version__", *_homes()])


def __getattr__(name: str) -> Any:
    """Import a public name on first use, and keep it."""
    if name == "__all__":
        return ["__version__", *_homes()]
    if name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"{__name__}.{_homes()[name]}"), name)
    return found
