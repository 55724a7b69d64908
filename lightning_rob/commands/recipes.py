"""List, show and copy the recipes, plug-ins and trained networks of the package."""

import re
import shutil
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_rob.commands.config import CommandConfig
from lightning_rob.recipes.shipped import shipped_folder
from lightning_rob.runtime.errors import InputError, nearest

FOLDERS = {
    "recipes": ("configs", "fit --config NAME"),
    "mix-ins": ("configs/mixins", "fit --config RECIPE --config NAME"),
    "search spaces": ("configs/spaces", "tune --config RECIPE --space FILE"),
    "plug-ins": ("callbacks", "--trainer.callbacks+=NAME"),
    "trained networks": ("zoo", "test zoo:NAME --trainer.callbacks+=PLUG-IN"),
}
TITLE: dict[str, Any] = {"title_justify": "left", "title_style": "bold"}
CARD = "README.md"  # of a trained network, whose folder is that of a run


@dataclass(frozen=True)
class RecipesConfig(CommandConfig):
    """List the recipes, plug-ins and trained networks that are found by short name.

      lightning-rob recipes                        all, with what each is for
      lightning-rob recipes demo                   print a file; of a network, its card
      lightning-rob recipes demo --copy            write it as demo.yaml here, to be edited
      lightning-rob recipes digits_robust --copy   write the folder of this network's run

    Args:
        names: short names; none lists all
        copy: write the files into the current folder
    """

    positional: ClassVar[str] = "names"
    reads_records: ClassVar[bool] = True
    usage: ClassVar[str] = "[NAME ...] [options]"

    names: tuple[str, ...] = ()
    copy: bool = False

    def __post_init__(self) -> None:
        if self.copy and not self.names:
            raise ValueError("say which recipe to copy: lightning-rob recipes demo --copy")


def run(config: RecipesConfig) -> None:
    """List all files, print those that are named, or copy them into the current folder."""
    if not config.names:
        console = Console()
        for kind, (folder, usage) in FOLDERS.items():
            command = usage if folder == "callbacks" else f"lightning-rob {usage}"
            table = Table(title=f"{kind}: {command}", box=box.SIMPLE_HEAD, **TITLE)
            table.add_column("name", no_wrap=True)
            table.add_column("")
            for name, path in shipped_files(folder).items():
                table.add_row(name, escape(summary(path)))
            console.print(table)
        return
    known: dict[str, Path] = {}
    for folder, _ in FOLDERS.values():
        known = shipped_files(folder) | known  # of equal names the first kind counts
    for name in config.names:
        if name.removesuffix(".yaml") not in known:
            hint = nearest(name, known, ": lightning-rob recipes lists all")
            raise InputError(f"there is no recipe, plug-in or network {name!r}{hint}")
    for path in (known[name.removesuffix(".yaml")] for name in config.names):
        if not config.copy:
            print(path.read_text(encoding="utf-8"), end="")
            continue
        source = path.parent if path.name == CARD else path
        copy = Path(source.name)
        if copy.exists():
            raise InputError(f"{copy} exists already: rename it, or go to another folder")
        if source.is_dir():
            shutil.copytree(source, copy, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(source, copy)  # without its mode: the package may be read-only
        print(f"Wrote {copy}")


def shipped_files(folder: str) -> dict[str, Path]:
    """Return the files of a shipped folder by short name; of trained networks, their cards."""
    place = shipped_folder() / folder
    if folder == "zoo":
        return {path.parent.name: path for path in sorted(place.glob(f"*/{CARD}"))}
    return {path.stem: path for path in sorted(place.glob("*.yaml"))}


def summary(path: Path) -> str:
    """Return the first sentence of a file's comment; of a card, the one below its title."""
    text = path.read_text(encoding="utf-8")
    text = "# " + text.split("\n\n")[1] if path.name == CARD else text
    lines = takewhile(lambda line: line.startswith("#"), text.splitlines())
    comment = " ".join(line.lstrip("# ") for line in lines).removeprefix("Mix-in: ")
    # A sentence ends before a capital letter; "et al." does not end one.
    return re.split(r"(?<=[.:])(?<!al\.) (?=[A-Z(])|: ", comment, maxsplit=1)[0].rstrip(".:")
