"""Several processes share a command's work: the same records as by one, also if one is killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from lightning_rob.cli import seeds
from lightning_rob.commands.sweep import SweepConfig
from lightning_rob.runtime import spread
from tests.forked import forked_child
from tests.pieces import ROOT, lines_of, plugged, spec
from tests.tiny import KEPT, exit_code, pgd, recipe, refused, robust_eval, run

PYTHONPATH = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
VALUES = "--values=0.01,0.02,0.03,0.04"


class DiesOnce(Callback):
    """Kills the process of the first test that finds no mark of it."""

    def __init__(self, mark: str) -> None:
        self.mark = Path(mark)

    def on_test_start(self, *_) -> None:
        if os.environ.get("MAY_DIE") and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def swept(folder, checkpoint, *args):
    folder.mkdir()
    dies = spec(f"{__name__}.DiesOnce", mark=str(folder / "mark"))
    options = plugged(robust_eval({"apgd": pgd()}), dies)
    args = [VALUES, f"--out={folder / 'out'}", *options, *args, "--allow-import=tests"]
    run("sweep", checkpoint, "--over=eps", *args)
    kept = ("name", "value", "accuracy", "interval", "n")
    return sorted([line[key] for key in kept] for line in lines_of(folder / "out/sweep.jsonl"))


def test_a_sweep_by_two_workers_of_which_one_is_killed(trained, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    alone = swept(tmp_path / "one", trained)
    monkeypatch.setenv("MAY_DIE", "1")
    monkeypatch.setattr(spread, "run_child", forked_child)
    capfd.readouterr()
    assert swept(tmp_path / "two", trained, "--workers=2") == alone
    out = capfd.readouterr().out
    assert out.count("(recorded)") == 4  # all by the workers: the killed one ran again
    assert (tmp_path / "two/mark").exists() and (tmp_path / "two/out/sweep.png").exists()


def test_parts_are_all_of_the_work():
    by_part = (SweepConfig(over="eps", values="1:8:1", part=f"{i}/3") for i in (1, 2, 3))
    parts = [config.own(range(8)) for config in by_part]
    assert parts == [[0, 3, 6], [1, 4, 7], [2, 5]]
    shared = [SweepConfig(over="eps", values="1", **o) for o in ({}, {"workers": 2}, {"ray": 1})]
    assert [config.processes for config in shared] == [0, 2, 1]
    for part in ("0/3", "4/3", "1", "a/b"):
        with pytest.raises(ValueError, match="--part is i/n with i from 1 to n"):
            SweepConfig(over="eps", values="1", part=part)


def test_two_seeds_and_their_mean(tmp_path, monkeypatch, capfd):
    """The first in a process of its own; the second here, where nothing has to be imported."""
    ways = [forked_child, lambda command: (exit_code(*command[3:]), "")]
    monkeypatch.setattr(seeds, "run_child", lambda command: ways.pop(0)(command))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    recipe(tmp_path, **{"trainer__callbacks+": [KEPT, robust_eval({"apgd": pgd()})]})
    line = ["fit", "--seeds", "0,1", "--config", "recipe.yaml", "--allow-import", "tests"]
    run(*line)
    (file,) = tmp_path.rglob("seeds.json")
    rows = {row["name"]: row for row in json.loads(file.read_text())}
    for seed in (0, 1):
        (record,) = file.parent.rglob(f"seed_{seed}/robust.jsonl")
        found = [r for r in lines_of(record) if (r["stage"], r["name"]) == ("test", "apgd")]
        assert [r["accuracy"] for r in found] == [rows["apgd"]["accuracies"][seed]]
    first, second = rows["apgd"]["accuracies"]
    assert rows["apgd"]["mean"] == pytest.approx((first + second) / 2)
    before = sorted(tmp_path.rglob("*.ckpt"))
    capfd.readouterr()
    run(*line)  # nothing is left to train
    assert "2 trainings" in capfd.readouterr().out
    assert exit_code(*line, "--fail_under", "apgd=0") == 0
    assert exit_code(*line, "--fail_under", "apgd=1") == 1
    assert "seed 0: apgd is " in capfd.readouterr().err
    assert before == sorted(tmp_path.rglob("*.ckpt"))
    line = refused(capfd, "fit", "--seeds", "3", "--config", "recipe.yaml")
    assert "--seeds takes two seeds or more" in line


CHILD = """
import pathlib, subprocess, sys, threading
from lightning_rob.runtime import spread
part = "import os, pathlib, time; pathlib.Path(str(os.getpid())).touch(); time.sleep(60)"
popen = subprocess.Popen
spread.subprocess.Popen = lambda line, **how: popen([sys.executable, "-c", part], **how)
spread.spread(["fit"], 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_no_part_outlives_the_command_or_begins_anew(number, tmp_path):
    """On Ctrl-C all processes of the terminal get the signal; SIGTERM the command alone."""
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    line = [sys.executable, "-c", CHILD]
    command = subprocess.Popen(line, cwd=tmp_path, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while len([*tmp_path.iterdir()]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    (os.killpg if number == signal.SIGINT else os.kill)(command.pid, number)
    try:
        assert command.wait(30) == 128 + number
        parts = [int(path.name) for path in tmp_path.iterdir()]
        assert len(parts) == 2
        for part in parts:
            with pytest.raises(ProcessLookupError):
                os.kill(part, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(command.pid, signal.SIGKILL)


def test_a_run_without_a_record_is_not_tested(tmp_path):
    """It was interrupted in the first training: the same command goes on."""
    assert seeds.tested(tmp_path / "nowhere", 0) == []
    (tmp_path / "lightning_logs/seed_0/checkpoints").mkdir(parents=True)
    assert seeds.tested(tmp_path, 0) == []


def test_a_changed_recipe_is_another_experiment(tmp_path, monkeypatch):
    folders = []
    monkeypatch.setattr(seeds, "_trained", lambda folder, *_: folders.append(folder) or True)
    (tmp_path / "mine.yaml").write_text("class_path: A")
    listed = "trainer: {callbacks+: [mine.yaml]}"
    for text, plug_in in (("a: 1", "A"), ("a: 2", "A"), (listed, "A"), (listed, "B")):
        (tmp_path / "my recipe.yaml").write_text(text)
        (tmp_path / "mine.yaml").write_text(f"class_path: {plug_in}")
        seeds.fit_seeds(["--seeds=0,1", "--config", "my recipe.yaml"])
    assert folders[::2] == folders[1::2] and len({*folders}) == 4


@pytest.mark.slow
def test_a_sweep_on_ray(trained, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    alone = swept(tmp_path / "one", trained)
    monkeypatch.setenv("MAY_DIE", "1")
    assert swept(tmp_path / "two", trained, "--ray=2") == alone


def test_the_gpus_of_a_job_are_dealt_out(monkeypatch, capfd):
    found = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setattr(spread, "run_part", lambda args, own, folder: found.append(own) or "")
    spread.spread(["sweep"], 3)
    assert sorted(own["CUDA_VISIBLE_DEVICES"] for own in found) == ["4", "4", "7"]


def test_an_interrupted_seed_goes_on(tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(seeds, "run_child", lambda line: (lines.append(line) or 1, ""))
    last = tmp_path / "seed_1/checkpoints/last.ckpt"
    for _ in range(2):
        seeds._trained(tmp_path, 1, ["--config=demo"])
        last.parent.mkdir(parents=True, exist_ok=True)
        last.touch()
    assert [f"--ckpt_path={last}" in line for line in lines] == [False, True]
