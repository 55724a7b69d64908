"""Common mistakes of users: one clear line and exit code 2."""

import pytest

from tests.cli.bad_inputs import CASES, complaint, trained

# One for each way an error takes to the user; the others are slow only because they are many.
PICKED = {
    "arguments: eps negative",  # raised by a class of this package
    "arguments: steps a word",  # by jsonargparse
    "arguments: attack unknown",  # a name that is nowhere
    "arguments: allow nothing",  # by the import policy
    "config: a folder",
    "config: key twice",
    "config: callbacks",
    "checkpoint: code",
    "checkpoint: recipe broken",
    "checkpoint: other width",  # by torch
    "data: to 255",  # while the run is under way
    "command: sweep over",
    "command: tune trials",
}


@pytest.fixture(autouse=True, scope="module")
def checkpoint():
    trained()


def test_picked_cases_exist():
    assert set(CASES) >= PICKED


@pytest.mark.parametrize(
    "name",
    [name if name in PICKED else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_one_clear_line_and_exit_code_2(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complaint(name, tmp_path) == ""


def test_a_good_input_is_a_complaint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(CASES, "good", (lambda folder: ["--version"], "anything"))
    assert complaint("good", tmp_path) == "it was run"
    monkeypatch.setitem(CASES, "good", (lambda folder: ["fti"], "another reason"))
    assert "is not in" in complaint("good", tmp_path)
