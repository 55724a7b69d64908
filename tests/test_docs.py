"""Links of the pages lead somewhere, and the examples of README and of the evaluation page run."""

import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest
from torch import nn

from lightning_rob.cli import main
from lightning_rob.evaluation.suites import RECIPES

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", ".github")
PAGES = {page.name: page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))}
PAGES["README.md"] = ROOT / "README.md"


def anchors(page):
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    page = PAGES[name]
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", text):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name}: no {path}"
        assert not anchor or anchor in anchors(target), f"{name}: no #{anchor} in {target.name}"


def test_readme_is_a_screen_with_a_picture_of_this_repository():
    text = PAGES["README.md"].read_text()
    assert text.count("\n") <= 60
    assert len(re.findall(r"!\[.*\]\(docs/images/.*\)", text)) == 1


def test_every_kind_of_defense_has_its_plug_in_on_the_page():
    table = PAGES["which_attack.md"].read_text()
    for plug_in in RECIPES.values():
        assert f"`{Path(plug_in).stem}`" in table
    for kind in RECIPES:
        assert f"| `{kind}` |" in table


def test_the_suite_of_a_randomized_ensemble_is_that_of_the_page(capsys):
    page = PAGES["which_attack.md"].read_text()
    script = re.search(r"```python\n(.*?)result =", page, re.S)[1]
    exec(
        compile(script, "which_attack.md", "exec"),
        {"net": nn.Linear(2, 2), "other": nn.Linear(2, 2)},
    )
    assert f"# {capsys.readouterr().out.strip()}\n" in page


@pytest.mark.parametrize("name", ["README.md", "evaluation.md"])
def test_example_prints_what_the_page_shows(name, capsys):
    text = PAGES[name].read_text()
    script = re.search(r"```python\n(.*?evaluate.*?)```", text, re.S)[1]
    exec(compile(script, name, "exec"), {})
    rows = re.findall(r"│ (\w+) +│", capsys.readouterr().out)
    assert rows == ["clean", "pgd", "arc", "worst"]


def test_the_detector_of_the_page_rejects(capsys):
    section = PAGES["evaluation.md"].read_text().partition("### Defenses that reject")[2]
    script = re.search(r"```python\n(.*?)```", section, re.S)[1]
    scope = {}
    exec(compile(script, "evaluation.md", "exec"), scope)
    assert "accepted, wrong" in capsys.readouterr().out
    assert scope["result"].rejected("pgd") > 0


def test_a_module_of_yours(tmp_path, monkeypatch, capsys):
    """A Trainer, a LightningCLI and `lightning-rob fit` take the classes of the page."""
    page = PAGES["yours.md"].read_text()
    scripts = re.findall(r"```python\n(.*?)```", page, re.S)[:3]
    for name, script in zip(("mine.py", "run.py", "train.py"), scripts, strict=True):
        (tmp_path / name).write_text(script)
    (tmp_path / "pgd.yaml").write_text((ROOT / "callbacks/pgd.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
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
    monkeypatch.delitem(sys.modules, "mine")
