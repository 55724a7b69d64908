"""Several models watched by one process: a broken one stops no other."""

import re
import shutil
from contextlib import closing

import pytest
import yaml

from lightning_rob.cli import commands
from lightning_rob.cli.options import read_command_line
from lightning_rob.commands.monitor import loop
from lightning_rob.commands.monitor.history import History
from tests.commands import test_monitor
from tests.commands.test_monitor import EPOCHS, evaluated, events
from tests.tiny import exit_code

trained = test_monitor.trained


@pytest.fixture
def listed(trained, tmp_path):
    """A file of three models: a folder, a file whose suite cannot be built, an empty folder."""
    for folder in ("a/checkpoints", "b", "c"):
        (tmp_path / folder).mkdir(parents=True)
    for name in EPOCHS[:2]:
        shutil.copy(trained / name, tmp_path / "a/checkpoints" / name)
    shutil.copy(trained / EPOCHS[2], tmp_path / "b/b.ckpt")
    (tmp_path / "broken.yaml").write_text("class_path: NoSuchCallback")
    entries = {
        "first": {"run": str(tmp_path / "a"), "alarm": "robust/worst=0.999"},
        "second": {"run": str(tmp_path / "b/b.ckpt"), "suite": [str(tmp_path / "broken.yaml")]},
        "third": {"run": str(tmp_path / "c"), "data.test_size": 16},
    }
    entries["first"]["suite"] = entries["third"]["suite"] = str(trained / "suite0.yaml")
    file = tmp_path / "models.yaml"
    file.write_text(yaml.safe_dump(entries))
    return file


def watch(file, *args) -> int:
    return exit_code("monitor", "--models", file, "--trainer.accelerator=cpu", *args)


def test_a_broken_model_stops_no_other(listed, trained, tmp_path, monkeypatch, capsys):
    def repair():
        (tmp_path / "broken.yaml").write_text((trained / "suite0.yaml").read_text())
        shutil.copy(trained / EPOCHS[3], tmp_path / "c" / EPOCHS[3])

    happens = iter([lambda: None, repair, lambda: None, (tmp_path / "done").touch])
    clock = [0.0]

    def sleep(seconds):
        """Let time pass; between two looks of all models something happens."""
        clock[0] += seconds
        if seconds > 1:
            next(happens, lambda: None)()

    monkeypatch.setattr(loop.time, "sleep", sleep)
    monkeypatch.setattr(loop, "monotonic", lambda: clock[0])
    assert watch(listed, "--until", tmp_path / "done", "--every=10") == 1
    homes = {"first": tmp_path / "a", "second": tmp_path / "b/b_monitor", "third": tmp_path / "c"}
    assert sorted(evaluated(homes["first"])) == EPOCHS[:2]
    assert evaluated(homes["second"]) == ["b.ckpt"] and evaluated(homes["third"]) == [EPOCHS[3]]
    (broken,) = events(homes["second"], "broken")
    assert "NoSuchCallback" in broken["alarm"][0]
    with closing(History(homes["second"])) as history:
        assert history.alarm() is None  # it ended with the evaluation
    error = capsys.readouterr().err
    assert re.search(r"alarm: first: \S+\.ckpt: robust/worst is", error)
    assert "alarm: second: " in error


def test_once_the_others_are_evaluated_and_the_failure_is_the_exit_code(listed, tmp_path, capsys):
    with listed.open("a") as file:
        yaml.safe_dump({"fourth": {"run": str(tmp_path / "later")}}, file)
    assert watch(listed, "--once") == 2
    assert evaluated(tmp_path / "a") == EPOCHS[:2]
    error = capsys.readouterr().err
    assert "second: " in error and "NoSuchCallback" in error
    assert "third: there is no checkpoint in" in error
    assert "fourth: there is no folder or checkpoint" in error


def test_an_option_of_a_model_takes_the_place_of_that_of_all(tmp_path, monkeypatch):
    file, found = tmp_path / "models.yaml", {}
    own = {"run": str(tmp_path), "notify": "https://b.example", "suite": "arc"}
    file.write_text(yaml.safe_dump({"own": own, "other": {"run": str(tmp_path)}}))

    def watched(options, starts):
        found.update({name: start()[0] for name, start in starts.items()})

    monkeypatch.setattr(commands, "function_of", lambda _: watched)
    args = "--models", str(file), "--notify", "https://a.example", "--suite", "adaptive_pgd"
    commands._with_checkpoints(read_command_line("monitor", *args))
    assert (found["own"].notify, len(found["own"].suite)) == (["https://b.example"], 1)
    assert "arc" in str(found["own"].suite)
    assert found["other"].notify == ["https://a.example"]
