"""The history of a monitored run: JSON lines that a kill cannot harm."""

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any

from lightning_rob.commands.monitor.scores import ScoreFiles
from lightning_rob.evaluation.findings import FLAGGED
from lightning_rob.evaluation.records import SCHEMA, SESSION, with_schema
from lightning_rob.runtime.files import append_whole

Fields = dict[str, Any]
Identity = tuple[str | None, str | None]  # SHA-256 of the weights and of the recipe's model
JUDGED = ("evaluated", "broken", "ended")  # open or end alarms
RECORD, SCORES = "monitor.jsonl", "monitor_scores"


def timestamp() -> str:
    """Return the current date and time, for a line."""
    return datetime.now().astimezone().isoformat(" ", "seconds")


def seconds_of(date: str) -> float:
    """Return the Unix time of a line's date; raise ValueError if it is no date."""
    return datetime.fromisoformat(date).timestamp()


def tag(name: str) -> str:
    """Return an accuracy's name in loggers and in alarms, after those that `test` logs."""
    return "monitor/acc" if name == "clean" else f"monitor/robust/{name}"


def identity(line: Fields) -> Identity:
    """Return what distinguishes a line's checkpoint from others: weights and recipe."""
    return line.get("weights"), line.get("recipe")


class History:
    """The lines of `monitor.jsonl`, which only one process at a time appends to.

    Lines that belong together are written at once, the last one with an `event`.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / RECORD
        self.scores = ScoreFiles(folder, SCORES)
        self.file: IO[bytes] = self.path.open("a+b", buffering=0)
        try:
            with suppress(ImportError):  # Windows has no such lock
                import fcntl

                # It ends with a killed process, even if a child of it lives on.
                fcntl.lockf(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A kill may have left a part of a group of lines, which is cut off.
            self.file.seek(0)
            self.lines, end, schemas = _whole_groups(self.file.read())
            if others := sorted(schemas - {str(SCHEMA)}):
                raise ValueError(
                    f"{self.path} has schema {', '.join(others)}, this version writes {SCHEMA}: "
                    "choose another --out"
                )
            self.file.truncate(end)
            os.fsync(self.file.fileno())
        except BaseException as error:
            self.file.close()
            if isinstance(error, BlockingIOError | PermissionError):
                raise ValueError(
                    f"another monitor writes to {self.path}: end it, or choose another --out"
                ) from error
            raise

    def close(self) -> None:
        self.file.close()

    def append(self, *lines: Fields) -> None:
        """Append lines that end with an event: all of them or, after an error, none."""
        kinds = ("monitor_event" if "event" in line else "accuracy" for line in lines)
        lines = tuple({"session": SESSION} | line for line in lines)
        records = (with_schema({"kind": k} | line) for k, line in zip(kinds, lines, strict=True))
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
        append_whole(self.file, content)
        self.lines += lines

    def events(self, *kinds: str) -> Iterator[Fields]:
        """Yield the events of these kinds, the oldest first."""
        return (line for line in self.lines if line.get("event") in kinds)

    def groups(self) -> Iterator[list[Fields]]:
        """Yield the lines that were written together, the last of each an event."""
        group: list[Fields] = []
        for line in self.lines:
            group.append(line)
            if "event" in line:
                yield group
                group = []

    def unreported(self) -> list[Fields]:
        """Return the alarmed events since a monitor last ended, whose exit code reported others."""
        found: list[Fields] = []
        for line in self.events(*JUDGED):
            found = [] if line["event"] == "ended" else [*found, *[line] * bool(line["alarm"])]
        return found

    def alarm(self) -> Fields | None:
        """Return the event of the alarm that is open after the last event."""
        alarm = None
        for event in self.events(*JUDGED):
            alarm = alarm_after(alarm, event)
        return alarm


def alarm_after(alarm: Fields | None, event: Fields) -> Fields | None:
    """Return the alarm that is open after an event, from the one before."""
    if event.get("alarm"):
        # At the position of the latest alarmed one: an older checkpoint may be alarmed after it,
        # and one between them must not end both.
        position = max(one.get("position", 0) for one in (alarm or {}, event))
        return event | {"position": position}
    later = alarm and event["event"] == "evaluated" and event["position"] >= alarm["position"]
    return None if later else alarm


def _whole_groups(content: bytes) -> tuple[list[Fields], int, set[str]]:
    """Return the lines up to the last event, where that ends, and the schemas of all lines."""
    lines: list[Fields] = []
    end = place = kept = 0
    for text in content.splitlines(keepends=True):
        place += len(text)
        with suppress(ValueError):
            line = json.loads(text)
            if isinstance(line, dict) and text.endswith(b"\n"):
                lines.append(line)
                if "event" in line:
                    kept, end = len(lines), place
    return lines[:kept], end, {str(line.get("schema", SCHEMA)) for line in lines}


def finding_count(lines: Sequence[Fields]) -> int:
    """Return the number of different warnings and severe findings in some lines."""
    found = [one for line in lines for one in line.get("findings", ())]
    return len({one["text"] for one in found if one["severity"] in FLAGGED})


def largest_blind(lines: Sequence[Fields]) -> float:
    """Return the largest share of images on which an attack had no gradient to follow."""
    return max((line.get("blind") or 0.0 for line in lines), default=0.0)


def scalars(lines: Sequence[Fields]) -> dict[str, float]:
    """Return the figures by name of lines that end with an event."""
    *results, event = lines
    change = event.get("change", {})
    found: dict[str, float] = {
        f"monitor/{key}": len(change[key])
        for key in ("newly_vulnerable", "won_back")
        if key in change
    }
    if event["event"] == "evaluated":
        found |= {tag(line["name"]): line["accuracy"] for line in results}
        found |= {tag("findings"): finding_count(results), tag("blind"): largest_blind(results)}
    return found
