"""Options of the commands: a frozen dataclass each, beside the command's function.

Parser and `--help` are generated from it. The module of a command imports nothing heavy, so that
both are there at once; torch is imported when the function is called.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar

OF_LIGHTNING = ("fit", "validate", "test", "predict")  # commands


@dataclass(frozen=True)
class CommandConfig:
    """Options of a command."""

    usage: ClassVar[str]  # arguments in the first line of its page
    positional: ClassVar[str] = "ckpt_path"  # of arguments without a name; "" for none
    reads_records: ClassVar[bool] = False  # its arguments, all of them; no torch

    @classmethod
    def from_recipe(cls, recipe: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options that a recipe of `fit` implies."""
        return {}


def at_least(minimum: int, **numbers: int | None) -> None:
    """Refuse an option that is given and below a minimum."""
    for name, number in numbers.items():
        if number is not None and number < minimum:
            raise ValueError(f"--{name} must be at least {minimum}, got {number}")


def config_of(command: str) -> type[CommandConfig] | None:
    """Return the options of a command; None for a command of Lightning."""
    if command in OF_LIGHTNING:
        return None
    module = import_module(f"lightning_rob.commands.{command}")
    config: type[CommandConfig] = getattr(module, f"{command.capitalize()}Config")
    return config
