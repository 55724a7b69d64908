"""The command `lightning-rob`, on top of Lightning's command line."""

from lightning_rob.cli.main import COMMANDS, main

__all__ = ["COMMANDS", "main"]
