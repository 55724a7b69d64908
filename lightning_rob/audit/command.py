"""`lightning-rob audit`: what `test` would evaluate, under audit."""

from collections.abc import Sequence

from lightning_rob.audit.options import Wish, parse
from lightning_rob.callbacks.audit import RobustAudit
from lightning_rob.cli.errors import parse_or_fail
from lightning_rob.cli.lightning_cli import RobustCLI
from lightning_rob.threat import Threat


def main(args: Sequence[str]) -> None:
    """Run the command.

    Args:
        args: the command line without `audit`.

    Raises:
        InputError: what is asked for cannot be run.
        SystemExit: with code 1 if something severe was found and that is to be an error.
    """
    wish, rest = parse_or_fail(parse, args)
    found = AuditCommand(wish, rest).callback.found
    if wish.strict and found and found.severe:
        raise SystemExit(1)


class AuditCommand(RobustCLI):
    """Runs `test` with an audit plugged in.

    Args:
        wish: what is asked for.
        args: a command line of `test`, without the subcommand.
    """

    def __init__(self, wish: Wish, args: Sequence[str]) -> None:
        self.callback = RobustAudit(
            Threat(wish.norm, wish.eps), wish.steps, wish.queries, 1, wish.images, wish.seed
        )
        super().__init__(["test", *args])

    def before_test(self) -> None:
        """Plug it in."""
        self.trainer.callbacks.append(self.callback)  # type: ignore[attr-defined]
        super().before_test()
