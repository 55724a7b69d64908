"""The checkpoints in a run's folder, as they come, change and go."""

import hashlib
import json
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from lightning_rob.cli.checkpoints import read_checkpoint
from lightning_rob.cli.configs import config_in_checkpoint
from lightning_rob.errors import InputError
from lightning_rob.monitor.history import Fields, History, identity, now

SETTLE = 10.0  # seconds after which a file that cannot be read and does not change is broken
Stamp = tuple[int, int, int]  # inode, bytes, time of change


@dataclass(frozen=True)
class Sighting:
    """A checkpoint that was there, whole.

    Args:
        path: where it is.
        file: SHA-256 of its bytes.
        weights: SHA-256 of its weights.
        recipe: SHA-256 of its recipe's model.
        epoch: counted from 0.
        step: of training.
        stamp: of the file, which changes when it is overwritten.
    """

    path: Path
    file: str
    weights: str
    recipe: str
    epoch: int
    step: int
    stamp: Stamp

    @property
    def identity(self) -> tuple[str, str]:
        """What is evaluated once: the weights in the model of their recipe."""
        return self.weights, self.recipe

    @property
    def order(self) -> tuple[int, bool, int, str]:
        """By training; of the same weights first the file that stays, then the shortest name."""
        name = self.path.name
        return self.step, name.startswith("last"), len(name), str(self.path)


class Folder:
    """Looks into a folder; what is there, broken or lost goes into the history.

    Args:
        folder: a run's, or one of checkpoints.
        history: knows what was seen before.
        tell: records an event.
    """

    def __init__(self, folder: Path, history: History, tell: Callable[[Fields], None]) -> None:
        self.folder = folder
        self.history = history
        self.tell = tell
        self.there: dict[Path, Sighting] = {}
        self.doubtful: dict[Path, tuple[Stamp, float]] = {}
        self.busy: tuple[str, str] | None = None  # identity of what is being evaluated

    def look(self) -> None:
        """See what has come, changed and gone."""
        files = [*self.folder.glob("*.ckpt"), *self.folder.glob("checkpoints/**/*.ckpt")]
        found = {path: stamp for path in files if (stamp := stamp_of(path))}
        self.there = {p: s for p, s in self.there.items() if found.get(p) == s.stamp}
        self.doubtful = {p: d for p, d in self.doubtful.items() if p in found}
        for path, stamp in found.items():
            if path not in self.there:
                self._read(path, stamp)
        self._name_the_lost()

    @property
    def unsettled(self) -> bool:
        """Whether a file may still be being written."""
        return bool(self.doubtful)

    def waiting(self, done: Collection[tuple[str | None, str | None]]) -> list[Sighting]:
        """Those whose identity is not done, each once, in the order of training."""
        new = [sighting for sighting in self.there.values() if sighting.identity not in done]
        first = {s.identity: s for s in sorted(new, key=lambda s: s.order, reverse=True)}
        return sorted(first.values(), key=lambda s: s.order)

    def name(self, path: Path) -> str:
        """A file as it is called in the history."""
        return path.relative_to(self.folder).as_posix()

    def _read(self, path: Path, stamp: Stamp) -> None:
        """Take up a file if it is whole; it may be being written."""
        try:
            sighting = self._sighting(path, stamp)
        except (InputError, ValueError, OSError) as error:
            if stamp_of(path) == stamp:
                self._doubt(path, stamp, str(error))
            return
        if stamp_of(path) == stamp:
            self.doubtful.pop(path, None)
            self.there[path] = sighting
            if self._seen(sighting.file) is None:
                self.tell({"event": "seen"} | self.facts(sighting))

    def _sighting(self, path: Path, stamp: Stamp) -> Sighting:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if line := self._seen(digest):
            known = {name: line[name] for name in ("weights", "recipe", "epoch", "step")}
            return Sighting(path, digest, **known, stamp=stamp)
        checkpoint = read_checkpoint(str(path))
        recipe = recipe_of(checkpoint, path)
        epoch, step = (int(checkpoint.get(name, 0)) for name in ("epoch", "global_step"))
        return Sighting(path, digest, weights_of(checkpoint), recipe, epoch, step, stamp)

    def _seen(self, digest: str) -> Fields | None:
        """The line of a file's bytes; one that does not say the recipe is of an older version."""
        lines = self.history.events("seen")
        return next((x for x in lines if x["file"] == digest and "recipe" in x), None)

    def _doubt(self, path: Path, stamp: Stamp, reason: str) -> None:
        """Wait for a file to become whole; call it broken when it no longer changes."""
        name, told = self.name(path), self.history.events("broken")
        if any((line["checkpoint"], line.get("stamp")) == (name, list(stamp)) for line in told):
            self.doubtful.pop(path, None)
            return
        before, since = self.doubtful.get(path, (None, 0.0))
        if before != stamp:
            self.doubtful[path] = stamp, time.monotonic()
        elif time.monotonic() - since >= SETTLE:
            self.tell(broken(name, reason) | {"stamp": list(stamp)})
            del self.doubtful[path]

    def _name_the_lost(self) -> None:
        """Weights that were there and went before they could be evaluated."""
        here = {sighting.identity for sighting in self.there.values()}
        kinds = ("evaluated", "missed", "broken")
        known = {self.busy, *map(identity, self.history.events(*kinds))}
        lost = {
            identity(line): line
            for line in self.history.events("seen")
            if "recipe" in line and identity(line) not in here | known
        }
        for line in lost.values():
            self.tell(line | {"event": "missed", "date": now()})

    def facts(self, sighting: Sighting) -> Fields:
        """A checkpoint, for a line."""
        names = ("file", "weights", "recipe", "epoch", "step")
        told = {name: getattr(sighting, name) for name in names}
        return {"checkpoint": self.name(sighting.path), **told, "date": now()}


def stamp_of(path: Path) -> Stamp | None:
    """What changes when a file does; None where there is none."""
    try:
        state = path.stat()
    except OSError:
        return None
    return (state.st_ino, state.st_size, state.st_mtime_ns) if path.is_file() else None


def broken(name: str, reason: str) -> Fields:
    """The event of a checkpoint that cannot be evaluated."""
    alarm = [f"{name} cannot be evaluated: {reason}"]
    return {"event": "broken", "checkpoint": name, "date": now(), "alarm": alarm}


def recipe_of(checkpoint: dict[str, Any], path: Path) -> str:
    """SHA-256 of the model in a checkpoint's recipe.

    Raises:
        InputError: it cannot be read.
    """
    recipe = config_in_checkpoint(checkpoint, str(path))
    model = (yaml.safe_load(recipe or "") or {}).get("model")
    return hashlib.sha256(json.dumps(model, sort_keys=True, default=str).encode()).hexdigest()


def weights_of(checkpoint: dict[str, Any]) -> str:
    """SHA-256 of a checkpoint's weights."""
    # How many members of an ensemble are trained by then is in no tensor.
    digest = hashlib.sha256(repr(checkpoint.get("staged", {}).get("stage")).encode())
    for name, value in sorted(checkpoint["state_dict"].items()):
        if isinstance(value, torch.Tensor):
            digest.update(f"{name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}".encode())
    return digest.hexdigest()
