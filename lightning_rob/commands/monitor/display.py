"""The terminal's view of a history: a row for each checkpoint, a line for each alarm."""

import sys
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from lightning_rob.commands.monitor.history import Fields
from lightning_rob.runtime.errors import visible

MAX_NAMED = 12  # images named in a row; the history has all of them
ROW = "{:<24}  {:>5}  {:>7}  {:>6}  {:>12}  {:>15}"
HEAD = ROW.format("checkpoint", "epoch", "step", "clean", "worst", "lost won p")


class Display:
    """Prints the lines of the history, each after `prefix`."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.console = Console(highlight=False, soft_wrap=True)
        self.has_head = False

    def show(self, lines: Sequence[Fields]) -> None:
        """Print lines that end with an event."""
        *results, event = lines
        if event["event"] == "evaluated":
            with suppress(OSError):  # the disk behind stdout may be full
                self._row({line["name"]: line for line in results}, event)
        elif event["event"] == "missed":
            warn(f"missed: {self.prefix}{event['checkpoint']} went before it could be evaluated")
        findings = {one["name"]: one for line in results for one in line.get("findings", ())}
        for name, one in findings.items():
            if one["severity"] == "severe":  # else a rise would look like a success
                warn(f"do not trust {self.prefix}{event['checkpoint']}: {name}: {one['text']}")
        for alarm in event.get("alarm", ()):
            of = f"{event['checkpoint']}: " if event.get("checkpoint") else ""
            warn(f"alarm: {self.prefix}{of}{alarm}")

    def _row(self, results: dict[str, Fields], event: Fields) -> None:
        if not self.has_head:
            self.console.print(HEAD, style="bold")
            self.has_head = True
        name = event["checkpoint"].removeprefix("checkpoints/").removesuffix(".ckpt")
        low, high = results["worst"]["interval"]
        lost, won, changed = [], [], ""
        if change := event.get("change"):
            lost, won = change["newly_vulnerable"], change["won_back"]
            p = "<.001" if change["p"] < 0.001 else f"{change['p']:.3f}"
            changed = f"-{len(lost)} +{len(won)} {p}"
        name = self.prefix + visible(name)
        row = ROW.format(
            # Checkpoints differ at the end of their names, runs at the start.
            name if len(name) <= 24 else f"{name[:11]}…{name[-12:]}",
            event["epoch"],
            event["step"],
            f"{100 * results['clean']['accuracy']:.1f}",
            f"{100 * results['worst']['accuracy']:.1f} ± {50 * (high - low):.1f}",
            changed,
        )
        alarm = "  ALARM" if event["alarm"] else ""
        self.console.print(row + alarm, style="red" if alarm else "", markup=False)
        for title, images in (("newly vulnerable", lost), ("won back", won)):
            if images:
                named = ", ".join(map(str, images[:MAX_NAMED]))
                more = len(images) - MAX_NAMED
                named += f" and {more} more" if more > 0 else ""
                self.console.print(f"  {title}: {named}", style="dim", markup=False)


def warn(text: str) -> None:
    """Print one line on stderr, if it can be written: its disk may be full."""
    with suppress(OSError):
        print(f"lightning-rob: {visible(' '.join(text.split()))}", file=sys.stderr, flush=True)
