"""When a run ends early, all its processes end with one message, and its files are complete."""

import os
import resource
import signal
import subprocess
import sys
import time

import pytest
from torch.utils.data import DataLoader

from lightning_rob.cli.errors import shorten_jsonargparse_error
from lightning_rob.cli.main import _fail
from lightning_rob.runtime.errors import Fault, InputError
from lightning_rob.runtime.processes import PARENT, supervised_processes
from tests.cli.faulty import SMALL, intact, marked, plan, rank_fault, slow
from tests.forked import forked, start
from tests.tiny import ROOT, refused, run, same_weights, weights

LAST = "run/version_0/checkpoints/last.ckpt"
KILLER = "--trainer.callbacks+={{class_path: tests.tiny.KillAt, init_args: {{step: {}}}}}"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    # In a process of its own, like the runs it is compared with.
    assert forked("fit", "--config", plan(folder)).returncode == 0
    return folder


def python(code, **env):
    options = {"env": os.environ | {"PYTHONPATH": str(ROOT)} | env, "text": True}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, **options)


def test_a_rank_that_fails_takes_all_with_it(whole, tmp_path):
    assert rank_fault(tmp_path, "hang", "test", whole / LAST)


def test_the_error_of_a_loaders_process_is_one_line(capsys):
    def fail(batch):
        raise InputError("a.png is cut short")

    with pytest.raises(InputError) as found:
        next(iter(DataLoader([0], num_workers=1, collate_fn=fail)))
    with pytest.raises(SystemExit):
        _fail(shorten_jsonargparse_error(str(found.value)))
    assert capsys.readouterr().err == "lightning-rob: error: a.png is cut short\n"


def test_sigterm_within_a_long_attack(whole, tmp_path):
    file = plan(tmp_path, [slow(300)], data=SMALL)
    run = start("test", "--config", file, "--ckpt_path", whole / LAST)
    while not run.out.exists() or "resting" not in run.out.read_text():
        assert run.process.is_alive(), run.wait()
        time.sleep(0.02)
    began = time.time()
    run.process.terminate()
    assert run.wait().returncode == 143
    assert time.time() - began < 30


def test_a_process_dies_with_the_one_that_started_it():
    child = """
import os, time
from lightning_rob.runtime.processes import link_to_parent
link_to_parent()
print("joined", flush=True)
time.sleep(300)
"""
    parent = f"""
import os, subprocess, sys
from lightning_rob.runtime.processes import link_to_parent
link_to_parent()
subprocess.run([sys.executable, "-c", {child!r}], env=os.environ | {{"LOCAL_RANK": "1"}})
"""
    mark = f"test-{time.time_ns()}"
    with python(parent, LIGHTNING_ROB_TEST=mark) as process:
        assert process.stdout.readline() == "joined\n"
        assert len(marked(mark)) == 2
        process.kill()
    while marked(mark):  # the kernel takes a moment
        time.sleep(0.05)


SLEEP, ENDED = "import time; time.sleep(300)", "process 2 of the run ended with exit code 3"


@pytest.mark.parametrize(
    ("commands", "limit", "fails", "message"),
    [
        ([SLEEP], None, True, "on purpose"),
        (["pass", "raise SystemExit(3)"], None, False, ENDED),
        ([SLEEP], 0.2, False, r"process 1 is not through 0\.2 s after"),
    ],
)
def test_launched_processes_end_with_the_run(commands, limit, fails, message):
    children = [subprocess.Popen([sys.executable, "-c", command]) for command in commands]
    with (
        pytest.raises(RuntimeError if fails else Fault, match=message),
        supervised_processes(lambda: children, lambda: limit),
    ):
        if fails:
            raise RuntimeError("on purpose")
    codes = [child.wait(30) for child in children]
    assert codes == ([-signal.SIGKILL] if commands == [SLEEP] else [0, 3])


def test_a_disk_that_takes_no_more(whole, tmp_path, capsys):
    file, size = plan(tmp_path), (whole / LAST).stat().st_size
    run("fit", "--config", file, KILLER.format(99))
    before = weights(tmp_path / LAST)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 100, hard))
    try:
        line = refused(capsys, "fit", "--config", file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    folder = tmp_path / "run/version_0/checkpoints"
    assert f"{folder}/" in line and "cannot be written: File too large" in line
    assert intact(tmp_path) and same_weights(before, weights(tmp_path / LAST))


def test_a_process_started_after_a_run_is_independent_of_it(monkeypatch):
    """A script may call `main` and then torchrun, whose processes have another parent."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with supervised_processes(list, lambda: None):
        assert os.environ[PARENT] == str(os.getpid())
    assert PARENT not in os.environ
