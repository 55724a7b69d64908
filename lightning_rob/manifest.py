"""SHA-256 manifests beside checkpoints, and what is plainly no checkpoint."""

import hashlib
import zipfile
from pathlib import Path

from lightning_rob.files import write_text_whole

SUFFIX = ".sha256"
PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml")


def digest(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_of(path: Path) -> Path:
    """Where the manifest of a file is; of a link, that of what it points at."""
    whole = path.resolve() if path.is_symlink() else path
    return whole.with_name(whole.name + SUFFIX)


def write_manifest(path: Path) -> None:
    """Write a file's digest beside it, as `sha256sum` writes it and `sha256sum -c` reads it."""
    manifest = manifest_of(path)
    name = manifest.name.removesuffix(SUFFIX)
    write_text_whole(manifest, f"{digest(path)}  {name}\n")


def check_manifest(path: Path) -> None:
    """Compare a file with its manifest; nothing to do where there is none.

    Raises:
        ValueError: its bytes are others than those that were written.
    """
    while wanted := _told(path):
        if (found := digest(path)) == wanted:
            return
        # A fit that is running may have replaced the file, and its manifest after it.
        if _told(path) == wanted:
            raise ValueError(
                f"{path} is not the file that was written: its SHA-256 is {found[:12]}…, but "
                f"{manifest_of(path).name} says {wanted[:12]}…; fetch it again or take another"
            )


def _told(path: Path) -> str:
    try:
        words = manifest_of(path).read_text(encoding="ascii", errors="replace").split()
    except FileNotFoundError:
        return ""
    return words[0].lower() if words else "nothing"


def check_file(path: Path) -> None:
    """Refuse what is plainly no checkpoint, or not the one that was written.

    Raises:
        FileNotFoundError: there is nothing.
        ValueError: a folder, empty, an HTML page, a pointer of Git LFS, or changed since.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder, not a PyTorch checkpoint: name the file in it")
    with path.open("rb") as file:
        start = file.read(200).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not start:
        raise ValueError(f"{path} is not a PyTorch checkpoint: it is empty")
    if start.startswith(PAGES):
        raise ValueError(
            f"{path} is not a PyTorch checkpoint: it is an HTML page, as a failed download leaves "
            "it; fetch the file itself"
        )
    if start.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path} is not a PyTorch checkpoint: it is a pointer of Git LFS; run git lfs pull"
        )
    check_manifest(path)
    if not manifest_of(path).exists() and zipfile.is_zipfile(path):
        check_archive(path)


def check_archive(path: Path) -> None:
    """Compare what is in a file of `torch.save` with its checksums, which torch does not.

    Raises:
        ValueError: a part of it has changed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except zipfile.BadZipFile as error:
        broken = str(error)
    if broken:
        raise ValueError(f"{path} is damaged ({broken}): fetch it again or take another")
