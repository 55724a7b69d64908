"""The HTML page around blocks, complete in one file."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from lightning_rob.commands.report.blocks import Block


def page(title: str, sections: Iterable[Sequence[Block]]) -> str:
    """Return a page with its style, which loads nothing from elsewhere.

    Args:
        title: of the window.
        sections: the blocks of each.
    """
    parts = ["\n".join(block.html for block in blocks) for blocks in sections]
    body = "\n".join(f"<section>\n{part}\n</section>" for part in parts)
    template, style = (
        Path(__file__).with_name(name).read_text() for name in ("page.html", "style.css")
    )
    return Template(template).substitute(title=escape(title), style=style, body=body)
