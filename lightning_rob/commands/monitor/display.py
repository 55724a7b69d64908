"""The terminal's view of a history: a row for each checkpoint, a line for each alarm."""

import sys
from collections.abc import Sequence
from contextlib import suppress

from rich.console import Console

from lightning_rob.commands.monitor.history import Fields
from lightning_rob.runtime.errors import visible

MAX_NAMED = 12  # images named in a row; the history has all of them
WIDTHS = {"checkpoint": 24, "epoch": 5, "step": 7, "clean": 6, "worst": 12, "lost won p": 15}


class Display:
    """Prints the lines that go into the history.

    Args:
        name: name of the model, where there are several.
    """

    def __init__(self, name: str = "") -> None:
        self.prefix = f"{name}: " if name else ""
        self.console = Console(highlight=False, soft_wrap=True)
        self.has_head = False

    def show(self, lines: Sequence[Fields]) -> None:
        """Print some lines, the last of which is an event."""
        *results, event = lines
        if event["event"] == "evaluated":
            with suppress(OSError):  # the disk behind stdout may be full
                self._row({line["name"]: line for line in results}, event)
        elif event["event"] == "missed":
            warn(f"missed: {self.prefix}{event['checkpoint']} went before it could be evaluated")
        for alarm in event.get("alarm", ()):
            warn(f"alarm: {self.prefix}{alarm}")

    def _row(self, results: dict[str, Fields], event: Fields) -> None:
        """Print the figures of a checkpoint, and which images it lost and won."""
        if not self.has_head:
            self.console.print(_columns(list(WIDTHS)), style="bold")
            self.has_head = True
        name = event["checkpoint"].removeprefix("checkpoints/").removesuffix(".ckpt")
        low, high = results["worst"]["interval"]
        change = event.get("change", {})
        images = {"newly vulnerable": "newly_vulnerable", "won back": "won_back"}
        p = "<.001" if change and change["p"] < 0.001 else f"{change.get('p', 0):.3f}"
        counts = [len(change.get(key, ())) for key in images.values()]
        cells = [
            self.prefix + visible(name),
            str(event["epoch"]),
            str(event["step"]),
            f"{100 * results['clean']['accuracy']:.1f}",
            f"{100 * results['worst']['accuracy']:.1f} ± {50 * (high - low):.1f}",
            f"-{counts[0]} +{counts[1]} {p}" if change else "",
        ]
        alarm = "  ALARM" if event["alarm"] else ""
        self.console.print(_columns(cells) + alarm, style="red" if alarm else "", markup=False)
        for title, key in images.items():
            if found := change.get(key):
                more = len(found) - MAX_NAMED
                named = ", ".join(map(str, found[:MAX_NAMED]))
                named += f" and {more} more" if more > 0 else ""
                self.console.print(f"  {title}: {named}", style="dim", markup=False)


def warn(text: str) -> None:
    """Print one line on stderr, if it can be written: its disk may be full."""
    with suppress(OSError):
        print(f"lightning-rob: {visible(' '.join(text.split()))}", file=sys.stderr, flush=True)


def _columns(cells: Sequence[str]) -> str:
    """Return the cells in columns, a long one cut in its middle; numbers to the right."""
    found = []
    for place, (text, width) in enumerate(zip(cells, WIDTHS.values(), strict=True)):
        half = width // 2
        if len(text) > width:
            text = f"{text[: half - 1]}…{text[len(text) - width + half :]}"
        found.append(text.rjust(width) if place else text.ljust(width))
    return "  ".join(found)
