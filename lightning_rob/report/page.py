"""The frame of the page, and the two files."""

from collections.abc import Iterator, Sequence
from html import escape
from importlib.metadata import version
from pathlib import Path

from lightning_rob.report.blocks import Block, Heading, Text
from lightning_rob.report.compare import comparison
from lightning_rob.report.content import story
from lightning_rob.report.runs import Run

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def sections(runs: Sequence[Run]) -> Iterator[list[Block]]:
    """The head of the page, then each run."""
    names = [f"run-{i}" for i in range(1, len(runs) + 1)]
    several = len(runs) > 1
    if several:
        yield [Heading(1, title(runs)), *comparison(runs, names)]
    for run, name in zip(runs, names, strict=True):
        yield list(story(run, name, 2 if several else 1))
    yield [Text(f"Written by lightning-rob {version('lightning-rob')} report.", "note")]


def title(runs: Sequence[Run]) -> str:
    """What the page is about."""
    if len(runs) == 1:
        return f"Robustness of {runs[0].title}"
    evaluated = [run for run in runs if run.evaluations.by_stage]
    return f"Robustness of {len(evaluated or runs)} runs"


def html(runs: Sequence[Run]) -> str:
    """The page, complete in itself."""
    parts = ["\n".join(block.html() for block in blocks) for blocks in sections(runs)]
    body = "\n".join(f"<section>\n{part}\n</section>" for part in parts)
    style = Path(__file__).with_name("style.css").read_text()
    return PAGE.format(title=escape(title(runs)), style=style, body=body)


def markdown(runs: Sequence[Run], folder: Path) -> str:
    """The same as Markdown that lies in `folder`."""
    texts = [block.markdown(folder) for blocks in sections(runs) for block in blocks]
    return "\n\n".join(filter(None, texts)) + "\n"
