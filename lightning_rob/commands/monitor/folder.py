"""Checkpoints in a run's folder or another source, as they appear, change and disappear."""

import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_rob.commands.checkpoints import config_in_checkpoint, read_checkpoint
from lightning_rob.commands.monitor.history import Fields, History, Identity, identity, timestamp
from lightning_rob.commands.monitor.source import Refused, Source, Stamp, Unreachable, Version
from lightning_rob.errors import visible
from lightning_rob.files import digest

SETTLE = 10.0  # seconds after which an unreadable file that does not change is broken
FACTS = ("file", "weights", "recipe", "epoch", "step")  # of a checkpoint, in a line


@dataclass(frozen=True)
class CheckpointFile:
    """A complete checkpoint file.

    Args:
        source: has the file.
        name: in the source.
        file: SHA-256 of its bytes.
        weights: SHA-256 of its weights.
        recipe: SHA-256 of its recipe's model.
        epoch: counted from 0.
        step: of training.
        stamp: changes when the file is overwritten.
    """

    source: Source
    name: str
    file: str
    weights: str
    recipe: str
    epoch: int
    step: int
    stamp: Stamp

    @property
    def path(self) -> Path:
        """The local file; that of a remote source is fetched if necessary.

        Raises:
            Unreachable: it cannot be fetched.
        """
        return self.source.path(self.version)

    @property
    def version(self) -> Version:
        """Name and stamp."""
        return self.name, self.stamp

    @property
    def identity(self) -> Identity:
        """Weights and recipe: each pair is evaluated once."""
        return self.weights, self.recipe

    @property
    def order(self) -> tuple[int, bool, int, str]:
        """Sorting key: training step; of equal weights first permanent files, then short names."""
        name = Path(self.name).name
        return self.step, name.startswith("last"), len(name), self.name

    @property
    def unchanged(self) -> bool:
        """Whether the file is still the one that was read."""
        return self.source.holds(self.version)


