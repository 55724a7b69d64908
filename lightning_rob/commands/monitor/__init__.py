"""`lightning-rob monitor`: follow the checkpoints of a run, or a deployed one."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_rob.commands.configs import MonitorConfig

__all__ = ["MonitorConfig", "run"]


def run(config: MonitorConfig, starts: Mapping[str, Callable[[], Any]]) -> None:
    """Evaluate each new checkpoint; exit with code 1 after an alarm.

    Args:
        config: options of the process.
        starts: functions that return the options of each model by its name, and the function that
            builds the `Run` of a checkpoint.
    """
    from lightning_rob.commands.monitor import loop

    loop.run(config, starts)
