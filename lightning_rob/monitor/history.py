"""What a monitor found: lines of JSON in a file that a kill cannot harm."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Self

from lightning_rob.evaluation.records import with_schema

Fields = dict[str, Any]
RECORD = "monitor.jsonl"


def now() -> str:
    """The date and time, for a line."""
    return datetime.now().astimezone().isoformat(" ", "seconds")


def tag(name: str) -> str:
    """What a figure is called in TensorBoard and in alarms, after the names that `test` logs."""
    return "monitor/acc" if name == "clean" else f"monitor/robust/{name}"


def identity(line: Fields) -> tuple[str | None, str | None]:
    """What a line's checkpoint is evaluated once for: its weights, in the model of its recipe."""
    return line.get("weights"), line.get("recipe")


class History:
    """The lines of `monitor.jsonl`, which only one process at a time adds to.

    Lines that belong together are written at once, and the last of them has an `event`. What
    follows the last event was broken off by a kill: it is cut off when the file is opened.

    Args:
        path: the file; it and its folder are made.

    Raises:
        ValueError: another monitor has it open.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.file: IO[bytes] = path.open("a+b", buffering=0)
        try:
            self._claim()
            self.file.seek(0)
            self.lines, end = _groups(self.file.read())
            self.file.truncate(end)
            self._to_disk()
        except BaseException:
            self.file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def append(self, *lines: Fields) -> None:
        """Add lines, the last of which is an event, all of them or none.

        Raises:
            OSError: they cannot be written; nothing of them is left.
        """
        rest = "".join(json.dumps(as_record(line)) + "\n" for line in lines).encode()
        end = self.file.seek(0, os.SEEK_END)
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
            self._to_disk()
        except OSError:
            self.file.truncate(end)
            raise
        self.lines += lines

    def events(self, *kinds: str) -> Iterator[Fields]:
        """The events of these kinds, the oldest first."""
        return (line for line in self.lines if line.get("event") in kinds)

    def unreported(self) -> list[str]:
        """The alarms since a monitor last came to its end, and told them by its exit code."""
        alarms: list[str] = []
        for line in self.events("evaluated", "broken", "ended"):
            alarms = [] if line["event"] == "ended" else [*alarms, *line["alarm"]]
        return alarms

    def _to_disk(self) -> None:
        os.fsync(self.file.fileno())

    def _claim(self) -> None:
        """Lock the file; a killed process, or a child that outlives it, holds no such lock."""
        with suppress(ImportError):  # there is none on Windows
            import fcntl

            try:
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError) as error:
                raise ValueError(
                    f"another monitor writes to {self.path}: end it, or choose another --out"
                ) from error


def as_record(line: Fields) -> Fields:
    """Return the line as a record of its kind."""
    return with_schema({"kind": "monitor_event" if "event" in line else "accuracy"} | line)


def _groups(content: bytes) -> tuple[list[Fields], int]:
    """The lines up to the last event, and where that ends."""
    kept: list[Fields] = []
    group: list[Fields] = []
    end = place = 0
    for text in content.splitlines(keepends=True):
        place += len(text)
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and text.endswith(b"\n"):
            group.append(line)
            if "event" in line:
                kept, group, end = kept + group, [], place
    return kept, end
