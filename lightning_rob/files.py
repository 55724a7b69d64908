"""Files that are never there in part, whatever kills the writer."""

import io
import os
from collections.abc import Callable
from pathlib import Path

import torch


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


def save_whole(content: object, path: Path) -> None:
    """`torch.save` by `write_whole`."""
    # Straight to a full disk torch says "unexpected pos 576 vs 534".
    buffer = io.BytesIO()
    torch.save(content, buffer)
    write_whole(path, lambda draft: draft.write_bytes(buffer.getbuffer()))


def write_text_whole(path: Path, text: str) -> None:
    """A text file by `write_whole`."""
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8", newline="\n"))
