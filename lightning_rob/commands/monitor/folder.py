"""Checkpoints of a source, as they appear, change and disappear."""

import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import yaml

from lightning_rob.commands.checkpoints import config_in_checkpoint, read_checkpoint
from lightning_rob.commands.monitor.history import Fields, History, Identity, identity, timestamp
from lightning_rob.commands.monitor.source import Refused, Source, Stamp, Unreachable, Version
from lightning_rob.runtime.errors import visible
from lightning_rob.runtime.files import digest

SETTLE = 10.0  # seconds after which an unreadable file that does not change is broken
FACTS = ("file", "weights", "recipe", "epoch", "step")  # of a checkpoint, in a line


@dataclass(frozen=True)
class CheckpointFile:
    """A complete checkpoint file.

    Args:
        source: place that has the file.
        name: name in the source.
        stamp: values that change when the file is overwritten.
        file: SHA-256 of its bytes.
        weights: SHA-256 of its weights.
        recipe: SHA-256 of its recipe's model.
        epoch: epoch of training, counted from 0.
        step: step of training.
    """

    source: Source
    name: str
    stamp: Stamp
    file: str
    weights: str
    recipe: str
    epoch: int
    step: int

    @property
    def version(self) -> Version:
        """Name and stamp."""
        return self.name, self.stamp

    @property
    def path(self) -> Path:
        """The local file; that of a remote source is fetched if necessary."""
        return self.source.path(self.version)

    @property
    def unchanged(self) -> bool:
        """Whether the file is still the one that was read."""
        return self.source.holds(self.version)

    @property
    def identity(self) -> Identity:
        """Weights and recipe: each pair is evaluated once."""
        return self.weights, self.recipe

    @property
    def order(self) -> tuple[int, bool, int, str]:
        """Sorting key: training step; of equal weights first permanent files, then short names."""
        name = PurePosixPath(self.name).name
        return self.step, name.startswith("last"), len(name), self.name

    @property
    def facts(self) -> Fields:
        """Fields of a line that describe the checkpoint."""
        known = {name: getattr(self, name) for name in FACTS}
        return {"checkpoint": self.name, **known, "date": timestamp()}


