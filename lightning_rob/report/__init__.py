"""`lightning-rob report`: what runs recorded, as one page and as Markdown; needs no torch."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from lightning_rob.report.page import html, markdown
from lightning_rob.report.runs import Run, find

__all__ = ["main", "report"]

HELP = """Turn the records of runs into one HTML page, complete in itself, and into Markdown.

A page shows the last evaluation of each run, its robust accuracy epoch by epoch,
what exactly each attack was, sweeps, matrices and pictures where a run has them, and
the recipe. Several runs are compared in one table."""
EXAMPLES = """examples:
  lightning-rob report logs/version_0     logs/version_0/report.html and .md
  lightning-rob report logs               all runs below logs, compared
  lightning-rob report logs/version_0 logs/version_1 --out compared.html"""


class Parser(argparse.ArgumentParser):
    """Says what is wrong with an argument in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise a ValueError."""
        raise ValueError(f"{message}; try lightning-rob report --help")


def main(args: Sequence[str]) -> None:
    """The command.

    Raises:
        ValueError: arguments that are none, or nothing recorded.
        OSError: a file that cannot be read or written.
    """
    parser = Parser(
        prog="lightning-rob report",
        description=HELP,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or above runs")
    out = "the page; Markdown goes beside it (default: report.html in RUN, or here if several)"
    parser.add_argument("--out", metavar="FILE.html", help=out)
    given = parser.parse_args(args)
    default = Path(given.runs[0] if len(given.runs) == 1 else ".") / "report.html"
    found = find(given.runs)
    for path in silent(given.runs, found):
        print(f"Nothing is recorded in {path}", file=sys.stderr)
    for path in write(found, Path(given.out) if given.out else default):
        print(f"Wrote {path}")


def report(folders: Sequence[str | Path], out: Path) -> tuple[Path, Path]:
    """Write the page of some runs to `out` and Markdown beside it.

    Args:
        folders: of runs, or above runs.
        out: ends in .html; its folder is made.

    Returns:
        (page, Markdown).

    Raises:
        ValueError: nothing is recorded, or `out` does not end in .html.
        FileNotFoundError: a folder does not exist.
    """
    return write(find(folders), out)


def silent(folders: Sequence[str | Path], found: Sequence[Run]) -> list[str | Path]:
    """The folders in and below which there was nothing."""
    known = [run.folder.resolve() for run in found]
    above = [Path(folder).resolve() for folder in folders]
    return [
        folder
        for folder, top in zip(folders, above, strict=True)
        if not any(run.is_relative_to(top) for run in known)
    ]


def write(runs: Sequence[Run], out: Path) -> tuple[Path, Path]:
    """The two files; see `report`."""
    if out.suffix != ".html":
        raise ValueError(f"--out is the page and ends in .html, got {out}")
    beside = out.with_suffix(".md")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(html(runs), encoding="utf-8")
    beside.write_text(markdown(runs, out.parent), encoding="utf-8")
    return out, beside
