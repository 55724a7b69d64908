"""URLs of the monitor: remote checkpoints and receivers of notifications, checked before use."""

import hashlib
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from urllib.parse import urlsplit

MODEL = re.compile(r"mlflow:models/([^/:@]+)@([\w.-]+)")
WEB = ("http", "https")
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

    scheme = urlsplit(url).scheme
    if "@" in url or "?" in url:
        raise ValueError(
            f"{scheme}://… has user info or a query, which is recorded and printed: leave "
            "credentials to the configuration of the file system's package"
        )
    try:
        get_filesystem_class(scheme)
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
        scheme, separator, rest = url.partition("://")
        host = re.split(r"[/?#]", rest)[0]
        if not (scheme and separator and (host or scheme not in WEB)):
            raise ValueError("--notify takes a URL such as https://host/path")
        if scheme in WEB and "@" in host:
            raise ValueError(
                f"--notify {public_name(url)} has user info, which every user of the machine can "
                f"see: put the Authorization header into the environment variable {AUTHORIZATION}"
            )
        if scheme not in WEB and find_spec("apprise") is None:
            raise ValueError(
                f"--notify {scheme}://… needs apprise: pip install 'lightning-rob[notify]'"
            )
        hosts |= {host} if scheme in WEB else set()
    if os.environ.get(AUTHORIZATION) and len(hosts) > 1:
        raise ValueError(
            f"--notify: {AUTHORIZATION} is the secret of one host, got {', '.join(sorted(hosts))}"
        )
