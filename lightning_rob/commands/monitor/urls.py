"""URLs of the monitor: remote checkpoints and receivers of notifications, checked before use."""

import hashlib
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from urllib.parse import urlsplit

MODEL = re.compile(r"mlflow:models/([^/:@]+)@([\w.-]+)")
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


def receiver_name(url: str) -> str:
    """Return a URL without user info, path and query, which may be secrets, and their digest."""
    parts = urlsplit(url)
    place = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
    if not (parts.path.strip("/") or parts.query):
        return place
    return f"{place}/… {hashlib.sha256(url.encode()).hexdigest()[:6]}"


def check_destinations(urls: Sequence[str]) -> None:
    """Refuse URLs that cannot be notified; no error contains a secret."""
    hosts = set()
    for url in urls:
        scheme, _, rest = url.partition("://")
        host = re.split(r"[/?#]", rest)[0]
        if scheme not in ("http", "https") or not host:
            raise ValueError("--notify takes a URL such as https://host/path")
        if "@" in host:
            raise ValueError(
                f"--notify {receiver_name(url)} has user info, which every user of the machine can "
                f"see: put the Authorization header into the environment variable {AUTHORIZATION}"
            )
        hosts.add(host)
    if os.environ.get(AUTHORIZATION) and len(hosts) > 1:
        raise ValueError(
            f"--notify: {AUTHORIZATION} is the secret of one host, got {', '.join(sorted(hosts))}"
        )
