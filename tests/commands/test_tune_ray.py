"""The same search through Ray Tune, in separate processes, because Ray leaves state behind."""

import json
import os
import subprocess
import sys
from dataclasses import asdict

import pytest

from lightning_rob.commands.tune.study import attempt, read_trials
from tests.commands.test_tune import files, hill, points, study
from tests.tiny import ROOT, shell

pytest.importorskip("ray")
SCRIPT = """
import os, sys
from pathlib import Path
from lightning_rob.commands.tune.ray import run_with_ray
from tests.commands.test_tune import hill, study
home = os.getpid()
def evaluate(number, point):
    if number == 2:
        raise RuntimeError("diverged")
    if number == 4:
        os._exit(1)
    return hill(number, point) | {"elsewhere": float(os.getpid() != home)}
run_with_ray(study(Path(sys.argv[1]), evaluate, trials=12, random=5), 2)
"""


def script(folder):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)


def test_a_study_through_ray(tmp_path):
    here = study(tmp_path, trials=2, random=5)
    here.run()
    done = script(tmp_path)
    assert done.returncode == 0, done.stderr
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
    # The order in which Ray returns trials is random, and so is the best of twelve.
    assert max(t.objective for t in made) > trials[0].objective


def test_a_missing_metric_ends_the_study_and_is_reported_afterwards(tmp_path):
    from lightning_rob.commands.tune.ray import StudySearcher

    content = {"variables": {"x": [-1, 1], "y": [0, 4]}, "objective": {"depth": 1.0}}
    searcher = StudySearcher(study(tmp_path, content=content, trials=9, random=5))
    first, second = (json.loads(searcher.suggest(name)["proposal"]) for name in "ab")
    assert (first[0], second[0]) == (0, 1)
    made = attempt(hill, *first)
    searcher.on_trial_complete("a", {"trial": json.dumps(asdict(made))})
    assert "does not log 'depth'; it logs height, other" in str(searcher.problem)
    assert searcher.suggest("c") == "FINISHED"
    assert searcher.study.record.ended == []


def test_the_command_with_ray(tmp_path):
    done = shell("tune", *files(tmp_path), "--trials=3", "--ray", "--concurrent=2")
    assert done.returncode == 0, done.stderr
    assert "of 3; untuned: " in done.stdout
    trials = [trial for _, trial in read_trials(tmp_path / "out/trials.jsonl")]
    assert sorted(t.number for t in trials) == [0, 1, 2]
    assert all(t.error is None for t in trials)
    again = shell("tune", *files(tmp_path), "--trials=3")
    assert f"of 3; untuned: {min(trials, key=lambda t: t.number).objective:.4g}" in again.stdout
    assert len([*read_trials(tmp_path / "out/trials.jsonl")]) == 3
