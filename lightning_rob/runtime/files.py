"""Files that a killed writer never leaves half written, and checks of files of others."""

import errno
import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
Stamp = tuple[int, int, int]  # inode, bytes, time of change


def atomic_write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, flush it to the disk, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Lightning takes the digits in any name with "ckpt_" for the number of a checkpoint.
    draft = path.with_name(f".{path.name.replace('ckpt_', 'ckpt-')}.{os.getpid()}.part")
    draft.unlink(missing_ok=True)  # it may be a link to another file
    try:
        write(draft)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not name the file
        raise
    finally:
        draft.unlink(missing_ok=True)


def atomic_save(content: object, path: Path) -> None:
    """Write by `torch.save` through `atomic_write`."""
    import torch  # a report reads records without it

    # Writing straight to a full disk, torch only reports "unexpected pos 576 vs 534".
    buffer = io.BytesIO()
    torch.save(content, buffer)
    # Python 3.13 warns of a `getbuffer` that the traceback of a failed write still holds.
    atomic_write(path, lambda draft: draft.write_bytes(buffer.getvalue()))


def atomic_write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file through `atomic_write`."""
    atomic_write(path, lambda draft: draft.write_text(text, encoding="utf-8", newline="\n"))


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file, all of them or none; they are on the disk when this returns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = "".join(f"{line}\n" for line in lines).encode()
    with path.open("ab+", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        if file.read(1) not in (b"", b"\n"):
            content = b"\n" + content  # end the line that a crash cut off
        append_whole(file, content)


def append_whole(file: IO[bytes], content: bytes) -> None:
    """Append to an open, unbuffered file: all of the content or, after an error, none."""
    end = file.seek(0, os.SEEK_END)
    try:
        while content:  # a disk that fills takes a part first
            content = content[file.write(content) :]
        os.fsync(file.fileno())
    except OSError as error:
        file.truncate(end)
        error.filename = error.filename or str(file.name)
        raise


def is_file(value: str) -> bool:
    """Return whether a text names a file."""
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # longer than any name, or with a null byte
        return False


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file of JSON lines, if there is one; skip a line that was cut off."""
    for line in path.read_text("utf-8", "replace").splitlines() if path.is_file() else ():
        try:
            content = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(content, dict):
            yield content


def stamp_of(path: Path) -> Stamp | None:
    """Return values that change when the file does; None without a file."""
    try:
        state = path.stat()
    except OSError:
        return None
    return (state.st_ino, state.st_size, state.st_mtime_ns) if path.is_file() else None


def check_regular(path: Path) -> None:
    """Refuse a FIFO, device or socket, whose reading may wait for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path} is not a regular file but a folder, a FIFO or a device")


def digest(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path) -> None:
    """Refuse a file that is obviously no checkpoint, or damaged, which torch does not look for."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a PyTorch checkpoint: name the file in it")
    check_regular(path)
    with path.open("rb") as file:
        start = file.read(200).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    reason = ""
    if not start:
        reason = "it is empty"
    elif start.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        reason = "it is an HTML page, as a failed download leaves it; fetch the file itself"
    elif start.startswith(b"version https://git-lfs"):
        reason = "it is a pointer of Git LFS; run git lfs pull"
    if reason:
        raise ValueError(f"{path} is not a PyTorch checkpoint: {reason}")
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except zipfile.BadZipFile as error:
        broken = str(error)
    if broken:
        raise ValueError(f"{path} is damaged ({broken}): fetch it again or take another")
