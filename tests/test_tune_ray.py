"""The same search through Ray Tune; each in a process of its own, for Ray leaves things behind."""

import os
import subprocess
import sys

import pytest

from lightning_rob.tune.trials import read_trials
from tests.test_tune import files, hill, points, study
from tests.tiny import ROOT, shell

pytest.importorskip("ray")
SCRIPT = """
import os, sys
from pathlib import Path
from lightning_rob.tune.parallel import run_with_ray
from tests.test_tune import hill, study
home = os.getpid()
def evaluate(number, point):
    if number == 2:
        raise RuntimeError("diverged")
    if number == 4:
        os._exit(1)
    return hill(number, point) | {"elsewhere": float(os.getpid() != home)}
content = {"variables": {"x": [-1, 1], "y": [0, 4]}, "objective": {sys.argv[2]: 1.0}}
run_with_ray(study(Path(sys.argv[1]), evaluate, content, trials=12, random=5), 2)
"""


def script(folder, metric):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(folder), metric]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def test_a_study_through_ray(tmp_path):
    here = study(tmp_path, trials=2, random=5)
    here.run()
    told = script(tmp_path, "height")
    assert told.returncode == 0, told.stderr
    trials = {trial.number: trial for _, trial in read_trials(tmp_path / "trials.jsonl")}
    assert sorted(trials) == list(range(12))
    assert "RuntimeError: diverged" in trials[2].error
    assert "its process died" in trials[4].error
    made = [t for n, t in trials.items() if n > 1 and t.error is None]
    assert all(t.metrics["elsewhere"] == 1 for t in made)
    assert all(t.objective == hill(0, t.values)["height"] for t in made)
    alone = study(tmp_path / "alone", trials=5, random=5)
    alone.run()
    assert [trials[n].values for n in range(5)] == points(alone)
    assert max(t.objective for t in made) > 2.5


def test_what_stops_a_study_comes_through(tmp_path):
    told = script(tmp_path, "depth")
    assert told.returncode == 1
    assert "does not log 'depth'; it logs elsewhere, height" in told.stderr.splitlines()[-1]


def test_the_command_with_ray(tmp_path):
    told = shell("tune", *files(tmp_path), "--trials=3", "--ray", "--concurrent=2")
    assert told.returncode == 0, told.stderr
    assert "of 3; untuned: " in told.stdout
    trials = [trial for _, trial in read_trials(tmp_path / "out/trials.jsonl")]
    assert sorted(t.number for t in trials) == [0, 1, 2]
    assert all(t.error is None for t in trials)
    again = shell("tune", *files(tmp_path), "--trials=3")
    assert f"of 3; untuned: {min(trials, key=lambda t: t.number).objective:.4g}" in again.stdout
    assert len([*read_trials(tmp_path / "out/trials.jsonl")]) == 3