class CheckpointFolder:
    """Scans a source, and records checkpoints that appear, are broken or are deleted too soon.

    Args:
        source: place of the checkpoints.
        history: record of earlier scans.
        record: function that records an event.
    """

    def __init__(self, source: Source, history: History, record: Callable[[Fields], None]) -> None:
        self.source = source
        self.history = history
        self.record = record
        self.found: dict[str, CheckpointFile] = {}
        self.waiting: dict[str, tuple[Stamp, float]] = {}  # unreadable, since when
        self.in_evaluation: Identity | None = None

    @property
    def files(self) -> list[CheckpointFile]:
        """The complete files, in the order of training."""
        return sorted(self.found.values(), key=lambda file: file.order)

    def pending(self, done: Collection[Identity]) -> list[CheckpointFile]:
        """Return the files whose identity is not done, each identity once, by training step."""
        new = {f.identity: f for f in reversed(self.files) if f.identity not in done}
        return sorted(new.values(), key=lambda file: file.order)

    def scan(self) -> None:
        """Find files that appeared, changed or disappeared.

        Raises:
            Unreachable: the source cannot be listed, or none of its files fetched.
        """
        stamps = self.source.stamps()
        self.found = {n: f for n, f in self.found.items() if stamps.get(n) == f.stamp}
        for name, (stamp, _) in list(self.waiting.items()):
            if stamps.get(name) != stamp:
                # Of an object that could not be fetched the history has no other trace.
                if self.source.remote and not self.source.holds((name, stamp)):
                    self.record({"event": "missed", "checkpoint": name, "date": timestamp()})
                del self.waiting[name]
        refusals = [self._read(n, stamp) for n, stamp in stamps.items() if n not in self.found]
        if not self.found and (refused := next(filter(None, refusals), None)):
            raise refused
        known = {self.in_evaluation, *(file.identity for file in self.found.values())}
        known |= set(map(identity, self.history.events("evaluated", "missed", "broken")))
        for line in {identity(line): line for line in self.history.events("seen")}.values():
            if identity(line) not in known:
                self.record(line | {"event": "missed", "date": timestamp()})

    def forget(self, pending: Collection[CheckpointFile]) -> None:
        """Delete copies of remote checkpoints that no longer wait.

        That of the first stays, by whose recipe the attacks are built.
        """
        kept = [file.version for file in (*pending, *self.files[:1])]
        self.source.keep([*kept, *((name, stamp) for name, (stamp, _) in self.waiting.items())])

    def _events(self, kind: str, name: str, stamp: Stamp) -> list[Fields]:
        """Return the events of a version of a checkpoint; those of local files have no stamp."""
        stamps = (list(stamp),)
        return [
            event
            for event in self.history.events(kind)
            if event["checkpoint"] == name and event.get("stamp", event.get("refused")) in stamps
        ]

    def _read(self, name: str, stamp: Stamp) -> Refused | None:
        """Keep a file if it is complete; otherwise it may be being written.

        Returns:
            The error of one that cannot be fetched, which the others do not wait for.
        """
        remote = self.source.remote
        # A local file is read again: its manifest may have changed.
        if remote and (seen := self._events("seen", name, stamp)):
            facts = {fact: seen[0][fact] for fact in FACTS}
            self.found[name] = CheckpointFile(self.source, name, stamp, **facts)
            return None
        if remote and any("stamp" in event for event in self._events("broken", name, stamp)):
            return None
        try:
            file = self._complete(name, stamp)
        except Refused as error:
            self._wait(name, stamp, str(error), "refused")
            return error
        except Unreachable:
            raise
        except Exception as error:  # of any kind: the file is of anybody's making
            if remote or self.source.holds((name, stamp)):
                self._wait(name, stamp, str(error) or type(error).__name__, "stamp")
            return None
        if file.unchanged:
            self.waiting.pop(name, None)
            self.found[name] = file
            if remote:
                self.record({"event": "seen", "stamp": list(stamp)} | file.facts)
            elif self._seen(file.file) is None:
                self.record({"event": "seen"} | file.facts)
        return None

    def _complete(self, name: str, stamp: Stamp) -> CheckpointFile:
        """Return a file with its facts, from the history where its bytes were seen before."""
        path = self.source.path((name, stamp))
        file = digest(path)
        if seen := self._seen(file):
            facts = {fact: seen[fact] for fact in FACTS}
            return CheckpointFile(self.source, name, stamp, **facts)
        checkpoint = read_checkpoint(str(path))
        epoch, step = (int(checkpoint.get(key, 0)) for key in ("epoch", "global_step"))
        hashes = file, weights_of(checkpoint), recipe_of(checkpoint, path)
        return CheckpointFile(self.source, name, stamp, *hashes, epoch, step)

    def _seen(self, file: str) -> Fields | None:
        """Return the event in which a file's bytes were first seen."""
        return next((x for x in self.history.events("seen") if x["file"] == file), None)

    def _wait(self, name: str, stamp: Stamp, reason: str, key: str) -> None:
        """Wait for a file to become complete; record it as broken when it no longer changes.

        Args:
            name: its name.
            stamp: its stamp.
            reason: why it cannot be read.
            key: field of the stamp: "refused" where the file is tried again all the same.
        """
        if any(key in event for event in self._events("broken", name, stamp)):
            self.waiting.pop(name, None)
            return
        before, since = self.waiting.get(name, (None, 0.0))
        if before != stamp:
            self.waiting[name] = stamp, time.monotonic()
        elif time.monotonic() - since >= SETTLE:
            self.record(broken_event(name, reason) | {key: list(stamp)})
            del self.waiting[name]


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
