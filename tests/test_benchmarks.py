"""The scripts of benchmarks/ call what they share, and the package, with arguments that fit.

They train for minutes to hours, so that no test runs them.
"""

import ast
import inspect
import runpy
from pathlib import Path

import pytest
import yaml

from lightning_rob import load
from lightning_rob.commands.leaderboard.board import rows
from lightning_rob.commands.leaderboard.submissions import read_published
from lightning_rob.defenses import Defense
from tests.test_configs import CHEAP, MOST, NARROW, shrunk
from tests.tiny import ROOT

SCRIPTS = sorted((ROOT / "benchmarks").rglob("*.py"))
CHECKPOINTS = sorted((ROOT / "benchmarks").rglob("*.ckpt"))


@pytest.mark.parametrize("path", CHECKPOINTS, ids=[path.name for path in CHECKPOINTS])
def test_checkpoints_of_the_tables_load(path):
    """An option that leaves the package would make one that holds it unreadable."""
    assert isinstance(load(path), Defense)


@pytest.mark.parametrize(("board", "least"), [("photographs", 16), ("digits", 26), ("cifar10", 10)])
def test_published_scores_are_read(board, least):
    """A submission is ranked beside them (`--beside`)."""
    protocol, found = read_published(ROOT / f"docs/leaderboard_{board}.json")
    index = found[0].scores["norms"]["linf"]["index"]
    for one in found:
        one.check_scores(protocol, index)
    assert not any(one.reasons for one in found)
    assert len(rows(found, "linf")) >= least


def stubs(path):
    """Return the functions of a script by name, with their parameters and without their bodies."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for part in ast.walk(node.args):
                if isinstance(part, ast.arg):
                    part.annotation = None
            node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
            node.args.kw_defaults = [d and ast.Constant(None) for d in node.args.kw_defaults]
            exec(f"def {node.name}({ast.unparse(node.args)}): pass", found)
    return found


def script_of(module, near):
    paths = [folder / f"{module.replace('.', '/')}.py" for folder in (near, ROOT / "benchmarks")]
    return next((path for path in paths if path.exists()), None)


def imported(node, near):
    """Return what an import gives: functions of other scripts, and all of the package."""
    if script := script_of(node.module, near):
        return {a.asname or a.name: f for a in node.names if (f := stubs(script).get(a.name))}
    found = {}
    if node.module.split(".")[0] == "lightning_rob":
        exec(ast.unparse(node), found)
    return found


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_calls_fit(path: Path):
    nodes = [*ast.walk(ast.parse(path.read_text()))]
    known = stubs(path)
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            known |= imported(node, path.parent)
    for node in nodes:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        called, names = known.get(node.func.id), [word.arg for word in node.keywords]
        if callable(called) and not any(isinstance(a, ast.Starred) for a in node.args):
            signature = inspect.signature(called)
            bind = signature.bind_partial if None in names else signature.bind
            bind(*node.args, **{name: None for name in names if name})


def test_the_game_of_rmc_is_that_of_its_recipe(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    trained = runpy.run_path(str(ROOT / "benchmarks/rmc_state.py"))["trained"]
    recipe = shrunk(yaml.safe_load(trained.__globals__["RECIPE"].read_text()), MOST, CHEAP | NARROW)
    recipe["trainer"]["max_epochs"] = 1
    trained.__globals__["RECIPE"] = tmp_path / "small.yaml"
    trained.__globals__["RECIPE"].write_text(yaml.safe_dump(recipe))
    _, attacks, images = trained(tmp_path)
    assert {"pgd", "gmsa_avg"} < {*attacks}
    assert {len(part) for part in images} == {1000}
