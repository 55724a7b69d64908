"""`lightning-rob report`: the records of runs as one page and as Markdown; needs no torch."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import ClassVar

from lightning_rob import __version__
from lightning_rob.commands.config import CommandConfig
from lightning_rob.commands.report.blocks import (
    Block,
    Heading,
    Paragraph,
    Warned,
    html,
    markdown,
    page_template,
)
from lightning_rob.commands.report.runs import Run, find_runs
from lightning_rob.commands.report.sections import comparison, run_section
from lightning_rob.runtime.errors import visible
from lightning_rob.runtime.files import atomic_write


@dataclass(frozen=True)
class ReportConfig(CommandConfig):
    """Turn the records of runs into one HTML page, complete in itself, and into Markdown.

    A page shows the last evaluation of each run, its robust accuracy epoch by epoch, all
    arguments of each attack, pictures where a run has them, and the recipe.
    Several runs are compared in one table.

      lightning-rob report logs/version_0     logs/version_0/report.html and .md
      lightning-rob report logs               all runs below logs, compared
      lightning-rob report logs/version_0 logs/version_1 --out compared.html

    Args:
        runs: folders of runs, or folders above runs
        out: the page, .html; else report.html in RUN, or here if there are several
        template: Jinja template of the page, which may extend "page.html"
    """

    positional: ClassVar[str] = "runs"
    reads_records: ClassVar[bool] = True
    usage: ClassVar[str] = "RUN [RUN ...] [options]"

    runs: tuple[Path, ...] = ()
    out: Path | None = None
    template: Path | None = None

    def __post_init__(self) -> None:
        if not self.runs:
            raise ValueError("report takes at least one folder: lightning-rob report RUN")


def run(config: ReportConfig) -> None:
    """Write the report."""
    folder = config.runs[0] if len(config.runs) == 1 else Path()
    for path in report(config.runs, config.out or folder / "report.html", config.template):
        print(visible(f"Wrote {path}"))


def report(folders: Sequence[Path], out: Path, template: Path | None = None) -> tuple[Path, Path]:
    """Write the page of some runs to `out` and Markdown beside it; name folders without records."""
    runs = find_runs(folders)
    known = [found.folder.resolve() for found in runs]
    for folder in folders:
        if not any(path.is_relative_to(folder.resolve()) for path in known):
            text = f"No run is recorded in {folder} (results of evaluate() are for compare)"
            print(visible(text), file=sys.stderr)
    if out.suffix != ".html":
        raise ValueError(f"--out is the page and ends in .html, got {out}")
    beside = out.with_suffix(".md")
    out.parent.mkdir(parents=True, exist_ok=True)
    evaluated = [found for found in runs if found.evaluations.by_stage]
    count = len(evaluated or runs)
    title = runs[0].title if len(runs) == 1 else f"{count} run{'s' * (count > 1)}"
    title = f"Robustness of {title}"
    sections = list(_sections(runs, title, out.parent))
    pages = [page for page, _ in sections]
    page = page_template(template).render(title=title, sections=pages)
    text = "\n\n".join(text for _, text in sections) + "\n"
    for path, content in ((out, page), (beside, text)):
        written = content.encode("utf-8", "backslashreplace")
        atomic_write(path, partial(Path.write_bytes, data=written))
    return out, beside


def _sections(runs: Sequence[Run], title: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield HTML and Markdown of the comparison and of each run, for a report in `folder`."""
    names, level = [f"run-{i}" for i in range(1, len(runs) + 1)], 1
    if len(runs) > 1:
        level, heading = 2, Heading(1, title)
        yield _section(heading, chain([heading], comparison(runs, names)), "the comparison")
    for found, name in zip(runs, names, strict=True):
        blocks = run_section(found, name, level, folder)
        yield _section(Heading(level, found.title, name), blocks, str(found.folder))
    note = Paragraph(f"Written by lightning-rob {__version__} report.", "note")
    yield html([note]), markdown([note])


def _section(heading: Heading, blocks: Iterator[Block], place: str) -> tuple[str, str]:
    """Return HTML and Markdown of a section; one that fails is named, and stops no other."""
    try:
        shown = list(blocks)
        return html(shown), markdown(shown)
    except Exception as error:  # records may be of strangers, and break anything
        reason = f"its records cannot be shown: {type(error).__name__}: {error}"
        print(visible(f"lightning-rob: {place}: {reason}"), file=sys.stderr)
        shown = [heading, Warned(reason)]
        return html(shown), markdown(shown)
