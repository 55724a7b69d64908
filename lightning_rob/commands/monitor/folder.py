"""Checkpoints of a source, as they appear, change and disappear."""

import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import torch
import yaml

from lightning_rob.commands.checkpoints import config_in_checkpoint, read_checkpoint
from lightning_rob.commands.monitor.history import Fields, History, Identity, identity, timestamp
from lightning_rob.commands.monitor.source import Replaced, Source, Stamp, Unreachable
from lightning_rob.runtime.errors import visible
from lightning_rob.runtime.files import UNWRITABLE, digest

HELD = 2**30  # bytes of checkpoints that stay in memory until they are evaluated
SETTLE = 10.0  # seconds after which an unreadable file that does not change is broken
FACTS = ("file", "weights", "recipe", "epoch", "step")  # of a checkpoint, in a line

Content = dict[str, Any]  # of a checkpoint
Version = tuple[str, Stamp]


@dataclass(frozen=True)
class CheckpointFile:
    """A complete checkpoint file."""

    name: str  # in the source
    stamp: Stamp
    file: str  # SHA-256 of its bytes, of its weights, and of its recipe's model
    weights: str
    recipe: str
    epoch: int  # of training, counted from 0
    step: int
    config: str | None  # model and data of its recipe, YAML

    @property
    def identity(self) -> Identity:
        """Weights and recipe: each pair is evaluated once."""
        return self.weights, self.recipe

    @property
    def order(self) -> tuple[int, bool, int, str]:
        """Sorting key: training step; for equal steps permanent files first, then short names."""
        name = PurePosixPath(self.name).name
        return self.step, name.startswith("last"), len(name), self.name

    @property
    def facts(self) -> Fields:
        known = {name: getattr(self, name) for name in FACTS}
        return {"checkpoint": self.name, **known, "date": timestamp()}


class CheckpointFolder:
    """Scans a source, and records checkpoints that appear, are broken or are deleted too soon."""

    def __init__(self, source: Source, history: History, record: Callable[[Fields], None]) -> None:
        self.source = source
        self.history = history
        self.record = record
        self.found: dict[str, CheckpointFile] = {}
        # Files that cannot be read, perhaps because they are being written, since `monotonic`.
        self.waiting: dict[Version, float] = {}
        self.held: dict[Version, tuple[Content, int]] = {}  # content and bytes of the file
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
        """Find files that appeared, changed or disappeared."""
        stamps = self.source.stamps()
        self.found = {n: f for n, f in self.found.items() if stamps.get(n) == f.stamp}
        self.waiting = {v: since for v, since in self.waiting.items() if v in stamps.items()}
        for name, stamp in stamps.items():
            if name not in self.found:
                self._find(name, stamp)
        known = {self.in_evaluation, *(file.identity for file in self.found.values())}
        known |= set(map(identity, self.history.events("evaluated", "missed", "broken")))
        for line in {identity(line): line for line in self.history.events("seen")}.values():
            if identity(line) not in known:
                self.record(line | {"event": "missed", "date": timestamp()})

    def read(self, file: CheckpointFile) -> Content:
        """Return the content of a checkpoint for its evaluation; read it unless it is held."""
        version = file.name, file.stamp
        return (self.held.pop(version, None) or self._read(*version))[0]

    def hold(self, files: Collection[CheckpointFile]) -> None:
        """Forget the content of all other checkpoints."""
        kept = {(file.name, file.stamp) for file in files}
        self.held = {version: content for version, content in self.held.items() if version in kept}

    def _read(self, name: str, stamp: Stamp) -> tuple[Content, int, str]:
        """Return content, bytes and SHA-256 of a file."""
        with self.source.local(name, stamp) as path:
            return read_checkpoint(str(path)), path.stat().st_size, digest(path)

    def _find(self, name: str, stamp: Stamp) -> None:
        """Keep a complete file; record one that stays unreadable for a while as broken."""
        if seen := self._event("seen", name, stamp):
            known = {key: seen[key] for key in (*FACTS, "config")}
            self.found[name] = CheckpointFile(name, stamp, **known)
            return
        broken = self._event("broken", name, stamp)
        if broken and not broken.get("again"):
            return
        try:
            self._add(name, stamp)
            self.waiting.pop((name, stamp), None)
        except Replaced:
            return
        except Exception as error:  # anybody may have made the file
            if isinstance(error, OSError) and error.errno in UNWRITABLE:
                raise
            since = self.waiting.setdefault((name, stamp), time.monotonic())
            if broken is None and time.monotonic() - since >= SETTLE:
                reason = str(error) or type(error).__name__
                # The disk, the network or the memory is at fault: the file may be fine later.
                again = isinstance(error, Unreachable | OSError | MemoryError)
                broken = broken_event(name, reason) | {"stamp": list(stamp), "again": again}
                self.record(broken)
            if broken:
                del self.waiting[name, stamp]

    def _add(self, name: str, stamp: Stamp) -> None:
        content, size, file = self._read(name, stamp)
        epoch, step = (int(content.get(key, 0)) for key in ("epoch", "global_step"))
        config = config_in_checkpoint(content, name)
        model = (yaml.safe_load(config or "") or {}).get("model")
        recipe = hashlib.sha256(json.dumps(model, sort_keys=True, default=str).encode())
        hashes = file, weights_of(content), recipe.hexdigest()
        self.found[name] = found = CheckpointFile(name, stamp, *hashes, epoch, step, config)
        # Read once: its content stays in memory until the evaluation, up to `HELD` bytes.
        if not self.held or size + sum(other for _, other in self.held.values()) <= HELD:
            self.held[name, stamp] = content, size
        self.record({"event": "seen", "stamp": list(stamp), "config": config} | found.facts)

    def _event(self, kind: str, name: str, stamp: Stamp) -> Fields | None:
        """Return the event of a checkpoint with this stamp."""
        version = name, list(stamp)
        events = self.history.events(kind)
        return next((e for e in events if (e["checkpoint"], e.get("stamp")) == version), None)


def broken_event(name: str, reason: str) -> Fields:
    """Return the event of a checkpoint that cannot be evaluated."""
    alarm = [visible(f"{name} cannot be evaluated: {reason}")]
    return {"event": "broken", "checkpoint": name, "date": timestamp(), "alarm": alarm}


def weights_of(content: Content) -> str:
    """Return the SHA-256 of a checkpoint's weights."""
    # No tensor holds how many members of an ensemble are trained.
    digest = hashlib.sha256(repr(content.get("staged", {}).get("stage")).encode())
    for name, value in sorted(content["state_dict"].items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}".encode())
    return digest.hexdigest()
