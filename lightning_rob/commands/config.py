"""Options of the commands: a frozen dataclass each, from which parser and `--help` are generated.

The module of the options imports nothing heavy, so that both are there at once. The function `run`
of a command is beside them, or in a part of the command's package that imports torch.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, TypeVar

from lightning_rob.runtime.errors import at_least as at_least

Item = TypeVar("Item")
OF_LIGHTNING = ("fit", "validate", "test", "predict")  # commands


@dataclass(frozen=True)
class CommandConfig:
    """Options of a command."""

    # Arguments in the first line of `--help`.
    usage: ClassVar[str] = "CHECKPOINT [options of test]"
    positional: ClassVar[str] = "ckpt_path"  # option that an argument without a name sets, if any
    module: ClassVar[str] = ""  # module of the command's package that has `run`; "": the package
    # Whether these are all arguments: no recipe is read, no model built, and no torch imported.
    reads_records: ClassVar[bool] = False


@dataclass(frozen=True)
class SpreadConfig(CommandConfig):
    """Options of a command whose work several processes can share.

    Args:
        workers: processes on this machine that share the work
        ray: workers of a Ray cluster that share it: RAY_ADDRESS, or this machine
        part: i/n, the part of this process alone, such as 3/8 in an array of jobs
    """

    workers: int = 1
    ray: int = 0
    part: str | None = None

    def __post_init__(self) -> None:
        at_least(1, workers=self.workers)
        at_least(0, ray=self.ray)
        numbers = re.fullmatch(r"(\d+)/(\d+)", self.part or "1/1")
        if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
            raise ValueError(f"--part is i/n with i from 1 to n, such as 3/8, got {self.part!r}")

    @property
    def processes(self) -> int:
        """The processes that share the work; 0 where this one does all of it."""
        return self.ray or (self.workers if self.workers > 1 else 0)

    def own(self, items: Sequence[Item]) -> list[Item]:
        """Return the items of this process: all of them, or every n-th from the i-th on."""
        first, _, step = (self.part or "1/1").partition("/")
        return list(items[int(first) - 1 :: int(step)])


def config_of(command: str) -> type[CommandConfig] | None:
    """Return the options of a command; None for a command of Lightning."""
    if command in OF_LIGHTNING:
        return None
    module = import_module(f"lightning_rob.commands.{command}")
    return getattr(module, f"{command.capitalize()}Config")


def function_of(command: str) -> Any:
    """Return the function of a command that is not Lightning's."""
    config = config_of(command)
    place = f"lightning_rob.commands.{command}.{config.module if config else ''}"
    return import_module(place.rstrip(".")).run
