"""Files that lie in installed packages, found without importing these."""

from importlib.util import find_spec
from pathlib import Path


def inside(package: str, path: str) -> Path:
    """A file that an installed package carries.

    Raises:
        ModuleNotFoundError: the package is not installed.
        FileNotFoundError: it does not carry the file.
    """
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"{path} comes with {package}, which is not installed")
    file = Path(spec.origin).parent / path
    if not file.is_file():
        raise FileNotFoundError(f"{package} should carry {path}, but there is no {file}")
    return file
