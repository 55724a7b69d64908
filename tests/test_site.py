"""The documentation site builds without a warning, and the tutorials run."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import lightning_rob

ROOT = Path(__file__).parents[1]
TUTORIALS = {path.stem: path for path in sorted((ROOT / "docs/tutorials").glob("*.py"))}
CONSTANTS = {"ALEXNET_ERRORS", "GROUP_SIZE", "__version__"}


class Built(HTMLParser):
    """Collects the anchors and the links of a built page; a picture needs an alternative text."""

    def __init__(self, page):
        super().__init__()
        self.anchors, self.links = set(), []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors.add(found.get("id"))
        self.links += [found[key] for key in ("href", "src") if found.get(key)]
        assert tag != "img" or found.get("alt"), found


def broken_links(site):
    """The links and anchors of all built pages that lead nowhere."""
    pages = {page: Built(page) for page in site.rglob("*.html")}
    for page, built in pages.items():
        for link in built.links:
            url = urlsplit(link)
            if url.scheme or url.netloc:
                continue
            folder = site if url.path.startswith("/") else page.parent
            target = Path(os.path.normpath(folder / unquote(url.path).lstrip("/")))
            target = target / "index.html" if target.is_dir() and url.path else target
            target = target if url.path else page
            anchors = pages[target].anchors if target in pages else set()
            if not target.exists() or (url.fragment and unquote(url.fragment) not in anchors):
                yield f"{page.relative_to(site)}: {link}"


@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason='needs pip install -e ".[docs]"')
def test_the_site_has_every_public_name(tmp_path):
    from mkdocstrings import Inventory

    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"RUN_TUTORIALS": "false", "PYTHONPATH": str(ROOT)}
    built = subprocess.run(line, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert built.returncode == 0, built.stderr
    assert not list(broken_links(tmp_path))
    with (tmp_path / "objects.inv").open("rb") as file:
        documented = set(Inventory.parse_sphinx(file))
    public = [getattr(lightning_rob, name) for name in dir(lightning_rob) if name not in CONSTANTS]
    assert {f"{part.__module__}.{part.__qualname__}" for part in public} <= documented
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    assert len(pages) > 30
    for page in pages:
        assert 'src="http' not in page and "fonts.g" not in page  # no request leaves the site


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_runs(name, tmp_path):
    environment = os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-W", "ignore", str(TUTORIALS[name])]
    options = {"capture_output": True, "text": True, "timeout": 600, "cwd": tmp_path}
    ran = subprocess.run(line, env=environment, **options)
    assert ran.returncode == 0, ran.stderr
    pictures = TUTORIALS[name].read_text().count("plt.show()")
    assert len(list(tmp_path.glob(f"{name}*.png"))) == pictures > 0
