"""The history as TensorBoard's curves."""

from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from lightning_rob.monitor.history import Fields, tag


class Board:
    """A writer of its own, whose files are those of this history and no more.

    They are written anew from the history when a monitor starts, so that a kill between the two
    leaves no gap.

    Args:
        folder: for its files.
        lines: of the history.
    """

    def __init__(self, folder: Path, lines: Sequence[Fields]) -> None:
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        self.writer = SummaryWriter(str(folder))
        group: list[Fields] = []
        for line in lines:
            group.append(line)
            if "event" in line:
                self.show(group)
                group = []

    def show(self, lines: Sequence[Fields]) -> None:
        """Add the points of some lines, the last of which is an event."""
        event = lines[-1]
        when, step = _seconds(event.get("date")), event.get("step")
        for line in lines[:-1] if event["event"] == "evaluated" else ():
            self.writer.add_scalar(tag(line["name"]), line["accuracy"], step, when)
        for key in ("newly_vulnerable", "won_back"):
            if images := event.get("change"):
                self.writer.add_scalar(f"monitor/{key}", len(images[key]), step, when)
        for alarm in event.get("alarm", ()):
            self.writer.add_text("monitor/alarm", alarm, step, when)
        self.writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


def _seconds(date: object) -> float | None:
    with suppress(TypeError, ValueError):
        return datetime.fromisoformat(date).timestamp()  # type: ignore[arg-type]
    return None
