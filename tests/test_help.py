"""`--help` of every command: a screen, an example, and at once."""

import json
import re
import subprocess
import sys

import pytest

from lightning_rob.cli import COMMANDS, main
from tests.tiny import ROOT, shell

LINES, COLUMNS = 30, 88
HEAVY = ("torch", "lightning", "numpy", "matplotlib")
ALL = """
import contextlib, io, json, sys
from lightning_rob.cli import COMMANDS, main
told = {}
for command in ["", *COMMANDS]:
    page, code = io.StringIO(), 0
    with contextlib.redirect_stdout(page):
        try:
            main([command, "--help"] if command else ["--help"])
        except SystemExit as end:
            code = end.code or 0
    told[command] = [page.getvalue(), code, [n for n in HEAVY if n in sys.modules]]
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told():
    code = f"HEAVY = {HEAVY}{ALL}"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_and_imports_nothing_heavy(told, command):
    page, code, imported = told[command]
    lines = page.rstrip().splitlines()
    assert code == 0
    assert imported == []
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    assert re.match(r"usage: lightning-rob", lines[0])


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(told, command):
    page = told[command][0].partition("\n")[2]
    assert re.search(rf"^  lightning-rob {command} \S", page, re.M)


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_h_after_other_options_is_the_same(told, command, capsys):
    main([command, "--config", "configs/demo.yaml", "-h"])
    assert capsys.readouterr().out == told[command][0]
    assert "--help all" in told[command][0]


def test_examples_name_recipes_and_callbacks_that_there_are(told):
    pages = "\n".join(page for page, *_ in told.values())
    named = set(re.findall(r"\b(?:configs|callbacks)/[\w.]+\.yaml", pages))
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_option_that_is_told_is_one(told):
    """`--help all` is the parser's own page, and knows what the short ones promise."""
    whole = shell("test", "--help", "all")
    assert whole.returncode == 0, whole.stderr
    assert len(whole.stdout.splitlines()) > 300
    page = told["test"][0].replace("--fail-under", "--fail_under")  # both are taken
    short = re.findall(r"^  (--[\w.-]+)", page, re.M)
    outside = {"--help", "--model.help", "--model.NAME", "--data.NAME", "--allow-import"}
    assert [name for name in short if name not in whole.stdout and name not in outside] == []
