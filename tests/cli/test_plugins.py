"""Recipes and plug-ins are found by short name; suites list other plug-ins."""

import tomllib
from pathlib import Path

import pytest
import yaml

import lightning_rob
from lightning_rob.cli.options import join_values, option_types, read_command_line
from lightning_rob.commands.monitor import MonitorConfig
from lightning_rob.recipes import safe_yaml
from lightning_rob.recipes.plugins import expand
from lightning_rob.recipes.safe_yaml import parse_fractions
from lightning_rob.recipes.shipped import find, find_recipe
from lightning_rob.runtime.errors import InputError
from tests.pieces import ROOT, python
from tests.tiny import arc, pgd
from tests.tiny import robust_eval as with_fractions


def robust_eval(attacks, **options):
    return parse_fractions(with_fractions(attacks, **options))


def put(folder, name, content):
    (folder / name).write_text(yaml.safe_dump(content))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    put(tmp_path, "one.yaml", robust_eval({"pgd": pgd()}))
    put(tmp_path, "two.yaml", robust_eval({"arc": arc()}))
    put(tmp_path, "ten.yaml", robust_eval({"arc10": arc()}, max_images=10))
    return tmp_path


def test_a_file_in_the_current_folder_comes_before_a_shipped_one(folder):
    assert find_recipe("demo") == ROOT / "configs/demo.yaml"
    assert find_recipe("ddp") == ROOT / "configs/mixins/ddp.yaml"
    assert find("arc", "callbacks") == ROOT / "callbacks/arc.yaml"
    assert find("no_such_file", "callbacks") is None and find("../callbacks/arc", "configs") is None
    put(folder, "arc", [])
    assert find("arc", "callbacks") == Path("arc")


def test_command_line(folder):
    args = ["--config", "demo", "--config=ddp", "--trainer.callbacks+=arc", "--data=Digits5k"]
    line = read_command_line("fit", *args)
    *files, plugged, same = line.args
    assert files == [f"--config={ROOT}/configs/{name}.yaml" for name in ("demo", "mixins/ddp")]
    (callback,) = safe_yaml.load(plugged.removeprefix("--trainer.callbacks+="))
    assert callback == safe_yaml.load((ROOT / "callbacks/arc.yaml").read_text())
    assert same == args[-1]
    for arg in (
        "config=seed_everything: 1",
        "trainer.callbacks+=Timer",
        "trainer.fast_dev_run=true",
    ):
        assert len(read_command_line("fit", f"--{arg}").args) == 1


def test_values_are_joined_to_their_options():
    args = ["-c", "a.yaml", "--config", "--ckpt_path", "-x", "--model.help", "BAT", "--x", "1"]
    joined = ["-c=a.yaml", "--config", "--ckpt_path=-x", "--model.help=BAT", "--x=1"]
    assert join_values(args, {}) == joined and join_values(joined, {}) == joined
    args = ["run", "--suite", "a.yaml", "--once", "--every", "-1", "--stop_at_alarm", "false"]
    joined = ["run", "--suite+=a.yaml", "--once=true", "--every=-1", "--stop_at_alarm=false"]
    assert join_values(args, option_types(MonitorConfig)) == joined


def test_a_wheel_has_recipes_and_plugins_inside_the_package(folder, monkeypatch):
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = table["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for kind, place in included.items():
        (folder / place).mkdir(parents=True)
        assert (ROOT / kind).is_dir()
    monkeypatch.setattr(lightning_rob, "__file__", str(folder / "lightning_rob/__init__.py"))
    put(folder, "lightning_rob/shipped/callbacks/arc.yaml", robust_eval({"arc": arc()}))
    put(folder, "lightning_rob/shipped/configs/demo.yaml", {})
    assert find("arc", "callbacks") == folder / included["callbacks"] / "arc.yaml"
    assert find_recipe("demo") == folder / included["configs"] / "demo.yaml"


def test_a_suite_joins_callbacks_that_differ_in_attacks_alone(folder):
    put(folder, "suite.yaml", ["one.yaml", "ten.yaml", "two.yaml", robust_eval({"more": pgd()})])
    joined, ten = expand("suite.yaml", folder)
    assert joined == robust_eval({"pgd": pgd(), "arc": arc(), "more": pgd()})
    assert ten == robust_eval({"arc10": arc()}, max_images=10)
    put(folder, "suites.yaml", ["suite.yaml", "one.yaml", "ModelCheckpoint"])
    other = {"class_path": "ModelCheckpoint", "init_args": {}}
    assert expand("suites.yaml", folder) == [joined, ten, other]
    put(folder, "clean_first.yaml", [robust_eval({}), "one.yaml"])  # no attack is lost
    assert expand("clean_first.yaml", folder) == [robust_eval({}), robust_eval({"pgd": pgd()})]


def test_options_of_a_plugin(folder):
    options = {"norm": "l2", "eps": 0.5}
    assert expand([{"one.yaml": options}], folder) == [robust_eval({"pgd": pgd()}, **options)]
    assert expand(["one.yaml"], folder) == [robust_eval({"pgd": pgd()})]


@pytest.mark.parametrize(
    ("suite", "message"),
    [
        (["one.yaml", "no.yaml"], "suite.yaml: there is no file no.yaml"),
        (["again.yaml"], r"lists itself: suite\.yaml -> again\.yaml -> suite\.yaml"),
        (["one.yaml", robust_eval({"pgd": arc()})], "two attacks are called 'pgd'"),
        (["broken.yaml"], r"broken\.yaml: "),
    ],
)
def test_refused_suites(folder, suite, message):
    put(folder, "suite.yaml", suite)
    put(folder, "again.yaml", ["suite.yaml"])
    (folder / "broken.yaml").write_text("a: [")
    with pytest.raises(InputError, match=message):
        expand("suite.yaml", folder)


PLAIN = """
import sys, yaml
from lightning.pytorch import Callback
from lightning.pytorch.cli import LightningArgumentParser
parser = LightningArgumentParser()
parser.add_subclass_arguments(Callback, "plug_in")
for path in sys.argv[1:]:
    with open(path) as file:
        content = yaml.safe_load(file)
    if isinstance(content, dict):  # a suite is a list of names
        built = parser.instantiate_classes(parser.parse_object({"plug_in": content})).plug_in
        if path.endswith("/pgd.yaml"):
            print(built.attacks["pgd"].threat, built.attacks["pgd"].step_size == 2 / 255)
"""


def test_plug_ins_are_read_by_any_lightning_cli():
    """Their names and fractions, in a process that has not imported this package."""
    files = [ROOT / f"callbacks/{name}.yaml" for name in ("arc", "audit", "autoattack", "pgd")]
    assert python("-c", PLAIN, *files) == "linf 8/255 True\n"
