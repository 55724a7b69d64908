"""A sample of what users get wrong; `benchmarks/reliability_trust.py` goes through all of it."""

import pytest

from tests.bad_inputs import CASES, GROUPS, complaint, trained


@pytest.fixture(autouse=True, scope="module")
def checkpoint():
    trained()


def test_there_are_enough_of_them():
    assert len(CASES) >= 120
    assert min(map(len, GROUPS.values())) >= 15


@pytest.mark.parametrize("name", list(CASES)[::7])
def test_one_clear_line_and_exit_code_2(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complaint(name, tmp_path) == ""


def test_a_good_input_is_a_complaint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(CASES, "good", (lambda folder: ["--version"], "anything"))
    assert complaint("good", tmp_path) == "it was run"
    monkeypatch.setitem(CASES, "good", (lambda folder: ["fti"], "another reason"))
    assert "is not in" in complaint("good", tmp_path)
