"""A monitor that is killed again and again: is any checkpoint evaluated twice, or missed?

python benchmarks/reliability_monitor.py
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LIGHTNING_ROB_ALLOW_IMPORT", "tests")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import yaml

from tests.tiny import arc, pgd, recipe, robust_eval, run

CHECKPOINTS, KILLS, LONGEST, SEED = 6, 10, 2.0, 0


def figures() -> list[tuple[str, str, str]]:
    """Return (promise, target, result) of the full counts."""
    torch.set_num_threads(1)  # a fork does not copy the threads of a pool, and would wait for them
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        source = fit(top)
        whole, killed = top / "whole", top / "killed"
        shutil.copytree(source, whole / "checkpoints")
        ended(forked(lambda: monitor(whole, "--once")))
        times = kill_while_they_come(source, killed)
        return rows(whole, killed, times)


def fit(top: Path) -> Path:
    """Train a small run and return its checkpoints."""
    kept = {"class_path": "ModelCheckpoint", "init_args": {"save_top_k": -1, "save_last": True}}
    options = {"model__init_args__monitor": None, "model__init_args__epochs": CHECKPOINTS // 2}
    options |= {"trainer__max_epochs": CHECKPOINTS, "trainer__callbacks+": [kept]}
    path = recipe(top, **options)
    suite = robust_eval({"adaptive_pgd": pgd(steps=20), "arc": arc(steps=20)})
    (top / "suite.yaml").write_text(yaml.safe_dump(suite))
    assert ended(forked(lambda: run("fit", "--config", path))) == 0
    return top / "run/version_0/checkpoints"


def monitor(folder: Path, *args: str) -> None:
    """Return the command line."""
    suite = folder.parent / "suite.yaml"
    run("monitor", folder, "--suite", suite, "--trainer.accelerator=cpu", "--every=0.1", *args)


def forked(work: Callable[[], None]) -> int:
    """Fork a process, which needs no imports, and return its id."""
    child = os.fork()
    if child:
        return child
    code = 70
    try:
        with contextlib.redirect_stdout(open(os.devnull, "w")):
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            work()
            code = 0
    except SystemExit as stop:
        code = stop.code
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Return the exit code of a process once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_while_they_come(source: Path, folder: Path) -> int:
    """Kill monitors at random moments while checkpoints arrive; return the number of SIGKILLs."""
    chance, times = random.Random(SEED), 0
    (folder / "checkpoints").mkdir(parents=True)
    files = sorted(source.glob("epoch*.ckpt"), key=lambda file: file.stat().st_mtime)
    for _ in range(KILLS):
        child = forked(lambda: monitor(folder))
        time.sleep(chance.uniform(0.0, LONGEST))
        if files and chance.random() < CHECKPOINTS / KILLS + 0.2:
            come(files.pop(0), folder / "checkpoints")
        time.sleep(chance.uniform(0.0, LONGEST))
        os.kill(child, signal.SIGKILL)
        times += ended(child) == -signal.SIGKILL
    for file in files:
        come(file, folder / "checkpoints")
    assert ended(forked(lambda: monitor(folder, "--once"))) == 0
    return times


def come(file: Path, folder: Path) -> None:
    """Write a checkpoint in two halves, and last.ckpt as a copy of it."""
    content, target = file.read_bytes(), folder / file.name
    with target.open("wb", buffering=0) as half:
        half.write(content[: len(content) // 2])
        time.sleep(0.15)
        half.write(content[len(content) // 2 :])
    shutil.copy(target, folder / "last.ckpt")


def history(folder: Path) -> list[dict]:
    """Return the lines."""
    return [json.loads(line) for line in (folder / "monitor.jsonl").read_text().splitlines()]


def rows(whole: Path, killed: Path, times: int) -> list[tuple[str, str, str]]:
    """Compare a history with that of an uninterrupted monitor."""
    lines = history(killed)
    counts = Counter(line["weights"] for line in lines if line.get("event") == "evaluated")
    wanted = {line["weights"] for line in history(whole) if line.get("event") == "evaluated"}
    told = [
        {(line["weights"], line["name"]): line["accuracy"] for line in found if "name" in line}
        for found in (history(whole), lines)
    ]
    equal = sum(told[0][key] == told[1].get(key) for key in told[0])
    what = f"monitor, SIGKILL at {times} random moments, {len(wanted)} checkpoints"
    twice = sum(count > 1 for count in counts.values())
    missed = len(wanted - set(counts)) + sum(line.get("event") == "missed" for line in lines)
    return [
        (f"{what}: evaluated twice", "0", str(twice)),
        (f"{what}: missed", "0", str(missed)),
        (f"{what}: results as of one never killed", f"{len(told[0])}/{len(told[0])}",
         f"{equal}/{len(told[0])}"),
    ]  # fmt: skip


if __name__ == "__main__":
    for row in figures():
        print(" | ".join(row))
