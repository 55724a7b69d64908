"""Files that are never there in part, whatever kills the writer."""

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under another name, to the disk, and then give it its own.

    Args:
        path: where it is to be; its folder is made.
        write: writes it to the path it is given.

    Raises:
        OSError: no space, or no right to write; what was at `path` is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(draft)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say which
        raise
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def threads_may_fail() -> Iterator[None]:
    """Raise here what a thread cannot write, such as TensorBoard's, instead of a traceback there.

    Raises:
        OSError: so it was.
    """
    before, failed = threading.excepthook, list[OSError]()

    def note(told: Any) -> None:
        if isinstance(told.exc_value, OSError) and told.exc_value.errno in UNWRITABLE:
            failed.append(told.exc_value)
        else:
            before(told)

    threading.excepthook = note
    try:
        yield
    finally:
        threading.excepthook = before
    if failed:
        raise failed[0]


def save_whole(content: object, path: Path) -> None:
    """`torch.save` by `write_whole`."""
    # Straight to a full disk torch says "unexpected pos 576 vs 534".
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_whole(path, lambda draft: draft.write_bytes(buffer.getbuffer()))


def write_text_whole(path: Path, text: str) -> None:
    """A text file by `write_whole`."""
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8", newline="\n"))
