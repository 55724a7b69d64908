"""Options of the commands: a frozen dataclass each, from which parser and `--help` are generated.

The module of the options imports nothing heavy, so that both are there at once. The function `run`
of a command is beside them, or in a part of the command's package that imports torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

from lightning_rob.runtime.errors import at_least as at_least

OF_LIGHTNING = ("fit", "validate", "test", "predict")  # commands


@dataclass(frozen=True)
class CommandConfig:
    """Options of a command."""

    usage: ClassVar[str]  # arguments in the first line of its page
    positional: ClassVar[str] = "ckpt_path"  # of arguments without a name; "" for none
    part: ClassVar[str] = ""  # module of the command's package with `run`; "" for the package
    reads_records: ClassVar[bool] = False  # its arguments, all of them; no torch

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that a recipe of `fit` implies."""
        return {}


def config_of(command: str) -> type[CommandConfig] | None:
    """Return the options of a command; None for a command of Lightning."""
    if command in OF_LIGHTNING:
        return None
    module = import_module(f"lightning_rob.commands.{command}")
    return getattr(module, f"{command.capitalize()}Config")


def function_of(command: str) -> Any:
    """Return the function of a command that is not Lightning's."""
    config = config_of(command)
    place = f"lightning_rob.commands.{command}.{config.part if config else ''}"
    return import_module(place.rstrip(".")).run
