"""Sources of checkpoints: a local folder, and the base class of remote ones with their cache."""

import hashlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection
from pathlib import Path
from typing import Any, ClassVar

from lightning_rob.errors import InputError, visible
from lightning_rob.files import stamp_of

Stamp = tuple[Any, ...]  # changes when a checkpoint does; can be written as JSON
Version = tuple[str, Stamp]  # name and stamp of a checkpoint


USER_INFO, QUERY = re.compile(r"(://)[^/\s]*@"), re.compile(r"(://[^\s?]*\?)\S+")


def without_secrets(text: str) -> str:
    """Return the text of a package's error without user info and queries of URLs in it."""
    return QUERY.sub(r"\1…", USER_INFO.sub(r"\1", text))


class Unreachable(InputError):
    """A source that cannot be listed or read now, and perhaps later.

    Args:
        reason: may quote the error of a package, which may name a server with its password.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(without_secrets(reason))


class Refused(Unreachable):
    """A single checkpoint that cannot be fetched now, of a source that can be listed."""


class Source(ABC):
    """A place where checkpoints appear, are replaced and deleted."""

    remote: ClassVar[bool]  # whether reading a checkpoint fetches it

    @abstractmethod
    def stamps(self) -> dict[str, Stamp]:
        """Return the stamp of each checkpoint by name; of a remote source the oldest first.

        Raises:
            Unreachable: the source cannot be listed.
        """

    @abstractmethod
    def path(self, version: Version) -> Path:
        """Return the local file of a checkpoint.

        Raises:
            Refused: it cannot be fetched, but the source can be listed.
            Unreachable: nothing can be fetched.
        """

    @abstractmethod
    def holds(self, version: Version) -> bool:
        """Return whether the local file is still there, and that of this stamp."""

    @abstractmethod
    def keep(self, versions: Collection[Version]) -> None:
        """Delete local copies of all other checkpoints."""


def _shown(name: str) -> str:
    """Return a file's name with escapes; those of two files differ."""
    return visible(name.replace("\\", "\\\\"))


class LocalFolder(Source):
    """The folder of a run, or of checkpoints.

    Args:
        folder: the folder.
        single: the only file, which is replaced by each new checkpoint; None takes all.
    """

    remote = False

    def __init__(self, folder: Path, single: Path | None = None) -> None:
        self.folder = folder
        self.single = single
        self.paths: dict[str, Path] = {}  # by name

    def stamps(self) -> dict[str, Stamp]:
        """Return the stamp of each file by its path in the folder, which any page can show."""
        paths = [*self.folder.glob("*.ckpt"), *self.folder.glob("checkpoints/**/*.ckpt")]
        paths = [self.single] if self.single else paths
        found = {path: stamp for path in paths if (stamp := stamp_of(path))}
        self.paths = {_shown(path.relative_to(self.folder).as_posix()): path for path in found}
        return {name: found[path] for name, path in self.paths.items()}

    def path(self, version: Version) -> Path:
        """Return the file."""
        return self.paths.get(version[0], self.folder / version[0])

    def holds(self, version: Version) -> bool:
        """Return whether the file has not changed."""
        return stamp_of(self.path(version)) == version[1]

    def keep(self, versions: Collection[Version]) -> None:
        """Do nothing: there are no copies."""


class RemoteSource(Source):
    """A source whose checkpoints are fetched into a cache, one folder for each.

    The folder's name is a digest of the checkpoint's name and stamp, so that none is fetched twice.

    Args:
        cache: folder of the copies.
    """

    remote = True

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.empty: set[Version] = set()  # fetched, but without a checkpoint

    @abstractmethod
    def fetch(self, version: Version, folder: Path) -> None:
        """Write a checkpoint, and its manifest if there is one, into a folder under its name.

        Raises:
            Refused: it cannot be fetched, but the source can be listed.
            Unreachable: nothing can be fetched.
            InputError: it was replaced since it was listed.
        """

    def path(self, version: Version) -> Path:
        """Return the local copy of a checkpoint, which is fetched if necessary.

        Raises:
            Refused: it cannot be fetched, but the source can be listed.
            Unreachable: nothing can be fetched.
            InputError: it was replaced, or is no checkpoint.
        """
        if not self.holds(version):
            self._fill(self._place(version), version)
            if not self._file(version).exists():
                self.empty.add(version)
        if version in self.empty:
            raise InputError(f"{version[0]} has not exactly one file of the kind .ckpt")
        return self._file(version)

    def _fill(self, place: Path, version: Version) -> None:
        """Fetch a checkpoint into its folder, of which others may have deleted the files."""
        draft = self.cache / "draft"  # one monitor writes here: see the lock of the history
        try:
            for old in (draft, place):
                shutil.rmtree(old, ignore_errors=True)
            draft.mkdir(parents=True)
            self.fetch(version, draft)
            draft.rename(place)
        except OSError as error:
            raise Unreachable(f"{version[0]} cannot be fetched: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # a part of a file would fill the disk

    def holds(self, version: Version) -> bool:
        """Return whether the copy is there."""
        return version in self.empty or self._file(version).exists()

    def keep(self, versions: Collection[Version]) -> None:
        """Delete all other copies."""
        kept = {self._place(version) for version in versions}
        for place in self.cache.iterdir() if self.cache.exists() else ():
            if place not in kept:
                shutil.rmtree(place, ignore_errors=True)

    def _file(self, version: Version) -> Path:
        return self._place(version) / Path(version[0]).name

    def _place(self, version: Version) -> Path:
        text = json.dumps([version[0], list(version[1])])
        return self.cache / hashlib.sha256(text.encode()).hexdigest()[:32]
