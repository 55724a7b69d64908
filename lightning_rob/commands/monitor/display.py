"""The terminal's view of a history: a row for each checkpoint, a line for each alarm."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

from rich.console import Console

from lightning_rob.commands.monitor.history import Fields
from lightning_rob.errors import visible

MAX_NAMED = 12  # images named in a row; the history has all of them
WIDTHS = {"checkpoint": 24, "epoch": 5, "step": 7, "clean": 6, "worst": 12, "change": 15}
HEADS = {"change": "lost won p"}


class Display:
    """Prints the lines that go into the history.

    Args:
        label: name of the model, where there are several.
    """

    def __init__(self, label: str | None = None) -> None:
        self.prefix = f"{label}: " if label else ""
        self.console = Console(highlight=False, soft_wrap=True)
        self.has_head = False

    def show(self, lines: Sequence[Fields]) -> None:
        """Print some lines, the last of which is an event."""
        results = {line["name"]: line for line in lines[:-1]}
        event = lines[-1]
        if event["event"] == "evaluated":
            with suppress(OSError):
                self._row(results, event)
        elif event["event"] == "missed":
            warn(f"missed: {self.prefix}{event['checkpoint']} went before it could be evaluated")
        for alarm in event.get("alarm", ()):
            warn(f"alarm: {self.prefix}{alarm}")

    def _row(self, results: Mapping[str, Fields], event: Fields) -> None:
        if not self.has_head:
            self.console.print(_line({k: HEADS.get(k, k) for k in WIDTHS}), style="bold")
            self.has_head = True
        low, high = results["worst"]["interval"]
        cells = {
            "checkpoint": self.prefix + visible(_short(event["checkpoint"])),
            "epoch": str(event["epoch"]),
            "step": str(event["step"]),
            "clean": f"{100 * results['clean']['accuracy']:.1f}",
            "worst": f"{100 * results['worst']['accuracy']:.1f} ± {50 * (high - low):.1f}",
            "change": _counts(event["change"]) if "change" in event else "",
        }
        alarm = "  ALARM" if event["alarm"] else ""
        self.console.print(_line(cells) + alarm, style="red" if alarm else "", markup=False)
        self._images(event.get("change", {}))

    def _images(self, change: Fields) -> None:
        """Print which images became vulnerable, and which no longer are."""
        for key, title in (("newly_vulnerable", "newly vulnerable"), ("won_back", "won back")):
            if images := change.get(key):
                more = len(images) - MAX_NAMED
                named = ", ".join(map(str, images[:MAX_NAMED]))
                named += f" and {more} more" if more > 0 else ""
                self.console.print(f"  {title}: {named}", style="dim", markup=False)


def warn(text: str) -> None:
    """Print one line on stderr, if it can be written: its disk may be full."""
    with suppress(OSError):
        print(f"lightning-rob: {visible(' '.join(text.split()))}", file=sys.stderr, flush=True)


def _line(cells: Mapping[str, str]) -> str:
    """Return the cells in columns, a long one cut in its middle; numbers to the right."""
    name, *numbers = [_cut(cells[key], width) for key, width in WIDTHS.items()]
    first, *widths = WIDTHS.values()
    head = f"{name:{first}}"
    return "  ".join([head, *(f"{n:>{w}}" for n, w in zip(numbers, widths, strict=True))])


def _short(checkpoint: str) -> str:
    return checkpoint.removeprefix("checkpoints/").removesuffix(".ckpt")


def _cut(text: str, width: int) -> str:
    half = width // 2
    return text if len(text) <= width else f"{text[: half - 1]}…{text[len(text) - width + half :]}"


def _counts(change: Fields) -> str:
    """Return the numbers of lost and won images, and the p of their difference."""
    lost, won = (len(change[key]) for key in ("newly_vulnerable", "won_back"))
    p = "<.001" if change["p"] < 0.001 else f"{change['p']:.3f}"
    return f"-{lost} +{won} {p}"
