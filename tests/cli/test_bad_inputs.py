"""Common mistakes of users, one for each kind: one clear line and exit code 2."""

import pytest

from tests.cli.bad_inputs import CASES, complaint


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line_and_exit_code_2(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert complaint(name, tmp_path) == ""
