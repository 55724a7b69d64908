"""The diffs of `docs/extending.md`, applied to a copy of the package and held to its contracts."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.forked import Forked

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text()
DIFFS = dict(re.findall(r"^## An? (.*?)$.*?^```diff\n(.*?)^```$", PAGE, re.M | re.S))
CONTRACTS = [
    f"tests/{kind}/test_contract.py" for kind in ("attacks", "defenses", "transforms", "modules")
]
ENTRIES = "fgsm or every_attack or noisy or Contrast or every_class or ALP"


def apply(diff, folder):
    """Apply a unified diff whose hunks are found by their text, without line numbers."""
    _, *parts = re.split(r"^--- .*\n\+\+\+ b/(.*)\n", diff, flags=re.M)
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        path = folder / name
        text = path.read_text() if path.exists() else ""
        for hunk in re.split(r"^@@\n", body, flags=re.M)[1:]:
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] in " -")
            after = "".join(line[1:] for line in lines if line[0] in " +")
            assert text.count(before) == 1 or not text, f"{name}: no single place for\n{hunk}"
            text = text.replace(before, after) if before else after
        path.write_text(text)


def run_tests(folder):
    """Run the contracts of the copy, in a process that has imported this package already."""
    for name in list(sys.modules):
        if name.partition(".")[0] in ("lightning_rob", "tests"):
            del sys.modules[name]
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *CONTRACTS, "-k", ENTRIES]))


def test_the_diffs_keep_their_contracts(tmp_path):
    assert list(DIFFS) == ["attack", "defense", "transform", "training method"]
    for folder in ("lightning_rob", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=lambda *_: ["__pycache__"])
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for diff in DIFFS.values():
        apply(diff, tmp_path)
    done = Forked(run_tests, str(tmp_path)).wait()
    assert done.returncode == 0, done.stdout + done.stderr
