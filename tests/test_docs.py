"""The documentation: links lead somewhere, examples print what is shown, the site builds."""

import json
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import lightning_rob
from lightning_rob import Threat, attacks
from lightning_rob.cli import main
from lightning_rob.evaluation.suites import PLUG_INS
from tests.pieces import ROOT, lines_of, python

FOLDERS = ("docs", ".github")
PAGES = {page.name: page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))}
PAGES["README.md"] = ROOT / "README.md"
TUTORIALS = {path.stem: path for path in sorted((ROOT / "docs/tutorials").glob("*.py"))}
REPOSITORY = re.search(r'^Repository = "(.*)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
CONSTANTS = {"ALEXNET_ERRORS", "GROUP_SIZE", "__version__"}
CODE = re.compile(r"```.*?```", re.S)


def anchors(page):
    """The anchors that GitHub gives the headings of a page, and those of blocks to unfold."""
    text = CODE.sub("", page.read_text())
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return named | set(re.findall(r'^<details id="([^"]+)"', text, re.M))


def test_links_lead_somewhere():
    for name, page in PAGES.items():
        text = CODE.sub("", page.read_text())
        for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), f"{name}: no {path}"
            assert not anchor or anchor in anchors(target), f"{name}: no #{anchor} in {target.name}"


def test_every_kind_of_defense_has_its_plug_in_on_the_page():
    table = PAGES["which_attack.md"].read_text()
    for plug_in in PLUG_INS.values():
        assert f"`{Path(plug_in).stem}`" in table
    for kind in PLUG_INS:
        assert f"| `{kind}` |" in table


def test_the_page_says_which_norms_attacks_take():
    rows = PAGES["which_attack.md"].read_text().partition("| Attack | linf | l2 | l1 |")[2]
    needed = {"PGD": (1, 0.1), "ARC": (1,)}  # arguments behind the threat
    seen = 0
    for names, *cells in re.findall(r"^\| (`.*?) \| (\w+) \| (\w+) \| (\w+) \|", rows, re.M):
        for name in re.findall(r"`([A-Z]\w+)`", names):
            if name == "MinimalNorm":  # takes what its inner attack takes
                continue
            for norm, cell in zip(("linf", "l2", "l1"), cells, strict=True):
                try:
                    getattr(attacks, name)(Threat(norm, 1.0), *needed.get(name, ()))
                    found = "yes"
                except ValueError:
                    found = "no"
                assert found == cell, f"{name} in {norm}"
                seen += 1
    assert seen >= 36


def test_example_prints_what_the_page_shows(capsys):
    text = PAGES["evaluation.md"].read_text()
    script = re.search(r"```python\n(.*?evaluate.*?)```", text, re.S)[1]
    few = script.replace("1400:]", "1793:]").replace('"linf", 0.1', '"linf", 0.9')  # fooled at once
    assert few.count("1793:]") == 2 and few.count("0.9") == 1
    exec(few, {})
    rows = re.findall(r"│ (\w+) +│", capsys.readouterr().out)
    assert rows == ["clean", "pgd", "arc", "worst"]
    section, scope = text.partition("### Defenses that reject")[2], {}
    exec(re.search(r"```python\n(.*?)```", section, re.S)[1], scope)
    assert "accepted, wrong" in capsys.readouterr().out
    assert scope["result"].rejected("pgd") > 0


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A folder whose module `mine` is imported anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_a_module_of_yours(mine, monkeypatch, capsys):
    """A Trainer, a LightningCLI and `lightning-rob fit` take the classes of the page."""
    page = PAGES["yours.md"].read_text()
    scripts = re.findall(r"```python\n(.*?)```", page, re.S)[:3]
    for name, script in zip(("mine.py", "run.py", "train.py"), scripts, strict=True):
        Path(name).write_text(script)
    Path("pgd.yaml").write_text((ROOT / "callbacks/pgd.yaml").read_text())
    commands = re.findall(
        r"^(python train|lightning-rob fit --model)(.*)", page.replace("\\\n", ""), re.M
    )
    assert len(commands) == 3
    for start, rest in [("python run", ".py"), *commands]:
        program, *args = shlex.split(start + rest)
        if program == "python":
            monkeypatch.setattr(sys, "argv", args)
            runpy.run_path(args[0], run_name="__main__")
        else:
            main(args)
        assert "val/robust/worst" in capsys.readouterr().out


def test_an_attack_without_gradients(mine):
    """The class, the function and their plug-in attack a network of the package."""
    page = PAGES["extending.md"].read_text().partition("### Without gradients")[2]
    page = page.partition("\n## ")[0]
    for name, language in (("mine.py", "python"), ("search.yaml", "yaml")):
        parts = re.findall(rf"```{language}\n(.*?)```", page, re.S)
        assert len(parts) == 2
        Path(name).write_text("".join(parts))
    line = re.search(r"PYTHONPATH=\. lightning-rob (.*)", page)[1]
    main([*shlex.split(line), "--trainer.callbacks.max_images=40"])
    (record,) = mine.rglob("robust.jsonl")
    found = {one["name"]: one for one in lines_of(record)}
    assert found["clean"]["n"] == 40
    for attack in ("search", "grey"):
        assert found[attack]["accuracy"] < found["clean"]["accuracy"] - 0.2


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages from which the site is built, tutorials without output."""
    folder = tmp_path_factory.mktemp("pages") / "pages"
    python("docs/write_pages.py", folder, "--without_output")
    return folder


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_notebook_has_the_code_of_its_page(name, pages):
    page = (pages / f"tutorials/{name}.md").read_text()
    book = json.loads((pages / f"tutorials/{name}.ipynb").read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 4)
    assert f"]({name}.ipynb)" in page
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    assert cells == re.findall(r"```python\n(.*?)\n```", page, re.S)
    compile("\n".join(cells), name, "exec")
    text = "\n".join("".join(c["source"]) for c in book["cells"] if c["cell_type"] == "markdown")
    assert "Next: [" in text
    for link in re.findall(r"\]\(([^)#]*)", text):
        assert (ROOT / link.removeprefix(f"{REPOSITORY}/blob/main/")).exists(), link


@pytest.mark.skipif(find_spec("mkdocstrings") is None, reason='needs pip install -e ".[docs]"')
def test_the_site_has_every_public_name(pages, tmp_path):
    from mkdocstrings import Inventory

    config = {"INHERIT": str(ROOT / "mkdocs.yml"), "docs_dir": str(pages)}
    (tmp_path / "mkdocs.yml").write_text(json.dumps(config))
    site = tmp_path / "site"
    python("-m", "mkdocs", "build", "--strict", "--site-dir", site, cwd=tmp_path)
    with (site / "objects.inv").open("rb") as file:
        documented = set(Inventory.parse_sphinx(file))
    public = [getattr(lightning_rob, name) for name in dir(lightning_rob) if name not in CONSTANTS]
    assert {f"{part.__module__}.{part.__qualname__}" for part in public} <= documented
    built_pages = [page.read_text() for page in site.rglob("*.html")]
    assert len(built_pages) > 30
    for page in built_pages:
        assert 'src="http' not in page and "fonts.g" not in page  # no request leaves the site


@pytest.mark.slow
@pytest.mark.parametrize("name", TUTORIALS)
def test_tutorial_runs(name, tmp_path):
    python("-W", "ignore", TUTORIALS[name], cwd=tmp_path, MPLBACKEND="agg")
    pictures = TUTORIALS[name].read_text().count("plt.show()")
    assert len(list(tmp_path.glob(f"{name}*.png"))) == pictures > 0