class CheckpointFolder:
    """Scans a source, and records checkpoints that appear, are broken or are deleted too soon.

    Of a remote source the oldest checkpoint is read first, for its attacks, and then the newest. An
    older one is read when no other waits. One that cannot be fetched is tried again at each scan;
    the others do not wait for it.

    Args:
        source: of the checkpoints.
        history: has those of earlier scans.
        record: records an event.
    """

    def __init__(self, source: Source, history: History, record: Callable[[Fields], None]) -> None:
        self.source = source
        self.history = history
        self.record = record
        self.files: dict[str, CheckpointFile] = {}
        self.incomplete: dict[str, tuple[Stamp, float]] = {}
        self.unread: dict[str, Stamp] = {}  # not read yet
        self.refused: dict[str, Stamp] = {}  # could not be fetched
        self.in_evaluation: Identity | None = None
        self.unreachable: Unreachable | None = None  # why the last scan failed

    def scan(self, idle: bool = True) -> None:
        """Find files that appeared, changed or disappeared.

        Of a source that cannot be reached the checkpoints stay as they were.

        Args:
            idle: whether no checkpoint waits.
        """
        try:
            self._update(self.source.stamps(), idle)
        except Unreachable as error:
            self.unreachable = error
        else:
            self.unreachable = None
            self._record_missed()

    def pending(self, done: Collection[Identity]) -> list[CheckpointFile]:
        """Return the files whose identity is not done, each identity once, by training step."""
        new = [file for file in self.files.values() if file.identity not in done]
        first = {f.identity: f for f in sorted(new, key=lambda f: f.order, reverse=True)}
        return sorted(first.values(), key=lambda f: f.order)

    @property
    def first(self) -> CheckpointFile | None:
        """The first file in the order of training, whose recipe decides on the attacks."""
        return min(self.files.values(), key=lambda f: f.order, default=None)

    def facts(self, file: CheckpointFile) -> Fields:
        """Return the fields of a line that describe a checkpoint."""
        known = {name: getattr(file, name) for name in FACTS}
        return {"checkpoint": file.name, **known, "date": timestamp()}

    def forget(self, pending: Collection[CheckpointFile]) -> None:
        """Delete copies of remote checkpoints that are neither pending nor the first."""
        kept = [file.version for file in (*pending, self.first) if file]
        self.source.keep([*kept, *((name, stamp) for name, (stamp, _) in self.incomplete.items())])

    def _update(self, found: dict[str, Stamp], idle: bool) -> None:
        self.files = {n: f for n, f in self.files.items() if found.get(n) == f.stamp}
        self.incomplete = {n: d for n, d in self.incomplete.items() if n in found}
        reported = self._known("refused") if self.refused else {}
        waited = [*self.unread.items(), *(v for v in self.refused.items() if v not in reported)]
        for name in (name for name, stamp in waited if found.get(name) != stamp):
            self.record({"event": "missed", "checkpoint": name, "date": timestamp()})
        new = {n: stamp for n, stamp in found.items() if n not in self.files}
        # A local file is read again: its manifest may have changed.
        known = self._known() if new and self.source.remote else {}
        self.unread = {n: s for n, s in new.items() if (n, s) not in known}
        for version in new.items() & known.keys():
            self._restore(version, known[version])
        self._read_all(self._chosen(list(found), idle))

    def _read_all(self, names: Sequence[str]) -> None:
        """Read unread files; one that cannot be fetched waits, if there are others."""
        failures: dict[str, Refused] = {}
        self.refused = {}
        for name in names:
            stamp = self.unread[name]
            try:
                self._add(name, stamp)
            except Refused as refusal:
                failures[name] = refusal
            else:
                if not self.source.remote or self.source.holds((name, stamp)):
                    del self.unread[name]
        for name, error in failures.items():
            if not self.files:
                raise error
            self.refused[name] = self.unread.pop(name)
            self._wait(name, self.refused[name], str(error), "refused")

    def _chosen(self, names: Sequence[str], idle: bool) -> list[str]:
        """Return the unread files that are to be read now.

        Args:
            names: of all files; of a remote source the oldest first.
            idle: whether no checkpoint waits.
        """
        if not self.source.remote or not self.unread:
            return list(self.unread)
        again = [name for name in self.unread if name in self.incomplete or name in self.refused]
        unread = [name for name in self.unread if name not in again]
        read = [place for place, name in enumerate(names) if name not in unread]
        if not read:
            return list(dict.fromkeys([unread[0], unread[-1]]))
        newer = [name for name in unread if names.index(name) > read[-1]]
        newest = unread[-1:] if idle else []
        return list(dict.fromkeys([*reversed(newer), *again, *newest]))

    def _known(self, key: str = "stamp") -> dict[Version, Fields]:
        """Return the last event of each file that was broken, or is remote and was read.

        Args:
            key: field with the stamp; "refused" for files that could not be fetched.
        """
        events = self.history.events("broken", "seen")
        return {(e["checkpoint"], tuple(e[key])): e for e in events if key in e}

    def _restore(self, version: Version, event: Fields) -> None:
        """Keep a file that was complete when it was read."""
        if event["event"] == "seen":
            facts = {fact: event[fact] for fact in FACTS}
            self.files[version[0]] = CheckpointFile(
                self.source, version[0], **facts, stamp=version[1]
            )

    def _add(self, name: str, stamp: Stamp) -> None:
        """Keep a file if it is complete; otherwise it may be being written."""
        try:
            file = self._read(name, stamp)
        except Unreachable:
            raise
        except Exception as error:  # of any kind: the file is of anybody's making
            if self.source.holds((name, stamp)):
                self._wait(name, stamp, str(error) or type(error).__name__)
            return
        if file.unchanged:
            self.incomplete.pop(name, None)
            self.files[name] = file
            about = {"stamp": list(stamp)} if self.source.remote else {}
            if about or self._seen(file.file) is None:
                self.record({"event": "seen"} | about | self.facts(file))

    def _read(self, name: str, stamp: Stamp) -> CheckpointFile:
        path = self.source.path((name, stamp))
        file = digest(path)
        if line := self._seen(file):
            facts = {fact: line[fact] for fact in FACTS}
            return CheckpointFile(self.source, name, **facts, stamp=stamp)
        checkpoint = read_checkpoint(str(path))
        epoch, step = (int(checkpoint.get(name, 0)) for name in ("epoch", "global_step"))
        hashes = file, weights_of(checkpoint), recipe_of(checkpoint, path)
        return CheckpointFile(self.source, name, *hashes, epoch, step, stamp)

    def _seen(self, file: str) -> Fields | None:
        """Return the event in which a file's bytes were first seen."""
        return next((x for x in self.history.events("seen") if x["file"] == file), None)

    def _wait(self, name: str, stamp: Stamp, reason: str, key: str = "stamp") -> None:
        """Wait for a file to become complete; record it as broken when it no longer changes."""
        if (name, stamp) in self._known(key):
            self.incomplete.pop(name, None)
            return
        before, since = self.incomplete.get(name, (None, 0.0))
        if before != stamp:
            self.incomplete[name] = stamp, time.monotonic()
        elif time.monotonic() - since >= SETTLE:
            self.record(broken_event(name, reason) | {key: list(stamp)})
            del self.incomplete[name]

    def _record_missed(self) -> None:
        """Record weights that were seen, and deleted before they could be evaluated."""
        known = {self.in_evaluation, *(file.identity for file in self.files.values())}
        known |= set(map(identity, self.history.events("evaluated", "missed", "broken")))
        seen = {identity(line): line for line in self.history.events("seen")}
        for line in (line for key, line in seen.items() if key not in known):
            self.record(line | {"event": "missed", "date": timestamp()})


def broken_event(name: str, reason: str) -> Fields:
    """Return the event of a checkpoint that cannot be evaluated."""
    alarm = [visible(f"{name} cannot be evaluated: {reason}")]
    return {"event": "broken", "checkpoint": name, "date": timestamp(), "alarm": alarm}


def recipe_of(checkpoint: dict[str, Any], path: Path) -> str:
    """Return the SHA-256 of the model in a checkpoint's recipe.

    Raises:
        InputError: it cannot be read.
    """
    recipe = config_in_checkpoint(checkpoint, str(path))
    model = (yaml.safe_load(recipe or "") or {}).get("model")
    return hashlib.sha256(json.dumps(model, sort_keys=True, default=str).encode()).hexdigest()


def weights_of(checkpoint: dict[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's weights."""
    # No tensor holds how many members of an ensemble are trained.
    digest = hashlib.sha256(repr(checkpoint.get("staged", {}).get("stage")).encode())
    for name, value in sorted(checkpoint["state_dict"].items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}".encode())
    return digest.hexdigest()
