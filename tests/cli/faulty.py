"""Faults of a process, on purpose."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
from lightning.pytorch import Callback

from lightning_rob.runtime.files import check_file
from tests.tiny import ROOT, pgd, recipe, robust_eval

LIMIT = 6.0  # --rank_timeout
SAVE = {
    "class_path": "ModelCheckpoint",
    "init_args": {
        "filename": "at-{step}",
        "every_n_train_steps": 3,
        "save_top_k": -1,
        "save_last": True,
    },
}
END = {"class_path": "ModelCheckpoint", "init_args": {"filename": "end-{epoch}", "save_top_k": -1}}
MODEL = {
    "class_path": "AdversarialTraining",
    "init_args": {
        "net": {"class_path": "tests.tiny.TinyNet"},
        "defense": {
            "class_path": "RandomTransforms",
            "init_args": {
                "size": 2,
                "draws": 2,
                "transforms": {
                    "GaussianNoise": {"alpha": 0.2},
                    "UniformNoise": {"alpha": 0.2},
                    "Gamma": {"alpha": 0.2},
                },
            },
        },
        "draws": 2,
        "optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
    },
}
SMALL = {"class_path": "tests.tiny.Blobs", "init_args": {"eval_batch_size": 4}}


def kill(module) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(module) -> None:
    raise RuntimeError("a fault on purpose")


def hang(module) -> None:
    while True:
        time.sleep(60)


def spoil(module) -> None:
    with torch.no_grad():
        next(module.parameters()).fill_(float("nan"))


def exhaust(module) -> None:
    raise MemoryError


FAULTS = {"kill -9": kill, "raise": fail, "hang": hang, "NaN": spoil, "MemoryError": exhaust}


class Fault(Callback):
    """Makes one process fail at a batch of training or test.

    Args:
        kind: one of `FAULTS`.
        rank: which process.
        batch: at which batch of the first epoch.
        stamp: file to which the time is written first.
    """

    def __init__(self, kind: str, rank: int = 1, batch: int = 1, stamp: str | None = None) -> None:
        self.kind, self.rank, self.batch, self.stamp = kind, rank, batch, stamp

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.current_epoch == 0:
            self.strike(trainer, pl_module, batch_idx)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, *_) -> None:
        self.strike(trainer, pl_module, batch_idx)

    def strike(self, trainer, module, batch_idx) -> None:
        if trainer.global_rank == self.rank and batch_idx == self.batch:
            if self.stamp:
                Path(self.stamp).write_text(str(time.time()))
            FAULTS[self.kind](module)


class Slow(Callback):
    """Takes its time in an epoch's second batch, where signals are to meet it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.rest(batch_idx)

    def on_test_batch_start(self, trainer, pl_module, batch, batch_idx, *_) -> None:
        self.rest(batch_idx)

    def rest(self, batch_idx) -> None:
        if batch_idx == 1:
            print("resting", flush=True)
            time.sleep(self.seconds)


def plan(folder, callbacks=(), **overrides):
    """A recipe with BatchNorm, random transforms and adversarial training, four epochs of four."""
    folder.mkdir(parents=True, exist_ok=True)
    model = MODEL | {"init_args": MODEL["init_args"] | {"attack": pgd(random_start=True, draws=1)}}
    watched = [SAVE, END, robust_eval({"apgd": pgd()}), *callbacks]
    changed = {"model": model, "trainer__callbacks+": watched}
    return recipe(folder, **changed, **overrides)


def fault(kind="hang", **options):
    return {"class_path": "tests.cli.faulty.Fault", "init_args": {"kind": kind} | options}


def slow(seconds):
    return {"class_path": "tests.cli.faulty.Slow", "init_args": {"seconds": seconds}}


def intact(folder):
    """Every checkpoint loads, every record is whole, no litter."""
    for path in folder.rglob("*.ckpt"):
        check_file(path)
        torch.load(path, weights_only=True)
    for path in folder.rglob("*.jsonl"):
        [json.loads(line) for line in path.read_text().splitlines()]
    return not list(folder.rglob("*.part"))


def marked(mark):
    """Processes that were started with this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def rank_fault(folder, kind, command, checkpoint):
    """Fail one of two processes, which the command starts itself.

    Returns:
        Whether both end in time with a non-zero exit code.
    """
    stamp = folder / "struck"
    file = plan(folder, [fault(kind, stamp=str(stamp))], data=SMALL)
    extra = ["--ckpt_path", checkpoint] if command == "test" else []
    mark = f"LIGHTNING_ROB_TEST={folder}"
    args = [sys.executable, "-m", "lightning_rob", command, "--config", file, *extra]
    args += ["--trainer.strategy=ddp", "--trainer.devices=2", f"--rank_timeout={LIMIT}"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "LIGHTNING_ROB_TEST": str(folder)}
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(list(map(str, args)), env=env, stdout=log, stderr=log, cwd=folder)
        code = run.wait(600)
    ended = time.time()
    late = ended - float(stamp.read_text())
    while (orphans := marked(mark)) and time.time() < ended + 5:
        time.sleep(0.05)  # Python 3.14's resource tracker ends a moment after its process
    good = code != 0 and not orphans and late < LIMIT + 10
    print(f"{kind} in {command}: exit code {code}, {late:.1f} s, orphans {orphans}", flush=True)
    for pid in orphans:
        os.kill(pid, signal.SIGKILL)
    return good
