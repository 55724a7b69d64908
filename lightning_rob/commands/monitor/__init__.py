"""`lightning-rob monitor`: the attacks of `test` on each checkpoint of a run as it appears."""

from lightning_rob.commands.monitor.loop import run

__all__ = ["run"]
