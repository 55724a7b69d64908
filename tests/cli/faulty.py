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
from tests.pieces import ROOT, adam, spec
from tests.tiny import pgd, recipe, robust_eval

LIMIT = 6.0  # --rank_timeout
EVERY_3 = {"every_n_train_steps": 3, "save_top_k": -1, "save_last": True}
SAVE = spec("ModelCheckpoint", filename="at-{step}", **EVERY_3)
END = spec("ModelCheckpoint", filename="end-{epoch}", save_top_k=-1)
DRAWN = {name: {"alpha": 0.2} for name in ("GaussianNoise", "UniformNoise", "Gamma")}
SMALL = spec("tests.tiny.Blobs", eval_batch_size=4)


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

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx, *_) -> None:
        if batch_idx == 1:
            print("resting", flush=True)
            time.sleep(self.seconds)

    on_test_batch_start = on_train_batch_start


def plan(folder, callbacks=(), **overrides):
    """A recipe with BatchNorm, random transforms and adversarial training, four epochs of four."""
    parts = {"net": spec("tests.tiny.TinyNet"), "attack": pgd(random_start=True, draws=1)}
    defense = spec("RandomTransforms", size=2, draws=2, transforms=DRAWN)
    parts |= {"defense": defense, "draws": 2, "optimizer": adam()}
    watched = [SAVE, END, robust_eval({"apgd": pgd()}), *callbacks]
    changed = {"model": spec("AdversarialTraining", **parts), "trainer__callbacks+": watched}
    return recipe(folder, **changed, **overrides)


def fault(kind="hang", **options):
    return spec("tests.cli.faulty.Fault", kind=kind, **options)


def slow(seconds):
    return spec("tests.cli.faulty.Slow", seconds=seconds)


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
