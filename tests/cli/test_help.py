"""`--help` of every command: a screen, an example, and at once."""

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from lightning_rob.cli import COMMANDS, main
from lightning_rob.commands.config import OF_LIGHTNING, config_of
from lightning_rob.recipes.shipped import find, find_recipe
from tests.pieces import python
from tests.tiny import exit_code

LINES, COLUMNS = 30, 88
HEAVY = ("torch", "lightning", "numpy", "bayes_opt", "matplotlib", "ray")
ALL = """
import contextlib, io, json, sys
from lightning_rob.cli import COMMANDS, main
pages = {}
for command in ["", *COMMANDS]:
    page, code = io.StringIO(), 0
    with contextlib.redirect_stdout(page):
        try:
            main([command, "--help"] if command else ["--help"])
        except SystemExit as end:
            code = end.code or 0
    pages[command] = [page.getvalue(), code, [n for n in HEAVY if n in sys.modules]]
print(json.dumps(pages))
"""


@pytest.fixture(scope="module")
def pages():
    return json.loads(python("-c", f"HEAVY = {HEAVY}{ALL}"))


def test_a_reader_that_closes_the_pipe_sees_no_error():
    """Such as `head`."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "lightning_rob", "--help"]
    done = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, check=True)
    os.close(writes)
    assert not done.stderr


def test_output_in_any_locale(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
    main(["--version"])
    print("83.8 … 97.9", flush=True)
    assert sys.stdout.buffer.getvalue().endswith(b"83.8 ? 97.9\n")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen_and_imports_nothing_heavy(pages, command):
    page, code, imported = pages[command]
    lines = page.rstrip().splitlines()
    assert code == 0
    assert imported == []
    assert len(lines) <= LINES and max(map(len, lines)) <= COLUMNS
    assert re.match(r"usage: lightning-rob", lines[0])


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_h_after_other_options(pages, command, capsys):
    main([command, "--config", "configs/demo.yaml", "-h"])
    assert capsys.readouterr().out == pages[command][0] and "--help all" in pages[command][0]


def test_examples_name_existing_recipes_and_callbacks(pages):
    text = "\n".join(page for page, *_ in pages.values())
    recipes = set(re.findall(r"--config (\w+)(?![\w/])", text)) - {"FILE", "RECIPE"}
    plugins = set(re.findall(r"callbacks\+=([a-z]\w+)(?![\w/])", text))
    assert recipes and len(plugins) > 2
    assert [name for name in recipes if not find_recipe(name)] == []
    assert [name for name in plugins if not find(name, "callbacks")] == []


def test_every_option_of_the_short_page_exists(pages, capsys):
    """`--help all` is the parser's own page, and knows what the short ones promise."""
    assert exit_code("test", "--help", "all") == 0
    whole = capsys.readouterr().out
    assert len(whole.splitlines()) > 300
    page = pages["test"][0]
    short = re.findall(r"^  (--[\w.-]+)", page, re.M)
    outside = {"--help", "--model.help", "--model.NAME", "--data.NAME", "--allow-import"}
    assert [name for name in short if name not in whole and name not in outside] == []


@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in OF_LIGHTNING])
def test_a_generated_page_lists_every_option_with_a_description(pages, command):
    """Positional arguments come before the options."""
    config = config_of(command)
    listed = re.findall(r"^  (?:--)?(\w+)\s{2,}(\S.*)", pages[command][0], re.M)
    assert [name for name, _ in listed] == [field.name for field in fields(config)]
