"""The recipes, plug-ins and trained networks that are shipped with the package, by short name."""

import re
from pathlib import Path

import lightning_rob
from lightning_rob.runtime.errors import InputError, nearest

ZOO = "zoo:"  # before the name of a trained network


def shipped_folder() -> Path:
    """Return the folder of `configs`, `callbacks` and `zoo`, in a wheel and in a checkout."""
    package = Path(lightning_rob.__file__).parent
    inside = package / "shipped"
    return inside if inside.is_dir() else package.parent


def find(name: str, *kinds: str, folder: Path | None = None) -> Path | None:
    """Return the file of a path or, if there is none, the shipped one of this short name."""
    if len(name) > 255 or "\0" in name:  # YAML text instead of a name
        return None
    path = (folder or Path()) / name
    if path.is_file():
        return path
    files = (
        shipped_folder() / kind / f"{name}.yaml" for kind in kinds if re.fullmatch(r"\w+", name)
    )
    return next((file for file in files if file.is_file()), None)


def find_recipe(name: str) -> Path | None:
    """Return the file of a recipe or mix-in given by path or short name; None without one."""
    return find(name, "configs", "configs/mixins")


def find_checkpoint(path: str) -> str:
    """Return the file of "zoo:NAME", a trained network that is shipped; any other path as it is."""
    if not path.startswith(ZOO):
        return path
    folder, name = shipped_folder() / "zoo", path.removeprefix(ZOO)
    names = sorted(network.name for network in folder.iterdir())
    if name not in names:
        known = [f"{ZOO}{network}" for network in names]
        raise InputError(
            f"there is no network {path}" + nearest(path, known, f": {', '.join(known)}")
        )
    return str(folder / name / "checkpoints/last.ckpt")
