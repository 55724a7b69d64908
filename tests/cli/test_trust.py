"""Files of strangers are read, and their code is not run; mistakes of users get one line."""

import re
import sys
from collections.abc import Callable

import jsonargparse
import pytest
import yaml

from lightning_rob.recipes import trust
from lightning_rob.recipes.safe_yaml import load
from lightning_rob.runtime.errors import InputError
from tests.cli.bad_inputs import CASES, complaint
from tests.cli.hostile import CANARY, FILES, MODULE, outcome
from tests.tiny import recipe, refused, run


@pytest.mark.parametrize("name", CASES)
def test_one_clear_line_and_exit_code_2(name, tmp_path):
    assert complaint(name, tmp_path) == ""


@pytest.mark.parametrize("name", FILES)
def test_code_of_a_stranger_is_not_run(name, tmp_path):
    ran, code, errors = outcome(name, tmp_path)
    assert not ran
    assert code == 2
    assert len([line for line in errors.splitlines() if "error:" in line]) == 1


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A recipe that names a module of the user's own."""
    (tmp_path / "mine.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # of a page, as tests run it
    return recipe(tmp_path, model__init_args__net={"class_path": "mine.Net"})


def test_own_code_must_be_allowed_each_time(mine, tmp_path, capsys):
    wanted = "mine.Net was not imported: .* only with --allow-import mine, if .*, or .*=mine$"
    fast = "--trainer.fast_dev_run=true"
    assert re.search(wanted, refused(capsys, "fit", "--config", mine, fast))
    assert not (tmp_path / CANARY).exists()
    run("fit", "--config", mine, fast, "--allow-import", "other,mine")
    assert (tmp_path / CANARY).exists()
    assert re.search(wanted, refused(capsys, "fit", "--config", mine, fast))
    run("fit", "--allow-import=mine", "--config", mine, fast)


def test_the_environment_allows_too(mine, monkeypatch, capsys):
    monkeypatch.setenv(trust.VARIABLE, "tests,mine")
    with pytest.raises(SystemExit) as end:
        run("fit", "--config", mine, "--print_config")
    assert not end.value.code
    assert "mine.Net" in capsys.readouterr().out


def of_type(name):
    """The object of a name, by a parser that imports what is trusted."""
    trust.install()
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=type | Callable)
    return parser.parse_args([f"--x={name}"]).x


UNTRUSTED = """
os.system functools.partial torch.load torch.hub.load torchvision.datasets.CIFAR10
timm.create_model lightning_rob.cli.lightning_cli.RobustCLI
lightning_rob.runtime.files.atomic_write jsonargparse.CLI lightning.pytorch.cli.LightningCLI
lightning_robber.Net torch.nnx.Net torch.nn.modules.module.torch.load
lightning_rob.nets.weights.os.system
"""


@pytest.mark.parametrize("name", UNTRUSTED.split())
def test_functions_that_load_start_or_write_are_not_trusted(name):
    with pytest.raises(Exception, match=r"is not allowed|No module named"):
        of_type(name)


PARTS = enumerate(("a", "b0", "b1", "b2", "b3", "b4", "b5"))
NINEFOLD = [f"b{i}: &b{i} [{9 * f'*{part}, '}]\n" for i, part in PARTS]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "line 3: the key 'a' is given twice"),
        ("a: {b: 1, c: 2, b: 3}", "line 1: the key 'b' is given twice"),
        ("- {a: 1}\n- {a: 1, a: 1}\n", "line 2: the key 'a'"),
        ("a: &x [*x]", "a cycle"),
        ("a: !!python/name:os.system ''", "asks for Python objects"),
        ("[" * 70 + "]" * 70, "more than 60 levels"),
        ("a: " + 2_000_000 * "b", "at most 2,000,000 are read"),
        ("a: &a [1, 2]\n" + "".join(NINEFOLD), "more than 200,000 values"),
    ],
)
def test_yaml_that_is_refused(text, message):
    with pytest.raises(InputError, match=message):
        load(text)


def test_yaml_that_is_accepted():
    for text in ("a: &x {b: 1}\nc: {<<: *x, d: 2}\ne: [*x, *x]\n", "c: [a, a, b, b]\n", "", "3"):
        load(text)
    with pytest.raises(yaml.YAMLError):
        load("a: {b")


def test_an_option_of_no_callback_is_not_a_refused_import(tmp_path, capsys):
    file = recipe(tmp_path, **{"trainer__callbacks+": []})
    line = refused(capsys, "fit", "--config", file, "--trainer.callbacks.group_size=16")
    assert "is of the callback named last before it" in line and "--allow-import" not in line
