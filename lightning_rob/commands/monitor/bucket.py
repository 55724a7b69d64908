"""Checkpoints in a bucket, or in any other file system of fsspec."""

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any

from fsspec.core import url_to_fs

from lightning_rob.commands.monitor.source import (
    Refused,
    RemoteSource,
    Stamp,
    Unreachable,
    Version,
)
from lightning_rob.errors import InputError
from lightning_rob.files import UNWRITABLE, manifest_name

SUFFIX = ".ckpt"
CHECKPOINT = re.compile(r"(checkpoints/(.*/)?)?[^/]+\.ckpt")  # as in a local run
ETAGS = ("ETag", "etag", "md5Hash", "content_md5", "Content-MD5", "Digest", "Last-Modified")
TIMES = ("LastModified", "updated", "last_modified", "mtime", "modified", "modify", "created")
Info = Mapping[str, Any]  # of an object, as fsspec has it; names differ between file systems


class Bucket(RemoteSource):
    """A folder of checkpoints, or a single one, at a URL of fsspec such as `s3://bucket/run`.

    Args:
        url: of the folder, or of a file `.ckpt` that is replaced by each new checkpoint.
        cache: folder of the copies.

    Raises:
        Unreachable: the file system cannot be opened.
    """

    def __init__(self, url: str, cache: Path) -> None:
        super().__init__(cache)
        self.url = url
        try:
            self.files, self.root = url_to_fs(url)
        except Exception as error:  # of any package
            raise Unreachable(f"{url} cannot be opened: {_reason(error)}") from error
        self.infos: dict[str, Info] = {}  # as last listed, by name

    def stamps(self) -> dict[str, Stamp]:
        """Return the stamp of each object by its path below the URL, the oldest first."""
        self.infos = self._listed()
        names = [name for name in self.infos if CHECKPOINT.fullmatch(name)]
        for name in names:
            if not any(self.infos[name].get(key) for key in (*ETAGS, *TIMES)):
                raise Unreachable(
                    f"{self.url}: neither an ETag nor a time of change is known of {name}, so that "
                    "one that replaces it would not be noticed"
                )
        names.sort(key=lambda name: (_time(self.infos[name]), name))
        return {name: self._stamp(name) for name in names}

    def fetch(self, version: Version, folder: Path) -> None:
        """Write an object and its manifest into a folder."""
        name, stamp = version
        try:
            for part in (name, _manifest_of(name)):
                if part in self.infos:
                    self.files.get_file(self._place_of(part), str(folder / Path(part).name))
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
            if self.root.endswith(SUFFIX):
                return self._single()
            found = self.files.find(self.root, detail=True)
            top = self.root.rstrip("/") + "/"
            return {place.removeprefix(top): info for place, info in found.items()}
        except FileNotFoundError as error:
            raise Unreachable(f"{self.url} is not there: {_reason(error)}") from error
        except Exception as error:  # of any package
            raise Unreachable(f"{self.url} cannot be listed: {_reason(error)}") from error

    def _single(self) -> dict[str, Info]:
        """Return what is known of the only object, and of its manifest if there is one."""
        name = PurePosixPath(self.root).name
        found = {name: self.files.info(self.root)}
        with suppress(FileNotFoundError):
            manifest = manifest_name(name)
            found[manifest] = self.files.info(self.root.removesuffix(name) + manifest)
        return found

    def _place_of(self, name: str) -> str:
        """Return the path of an object in its file system."""
        single = self.root.endswith(SUFFIX)
        # Of http the path is the whole URL, whose two slashes a `PurePosixPath` would join.
        folder = self.root.rpartition("/")[0] if single else self.root.rstrip("/")
        return f"{folder}/{name}"

    def _stamp(self, name: str) -> Stamp:
        """Return what changes when an object or its manifest does."""
        infos = (self.infos.get(part, {}) for part in (name, _manifest_of(name)))
        return tuple(part for info in infos for part in _version(info))


def _manifest_of(name: str) -> str:
    return str(PurePosixPath(name).with_name(manifest_name(PurePosixPath(name).name)))


def _version(info: Info) -> tuple[Any, ...]:
    """Return the ETag of an object, or the time of its last change, and its size."""
    tag = next((str(info[key]) for key in ETAGS if info.get(key)), None)
    return (tag or _time(info), info.get("size", 0)) if info else ()


def _time(info: Info) -> float:
    """Return the time of an object's last change, Unix time; 0 where it is not known."""
    value = next((info[key] for key in TIMES if info.get(key)), 0.0)
    if isinstance(value, str):
        # FTP has digits alone, which are no ISO date without a T.
        value = datetime.fromisoformat(re.sub(r"^(\d{8})(\d{6})", r"\1T\2", value))
    return value.timestamp() if isinstance(value, datetime) else float(value)


def _reason(error: Exception) -> str:
    """Return an error's first line, with its type."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
