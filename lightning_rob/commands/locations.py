"""Places of remote checkpoints, checked before anything is fetched."""

import re
from importlib.util import find_spec
from urllib.parse import urlsplit

MODEL = re.compile(r"mlflow:models/([^/:@]+)@([\w.-]+)")


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
