"""URLs of the monitor: remote checkpoints and receivers of notifications, checked before use."""

import hashlib
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from urllib.parse import urlsplit

MODEL = re.compile(r"mlflow:models/([^/:@]+)@([\w.-]+)")
WEB = ("http", "https")
HOST = re.compile(r"[\w.:\[\]%-]*")
AUTHORIZATION = "LIGHTNING_ROB_NOTIFY_AUTHORIZATION"  # environment variable: the header's value


def parse_model(url: str) -> tuple[str, str]:
    """Return name and alias of a registered model."""
    found = MODEL.fullmatch(url)
    if found is None:
        raise ValueError(f"a registered model is mlflow:models/NAME@ALIAS, got {url}")
    return found[1], found[2]


def check_remote(url: str) -> None:
    """Refuse a place whose checkpoints cannot be read."""
    if url.startswith("mlflow:"):
        parse_model(url)
        if find_spec("mlflow") is None:
            raise ValueError(f"{url} needs mlflow: pip install 'lightning-rob[mlflow]'")
        return
    from fsspec import get_filesystem_class  # not needed for a local folder

    parts = urlsplit(url)
    if "::" in url:
        raise ValueError(
            f"{parts.scheme}::… is a chain of URLs, and a cache in it would hide new checkpoints: "
            "give the URL of the file system alone"
        )
    if "@" in parts.netloc or parts.query:
        raise ValueError(
            f"{parts.scheme}://… has user info or a query, which is recorded and printed: leave "
            "credentials to the configuration of the file system's package"
        )
    try:
        get_filesystem_class(parts.scheme)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{url} cannot be read: {error}") from error


def public_name(url: str) -> str:
    """Return a URL without user info, path and query, in which chat services have secrets."""
    parts = urlsplit(url)
    if parts.scheme not in WEB:
        return f"{parts.scheme}://…"
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    return place + ("/…" if parts.path.strip("/") or parts.query else "")


def receiver_name(url: str) -> str:
    """Return a printable URL with a digest of what it leaves out, so that names differ."""
    name = public_name(url)
    digest = hashlib.sha256(url.encode()).hexdigest()[:6]
    return f"{name} {digest}" if name.endswith("…") else name


def check_destinations(urls: Sequence[str]) -> None:
    """Refuse URLs that cannot be notified; no error contains a secret."""
    hosts = set()
    for url in urls:
        try:
            parts = urlsplit(url)
            is_web = parts.scheme in WEB
            host = parts.netloc.rpartition("@")[2] if is_web else ""
            complete = bool(parts.hostname) and parts.port != 0 if is_web else bool(parts.scheme)
        except ValueError:  # such as of a port that is no number
            complete = False
        readable = url.isascii() and url.isprintable() and " " not in url and "://" in url
        if not (complete and readable and HOST.fullmatch(host)):
            # A host of other characters, which is printed, might hold a part of the path.
            raise ValueError(
                "--notify takes a URL such as https://host/path, in ASCII without spaces"
            )
        if is_web and "@" in parts.netloc:
            raise ValueError(
                f"--notify {public_name(url)} has user info, which every user of the machine can "
                f"see: put the Authorization header into the environment variable {AUTHORIZATION}"
            )
        if not is_web and find_spec("apprise") is None:
            raise ValueError(
                f"--notify {public_name(url)} needs apprise: pip install 'lightning-rob[notify]'"
            )
        hosts |= {host} if is_web else set()
    if authorization() and len(hosts) > 1:
        raise ValueError(
            f"--notify: {AUTHORIZATION} is the secret of one host, got {', '.join(sorted(hosts))}"
        )


def authorization() -> str | None:
    """Return the secret for the Authorization header; None without one."""
    secret = os.environ.get(AUTHORIZATION, "").strip()
    if not (secret.isascii() and secret.isprintable()):
        raise ValueError(f"{AUTHORIZATION} must be one line of ASCII, such as 'Bearer …'")
    return secret or None
