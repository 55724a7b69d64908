"""Checkpoint files in a run's folder, as they appear, change and disappear."""

import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_rob.commands.checkpoints import config_in_checkpoint, read_checkpoint
from lightning_rob.commands.monitor.history import Fields, History, Identity, identity, timestamp
from lightning_rob.errors import InputError
from lightning_rob.files import Stamp, digest, stamp_of

SETTLE = 10.0  # seconds after which an unreadable file that does not change is broken
# A file is of anybody's making: its entries may be of any type.
UNREADABLE = (
    *(InputError, ValueError, OSError, TypeError),
    *(AttributeError, ArithmeticError, RuntimeError, LookupError),
)
FACTS = ("file", "weights", "recipe", "epoch", "step")  # of a checkpoint, in a line


@dataclass(frozen=True)
class CheckpointFile:
    """A complete checkpoint file.

    Args:
        path: the file.
        file: SHA-256 of its bytes.
        weights: SHA-256 of its weights.
        recipe: SHA-256 of its recipe's model.
        epoch: counted from 0.
        step: of training.
        stamp: changes when the file is overwritten.
    """

    path: Path
    file: str
    weights: str
    recipe: str
    epoch: int
    step: int
    stamp: Stamp

    @property
    def identity(self) -> Identity:
        """Weights and recipe: each pair is evaluated once."""
        return self.weights, self.recipe

    @property
    def order(self) -> tuple[int, bool, int, str]:
        """Sorting key: training step; of equal weights first permanent files, then short names."""
        name = self.path.name
        return self.step, name.startswith("last"), len(name), str(self.path)

    @property
    def unchanged(self) -> bool:
        """Whether the file is still the one that was read."""
        return stamp_of(self.path) == self.stamp


class CheckpointFolder:
    """Scans a folder, and records files that appear, are broken or are deleted too soon.

    Args:
        folder: of a run, or of checkpoints.
        history: has the files of earlier scans.
        record: records an event.
        single: the only file, which is replaced by each new checkpoint; None takes all.
    """

    def __init__(
        self,
        folder: Path,
        history: History,
        record: Callable[[Fields], None],
        single: Path | None = None,
    ) -> None:
        self.folder = folder
        self.single = single
        self.history = history
        self.record = record
        self.files: dict[Path, CheckpointFile] = {}
        self.incomplete: dict[Path, tuple[Stamp, float]] = {}
        self.in_evaluation: Identity | None = None

    def scan(self) -> None:
        """Find files that appeared, changed or disappeared."""
        paths = [*self.folder.glob("*.ckpt"), *self.folder.glob("checkpoints/**/*.ckpt")]
        paths = [self.single] if self.single else paths
        found = {path: stamp for path in paths if (stamp := stamp_of(path))}
        self.files = {p: f for p, f in self.files.items() if found.get(p) == f.stamp}
        self.incomplete = {p: d for p, d in self.incomplete.items() if p in found}
        for path, stamp in found.items():
            if path not in self.files:
                self._add(path, stamp)
        self._record_missed()

    def pending(self, done: Collection[Identity]) -> list[CheckpointFile]:
        """Return the files whose identity is not done, each identity once, by training step."""
        new = [file for file in self.files.values() if file.identity not in done]
        first = {f.identity: f for f in sorted(new, key=lambda f: f.order, reverse=True)}
        return sorted(first.values(), key=lambda f: f.order)

    @property
    def newest(self) -> CheckpointFile | None:
        """The last file in the order of training."""
        return max(self.files.values(), key=lambda f: f.order, default=None)

    def facts(self, file: CheckpointFile) -> Fields:
        """Return the fields of a line that describe a checkpoint."""
        known = {name: getattr(file, name) for name in FACTS}
        return {"checkpoint": self._name(file.path), **known, "date": timestamp()}

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _add(self, path: Path, stamp: Stamp) -> None:
        """Keep a file if it is complete; otherwise it may be being written."""
        try:
            file = self._read(path, stamp)
        except UNREADABLE as error:
            if stamp_of(path) == stamp:
                self._wait(path, stamp, str(error))
            return
        if file.unchanged:
            self.incomplete.pop(path, None)
            self.files[path] = file
            if self._seen(file.file) is None:
                self.record({"event": "seen"} | self.facts(file))

    def _read(self, path: Path, stamp: Stamp) -> CheckpointFile:
        file = digest(path)
        if line := self._seen(file):
            return CheckpointFile(path, **{name: line[name] for name in FACTS}, stamp=stamp)
        checkpoint = read_checkpoint(str(path))
        epoch, step = (int(checkpoint.get(name, 0)) for name in ("epoch", "global_step"))
        hashes = file, weights_of(checkpoint), recipe_of(checkpoint, path)
        return CheckpointFile(path, *hashes, epoch, step, stamp)

    def _seen(self, file: str) -> Fields | None:
        """Return the event in which a file's bytes were first seen."""
        return next((x for x in self.history.events("seen") if x["file"] == file), None)

    def _wait(self, path: Path, stamp: Stamp, reason: str) -> None:
        """Wait for a file to become complete; record it as broken when it no longer changes."""
        name = self._name(path)
        recorded = [(x["checkpoint"], x.get("stamp")) for x in self.history.events("broken")]
        if (name, list(stamp)) in recorded:
            self.incomplete.pop(path, None)
            return
        before, since = self.incomplete.get(path, (None, 0.0))
        if before != stamp:
            self.incomplete[path] = stamp, time.monotonic()
        elif time.monotonic() - since >= SETTLE:
            self.record(broken_event(name, reason) | {"stamp": list(stamp)})
            del self.incomplete[path]

    def _record_missed(self) -> None:
        """Record weights that were seen, and deleted before they could be evaluated."""
        known = {self.in_evaluation, *(file.identity for file in self.files.values())}
        known |= set(map(identity, self.history.events("evaluated", "missed", "broken")))
        seen = {identity(line): line for line in self.history.events("seen")}
        for line in (line for key, line in seen.items() if key not in known):
            self.record(line | {"event": "missed", "date": timestamp()})


def broken_event(name: str, reason: str) -> Fields:
    """Return the event of a checkpoint that cannot be evaluated."""
    alarm = [f"{name} cannot be evaluated: {reason}"]
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
