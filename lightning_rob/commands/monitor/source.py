"""Sources of checkpoints: a local folder, a bucket, a registered model."""

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from lightning_rob.commands.monitor.urls import parse_model
from lightning_rob.runtime.errors import InputError, reason_of, visible
from lightning_rob.runtime.files import UNWRITABLE, stamp_of

Stamp = tuple[Any, ...]  # changes when a checkpoint does; can be written as JSON

USER_INFO, QUERY = re.compile(r"(://)[^/\s]*@"), re.compile(r"(://[^\s?]*\?)\S+")
CHECKPOINT = re.compile(r"(checkpoints/(.*/)?)?[^/]+\.ckpt")  # as in a local run
CHANGES = (  # fields of an object, as file systems call them, that show that it was replaced
    *("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "Last-Modified"),
    *("LastModified", "updated", "last_modified", "mtime", "modified", "modify", "created"),
)


def without_secrets(text: str) -> str:
    """Return the text of a package's error without user info and queries of URLs in it."""
    return QUERY.sub(r"\1…", USER_INFO.sub(r"\1", text))


class Unreachable(InputError):
    """A source cannot be listed or read now, but perhaps later."""

    def __init__(self, reason: str) -> None:
        super().__init__(without_secrets(reason))  # it may name a server with its password


class Replaced(InputError):
    """A checkpoint was replaced or deleted while it was read."""


@contextmanager
def reaching(what: str) -> Iterator[None]:
    """Turn any exception of a package in a block into `Unreachable`, which begins with `what`."""
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) in UNWRITABLE:
            raise
        raise Unreachable(f"{what}: {reason_of(error)}") from error


class Source(ABC):
    """A place where checkpoints appear, are replaced and deleted."""

    @abstractmethod
    def stamps(self) -> dict[str, Stamp]:
        """Return the stamp of each checkpoint by name; raise `Unreachable` if it cannot."""

    @abstractmethod
    def local(self, name: str, stamp: Stamp) -> AbstractContextManager[Path]:
        """Give the path of a checkpoint's file during a block."""


class LocalFolder(Source):
    """The folder of a run or of checkpoints, or a single file that is replaced by each new one."""

    def __init__(self, folder: Path, single: Path | None = None) -> None:
        self.folder, self.single = folder, single
        self.paths: dict[str, Path] = {}  # by name

    def stamps(self) -> dict[str, Stamp]:
        paths = [*self.folder.glob("*.ckpt"), *self.folder.glob("checkpoints/**/*.ckpt")]
        if self.single:
            paths = [self.single]
        # Backslashes are doubled first, so that the escaped names of two files differ.
        self.paths = {
            visible(path.relative_to(self.folder).as_posix().replace("\\", "\\\\")): path
            for path in paths
            if stamp_of(path)
        }
        return {name: _stamp(path) for name, path in self.paths.items()}

    @contextmanager
    def local(self, name: str, stamp: Stamp) -> Iterator[Path]:
        path = self.paths[name]
        replaced = Replaced(f"{name} was replaced while it was read")
        try:
            yield path
        except Exception as error:
            if _stamp(path) != stamp:
                raise replaced from error
            raise
        if _stamp(path) != stamp:
            raise replaced


def _stamp(path: Path) -> Stamp:
    return stamp_of(path) or ()


class RemoteSource(Source):
    """A source whose checkpoints are fetched into a folder, one at a time, while they are read."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    @abstractmethod
    def fetch(self, name: str, stamp: Stamp) -> None:
        """Write a checkpoint into the cache."""

    @contextmanager
    def local(self, name: str, stamp: Stamp) -> Iterator[Path]:
        try:
            shutil.rmtree(self.cache, ignore_errors=True)  # a kill may have left a part
            self.cache.mkdir(parents=True)
            self.fetch(name, stamp)
            yield self.cache / PurePosixPath(name).name
        finally:
            shutil.rmtree(self.cache, ignore_errors=True)


class Bucket(RemoteSource):
    """A folder of checkpoints, or a single one, at a URL of fsspec such as `s3://bucket/run`."""

    def __init__(self, url: str, cache: Path) -> None:
        super().__init__(cache)
        from fsspec.core import url_to_fs  # not needed for a local folder

        self.url = url
        with reaching(f"{url} cannot be opened"):
            self.files, self.root = url_to_fs(url)
        # The path of http is the whole URL, whose two slashes a `PurePosixPath` would join.
        folder, _, name = self.root.rpartition("/")
        self.single = name if name.endswith(".ckpt") else ""
        self.top = folder if self.single else self.root.rstrip("/")

    def stamps(self) -> dict[str, Stamp]:
        infos = self._listed()
        found: dict[str, Stamp] = {}
        for name in filter(CHECKPOINT.fullmatch, infos):
            info = infos[name]
            change = next((info[key] for key in CHANGES if info.get(key)), "")
            if not change:
                raise Unreachable(
                    f"{self.url}: neither an ETag nor a time of change is known of {name}, so that "
                    "one that replaces it would not be noticed"
                )
            found[name] = str(change), info.get("size", 0)
        return found

    def fetch(self, name: str, stamp: Stamp) -> None:
        with reaching(f"{self.url}: {name} cannot be fetched"):
            target = self.cache / PurePosixPath(name).name
            self.files.get_file(f"{self.top}/{name}", str(target))
        if self.stamps().get(name) != stamp:
            raise Replaced(f"{self.url}: {name} was replaced while it was fetched")

    def _listed(self) -> dict[str, dict[str, Any]]:
        with reaching(f"{self.url} cannot be listed"):
            self.files.invalidate_cache()
            if not self.single:
                found = self.files.find(self.root, detail=True)
                return {place.removeprefix(f"{self.top}/"): found[place] for place in found}
            return {self.single: self.files.info(self.root)}


class RegisteredModel(RemoteSource):
    """The version of a registered model of MLflow that an alias names; another one is new."""

    def __init__(self, url: str, cache: Path) -> None:
        super().__init__(cache)
        import mlflow  # an extra

        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        self.url = url
        self.model, self.alias = parse_model(url)
        self.download = mlflow.artifacts.download_artifacts
        with reaching(f"{url} cannot be opened"):
            # The server is that of MLFLOW_TRACKING_URI or MLFLOW_REGISTRY_URI.
            self.client: Any = mlflow.MlflowClient()

    def stamps(self) -> dict[str, Stamp]:
        with reaching(f"{self.url} cannot be read"):
            found = self.client.get_model_version_by_alias(self.model, self.alias)
        number = str(found.version)
        return {f"{self.model}-v{number}.ckpt": (number, found.creation_timestamp)}

    def fetch(self, name: str, stamp: Stamp) -> None:
        with reaching(f"{self.url}: version {stamp[0]}"):
            self.download(f"models:/{self.model}/{stamp[0]}", dst_path=str(self.cache))
        found = list(self.cache.rglob("*.ckpt"))
        if len(found) != 1:
            held = sorted(path.name for path in self.cache.rglob("*") if path.is_file())
            raise InputError(
                f"{name}: a version must hold one file *.ckpt, this one holds {held or 'no file'}"
            )
        found[0].rename(self.cache / name)
