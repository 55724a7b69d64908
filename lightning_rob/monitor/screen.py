"""What a monitor says: a row for each checkpoint, a line for what is wrong."""

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console

from lightning_rob.monitor.history import Fields

FEW = 12  # images that are named; all are in the history
COLUMNS = {"checkpoint": 24, "epoch": 5, "step": 7, "clean": 6, "worst": 12, "change": 15}
HEADS = {"change": "lost won p"}


class Screen:
    """Prints what goes into the history."""

    def __init__(self) -> None:
        self.console = Console(highlight=False, soft_wrap=True)
        self.headed = False

    def show(self, lines: Sequence[Fields]) -> None:
        """Print some lines, the last of which is an event."""
        figures = {line["name"]: line for line in lines[:-1]}
        event = lines[-1]
        if event["event"] == "evaluated":
            self._row(figures, event)
        elif event["event"] == "missed":
            self.warn(f"missed: {event['checkpoint']} went before it could be evaluated")
        for alarm in event.get("alarm", ()):
            self.warn(f"alarm: {alarm}")

    def warn(self, text: str) -> None:
        """One line on stderr."""
        print(f"lightning-rob: {' '.join(text.split())}", file=sys.stderr, flush=True)

    def _row(self, figures: Mapping[str, Fields], event: Fields) -> None:
        if not self.headed:
            self.console.print(_line({k: HEADS.get(k, k) for k in COLUMNS}), style="bold")
            self.headed = True
        low, high = figures["worst"]["interval"]
        cells = {
            "checkpoint": event["checkpoint"].removeprefix("checkpoints/").removesuffix(".ckpt"),
            "epoch": str(event["epoch"]),
            "step": str(event["step"]),
            "clean": _percent(figures["clean"]),
            "worst": f"{_percent(figures['worst'])} ± {50 * (high - low):.1f}",
            "change": _changed(event.get("change")),
        }
        alarm = "  ALARM" if event["alarm"] else ""
        self.console.print(_line(cells) + alarm, style="red" if alarm else "", markup=False)
        self._images(event.get("change"))

    def _images(self, change: Fields | None) -> None:
        """Which images became vulnerable, and which no longer are."""
        for key, words in (("newly_vulnerable", "newly vulnerable"), ("won_back", "won back")):
            if images := (change or {}).get(key):
                more = f" and {len(images) - FEW} more" if len(images) > FEW else ""
                told = ", ".join(map(str, images[:FEW]))
                self.console.print(f"  {words}: {told}{more}", style="dim", markup=False)


def _line(cells: Mapping[str, str]) -> str:
    """The cells in columns, a long one cut in its middle; numbers to the right."""
    name, *numbers = [_cut(cells[key], width) for key, width in COLUMNS.items()]
    widths = list(COLUMNS.values())
    head = f"{name:{widths[0]}}"
    return "  ".join([head, *(f"{n:>{w}}" for n, w in zip(numbers, widths[1:], strict=True))])


def _cut(text: str, width: int) -> str:
    half = width // 2
    return text if len(text) <= width else f"{text[: half - 1]}…{text[len(text) - width + half :]}"


def _percent(figure: Fields) -> str:
    return f"{100 * figure['accuracy']:.1f}"


def _changed(change: Fields | None) -> str:
    """How many images were lost and won, and how likely that is by chance."""
    if change is None:
        return ""
    lost, won = (len(change[key]) for key in ("newly_vulnerable", "won_back"))
    p = "<.001" if change["p"] < 0.001 else f"{change['p']:.3f}"
    return f"-{lost} +{won} {p}"
