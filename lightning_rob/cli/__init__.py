"""The command `lightning-rob`, on top of Lightning's command line."""

from lightning_rob.cli.main import COMMANDS as COMMANDS
from lightning_rob.cli.main import main as main
