"""Sources of checkpoints: a local folder, a bucket, a registered model."""

import hashlib
import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from lightning_rob.commands.locations import parse_model
from lightning_rob.runtime.errors import InputError, visible
from lightning_rob.runtime.files import UNWRITABLE, manifest_name, stamp_of

Stamp = tuple[Any, ...]  # changes when a checkpoint does; can be written as JSON
Version = tuple[str, Stamp]  # name and stamp of a checkpoint
Info = Mapping[str, Any]  # of an object, as fsspec has it; names differ between file systems

USER_INFO, QUERY = re.compile(r"(://)[^/\s]*@"), re.compile(r"(://[^\s?]*\?)\S+")
SUFFIX = ".ckpt"
CHECKPOINT = re.compile(r"(checkpoints/(.*/)?)?[^/]+\.ckpt")  # as in a local run
ETAGS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "Last-Modified")
TIMES = ("LastModified", "updated", "last_modified", "mtime", "modified", "modify", "created")


def without_secrets(text: str) -> str:
    """Return the text of a package's error without user info and queries of URLs in it."""
    return QUERY.sub(r"\1…", USER_INFO.sub(r"\1", text))


class Unreachable(InputError):
    """A source that cannot be listed or read now, and perhaps later.

    Args:
        reason: cause, which may quote an error that names a server with its password.
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
        """Return the stamp of each checkpoint by name.

        Raises:
            Unreachable: the source cannot be listed.
        """

    @abstractmethod
    def path(self, version: Version) -> Path:
        """Return the local file of a checkpoint, which is fetched if necessary.

        Raises:
            Refused: it cannot be fetched, but the source can be listed.
            Unreachable: nothing can be fetched.
            InputError: it was replaced since it was listed, or is no checkpoint.
        """

    @abstractmethod
    def holds(self, version: Version) -> bool:
        """Return whether the local file is still there, and that of this stamp."""

    @abstractmethod
    def keep(self, versions: Collection[Version]) -> None:
        """Delete local copies of all other checkpoints."""


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
        found = {
            p: stamp for p in ([self.single] if self.single else paths) if (stamp := stamp_of(p))
        }
        # Backslashes are doubled first, so that the escaped names of two files differ.
        name = {
            p: visible(p.relative_to(self.folder).as_posix().replace("\\", "\\\\")) for p in found
        }
        self.paths = {name[path]: path for path in found}
        return {name[path]: stamp for path, stamp in found.items()}

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
    A cache of fsspec would lose the manifest, which has to lie beside its checkpoint.

    Args:
        cache: folder of the copies.
    """

    remote = True

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    @abstractmethod
    def fetch(self, version: Version, folder: Path) -> None:
        """Write a checkpoint, and its manifest if there is one, into a folder under its name."""

    def path(self, version: Version) -> Path:
        """Return the local copy of a checkpoint, which is fetched if necessary."""
        if self.holds(version):
            return self._file(version)
        draft, place = self.cache / "draft", self._file(version).parent
        try:
            for old in (draft, place):  # the latter where a cleaner deleted the files in it
                shutil.rmtree(old, ignore_errors=True)
            draft.mkdir(parents=True)
            self.fetch(version, draft)
            draft.rename(place)
        except OSError as error:
            raise Unreachable(f"{version[0]} cannot be fetched: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # a part of a file would fill the disk
        return self._file(version)

    def holds(self, version: Version) -> bool:
        """Return whether the copy is there."""
        return self._file(version).exists()

    def keep(self, versions: Collection[Version]) -> None:
        """Delete all other copies."""
        kept = {self._file(version).parent for version in versions}
        for place in self.cache.iterdir() if self.cache.exists() else ():
            if place not in kept:
                shutil.rmtree(place, ignore_errors=True)

    def _file(self, version: Version) -> Path:
        text = json.dumps([version[0], list(version[1])])
        place = self.cache / hashlib.sha256(text.encode()).hexdigest()[:32]
        return place / PurePosixPath(version[0]).name


class Bucket(RemoteSource):
    """A folder of checkpoints, or a single one, at a URL of fsspec such as `s3://bucket/run`.

    Args:
        url: folder, or a file `.ckpt` that is replaced by each new checkpoint.
        cache: folder of the copies.

    Raises:
        Unreachable: the file system cannot be opened.
    """

    def __init__(self, url: str, cache: Path) -> None:
        super().__init__(cache)
        from fsspec.core import url_to_fs  # not needed for a local folder

        self.url = url
        try:
            self.files, self.root = url_to_fs(url)
        except Exception as error:  # of any package
            raise Unreachable(f"{url} cannot be opened: {_reason(error)}") from error
        # Of http the path is the whole URL, whose two slashes a `PurePosixPath` would join.
        folder, _, name = self.root.rpartition("/")
        self.single = name if name.endswith(SUFFIX) else ""
        self.top = folder if self.single else self.root.rstrip("/")
        self.infos: dict[str, Info] = {}  # as last listed, by name

    def stamps(self) -> dict[str, Stamp]:
        """Return the stamp of each object by its path below the URL."""
        self.infos = self._listed()
        names = [name for name in self.infos if CHECKPOINT.fullmatch(name)]
        for name in names:
            if not any(self.infos[name].get(key) for key in (*ETAGS, *TIMES)):
                raise Unreachable(
                    f"{self.url}: neither an ETag nor a time of change is known of {name}, so that "
                    "one that replaces it would not be noticed"
                )
        return {name: self._stamp(name) for name in names}

    def fetch(self, version: Version, folder: Path) -> None:
        """Write an object and its manifest into a folder."""
        name, stamp = version
        try:
            for part in (name, _manifest_of(name)):
                if part in self.infos:
                    target = folder / PurePosixPath(part).name
                    self.files.get_file(f"{self.top}/{part}", str(target))
        except Exception as error:  # of any package
            self._listed()  # raises the error of a bucket that is away as a whole
            full = isinstance(error, OSError) and error.errno in UNWRITABLE
            kind = Unreachable if full else Refused
            raise kind(f"{self.url}: {name} cannot be fetched: {_reason(error)}") from error
        self.infos = self._listed()
        if name not in self.infos or self._stamp(name) != stamp:
            raise InputError(f"{self.url}: {name} was replaced while it was fetched")

    def _listed(self) -> dict[str, Info]:
        """Return what is known of each object by its name."""
        try:
            self.files.invalidate_cache()
            if not self.single:
                found = self.files.find(self.root, detail=True)
                return {place.removeprefix(f"{self.top}/"): found[place] for place in found}
            infos = {self.single: self.files.info(self.root)}
            with suppress(FileNotFoundError):
                manifest = manifest_name(self.single)
                infos[manifest] = self.files.info(f"{self.top}/{manifest}")
            return infos
        except FileNotFoundError as error:
            raise Unreachable(f"{self.url} is not there: {_reason(error)}") from error
        except Exception as error:  # of any package
            raise Unreachable(f"{self.url} cannot be listed: {_reason(error)}") from error

    def _stamp(self, name: str) -> Stamp:
        """Return ETag, or else time of change, and size of an object and of its manifest."""
        known = [self.infos[part] for part in (name, _manifest_of(name)) if part in self.infos]
        tags = [next((str(info[k]) for k in ETAGS if info.get(k)), None) for info in known]
        pairs = zip(tags, known, strict=True)
        return tuple(
            part for tag, info in pairs for part in (tag or _time(info), info.get("size", 0))
        )


def _manifest_of(name: str) -> str:
    return str(PurePosixPath(name).with_name(manifest_name(PurePosixPath(name).name)))


def _time(info: Info) -> float:
    """Return the time of an object's last change, Unix time; 0 where it is not known."""
    value = next((info[key] for key in TIMES if info.get(key)), 0.0)
    if isinstance(value, str):
        # FTP has digits alone, which are no ISO date without a T.
        value = datetime.fromisoformat(re.sub(r"^(\d{8})(\d{6})", r"\1T\2", value))
    return value.timestamp() if isinstance(value, datetime) else float(value)


def _reason(error: Exception) -> str:
    """Return an error's type and first line."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


class RegisteredModel(RemoteSource):
    """The version of a registered model of MLflow that an alias names; another one is new.

    The server is that of the environment, `MLFLOW_TRACKING_URI` or `MLFLOW_REGISTRY_URI`.

    Args:
        url: `mlflow:models/NAME@ALIAS`.
        cache: folder of the copies.

    Raises:
        Unreachable: there is no such server.
    """

    def __init__(self, url: str, cache: Path) -> None:
        super().__init__(cache)
        import mlflow  # an extra

        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        self.url = url
        self.model, self.alias = parse_model(url)
        self.download = mlflow.artifacts.download_artifacts
        try:
            self.client: Any = mlflow.MlflowClient()
        except Exception as error:  # of any store
            raise Unreachable(f"{url} cannot be opened: {error}") from error

    def stamps(self) -> dict[str, Stamp]:
        """Return number and date of the version that the alias names."""
        try:
            found = self.client.get_model_version_by_alias(self.model, self.alias)
        except Exception as error:  # of any store
            raise Unreachable(f"{self.url} cannot be read: {error}") from error
        number = str(found.version)
        return {f"{self.model}-v{number}{SUFFIX}": (number, found.creation_timestamp)}

    def fetch(self, version: Version, folder: Path) -> None:
        """Write the checkpoint of a version into a folder.

        Raises:
            InputError: it does not have exactly one.
        """
        name, (number, _) = version
        try:
            self.download(f"models:/{self.model}/{number}", dst_path=str(folder))
        except Exception as error:  # of any store
            raise Unreachable(f"{self.url}: version {number}: {error}") from error
        found = list(folder.rglob(f"*{SUFFIX}"))
        if len(found) != 1:
            raise InputError(f"{name} has not exactly one file of the kind {SUFFIX}")
        found[0].rename(folder / name)
