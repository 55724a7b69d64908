"""A monitor that notifies, through kills, full disks and receivers that hang.

    python benchmarks/reliability_outages.py [--only kills]

Also its memory over 500 checkpoints, and its cost for the training that it watches. `disk` mounts
small disks and needs root.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("LIGHTNING_ROB_ALLOW_IMPORT", "tests")
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

from benchmarks.reliability_monitor import come, ended, fit, forked, history, monitor
from lightning_rob.commands.monitor import notify
from tests.commands.test_notify import Receiver
from tests.tiny import ROOT

ALARM = "--alarm=robust/worst=0.999"  # every checkpoint is alarmed
KILLS, DISKS, MANY, FITS = 20, 5, 500, 3


def events(folder, kind):
    """Return the events of a kind."""
    lines = history(folder) if (folder / "monitor.jsonl").exists() else []
    return [line for line in lines if line.get("event") == kind]


def until(condition, seconds=120):
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it takes too long")
        time.sleep(0.02)


def delivered(folder, receiver):
    """Return the numbers of notifications that are wanted, lost, and accepted more than once."""
    noted = [line["notify"]["id"] for line in history(folder) if "notify" in line]
    accepted = Counter(post["id"] for post in receiver.posts if post["status"] == 204)
    twice = sum(count > 1 for count in accepted.values())
    assert len(set(noted)) == len(noted)
    assert set(accepted) <= set(noted)
    return len(noted), len(set(noted) - set(accepted)), twice


def watch(folder, receiver, *args):
    """Run a monitor that notifies a receiver, and tries again at once."""
    notify.PAUSES = (0.05, 0.1)
    monitor(folder, ALARM, "--notify", receiver.url, *args)


def run_of(source, folder):
    """Return a run's folder with all checkpoints, and their number."""
    shutil.copytree(source, folder / "checkpoints")
    return folder, len(list((folder / "checkpoints").glob("epoch*.ckpt")))


def kills(top, source):
    """Kill monitors at random moments while checkpoints come and the receiver fails at times."""
    chance, times, folder = random.Random(0), 0, top / "kills"
    (folder / "checkpoints").mkdir(parents=True)
    files = sorted(source.glob("epoch*.ckpt"), key=lambda file: file.stat().st_mtime)
    total = len(files)
    with Receiver() as receiver:
        while times < KILLS:
            receiver.statuses = chance.choices([204, 500], k=4)
            child = forked(lambda: watch(folder, receiver))
            time.sleep(chance.uniform(0.0, 1.0))
            if files and chance.random() < 0.5:
                come(files.pop(0), folder / "checkpoints")
            time.sleep(chance.uniform(0.0, 1.0))
            os.kill(child, signal.SIGKILL)
            times += ended(child) == -signal.SIGKILL
        for file in files:
            come(file, folder / "checkpoints")
        receiver.statuses = []
        ended(forked(lambda: watch(folder, receiver, "--once")))
        ended(forked(lambda: watch(folder, receiver, "--once")))  # of a kill at the very end
        wanted, lost, twice = delivered(folder, receiver)
        receiver.shutdown()
    counts = Counter(line["weights"] for line in events(folder, "evaluated"))
    what = f"SIGKILL at {times} random moments of a monitor that notifies"
    return [
        (f"{what}: checkpoints evaluated once", f"{total}/{total}",
         f"{sum(count == 1 for count in counts.values())}/{total}"),
        (f"{what}: notifications lost", f"0/{wanted}", f"{lost}/{wanted}"),
        (f"{what}: accepted twice, with the same id", f"0/{wanted}", f"{twice}/{wanted}"),
    ]  # fmt: skip


@contextmanager
def small_disk(place, kilobytes):
    """Mount a disk."""
    place.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs"]
    subprocess.run(["mount", *options, str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def disk(top, source):
    """Let the disk of the history fill up at a random moment, and start again with space."""
    chance, good = random.Random(0), 0
    for number in range(DISKS):
        folder, total = run_of(source, top / f"disk-{number}/run")
        shutil.copy(top / "suite.yaml", folder.parent)
        with small_disk(top / f"disk-{number}/disk", 2048) as place, Receiver() as receiver:
            ballast, home = place / "ballast", place / "history"
            ballast.write_bytes(bytes(1024 * chance.randrange(1960, 2036, 4)))
            options = (f"--out={home}", "--once")
            first = ended(forked(lambda: watch(folder, receiver, *options)))  # noqa: B023
            ballast.unlink()
            second = ended(forked(lambda: watch(folder, receiver, *options)))  # noqa: B023
            wanted, lost, twice = delivered(home, receiver)
            receiver.shutdown()
            counts = Counter(line["weights"] for line in events(home, "evaluated"))
            once = list(counts.values()) == [1] * total
            good += once and (first, second, wanted, lost, twice) == (2, 1, total, 0, 0)
    what = "the disk of the history fills up: exit code 2, and the next start evaluates and "
    what += "notifies the rest once"
    return [(what, f"{DISKS}/{DISKS}", f"{good}/{DISKS}")]


def hang(top, source):
    """Watch with a receiver that never responds, and release it afterwards."""
    seconds = {}
    for name in ("none", "hangs"):
        folder, total = run_of(source, top / f"hang-{name}")
        with Receiver() as receiver:
            receiver.statuses = [0] * 1000 if name == "hangs" else []
            over, began = folder / "over", time.monotonic()
            args = (ALARM, "--notify", receiver.url, f"--until={over}")  # with the usual pauses
            child = forked(lambda: monitor(folder, *args))  # noqa: B023
            until(lambda: len(events(folder, "evaluated")) == total)  # noqa: B023
            seconds[name] = time.monotonic() - began
            receiver.statuses = []
            receiver.go.set()
            over.touch()
            ended(child)
            wanted, lost, twice = delivered(folder, receiver)
            receiver.shutdown()
    found = f"{lost}/{wanted} lost, {twice} twice; {seconds['hangs']:.1f} s, "
    found += f"{seconds['none']:.1f} s with one that responds"
    what = f"a receiver that hangs during {total} evaluations: notifications lost, and time"
    return [(what, f"0/{total} lost", found)]


def memory(top, source):
    """Watch many checkpoints, and read the monitor's memory."""
    folder = top / "memory"
    (folder / "checkpoints").mkdir(parents=True)
    content = torch.load(next(source.glob("epoch=0*.ckpt")), weights_only=True)
    noise = torch.Generator().manual_seed(0)
    for step in range(1, MANY + 1):
        weights = content["state_dict"]
        changed = {
            k: v + 0.01 * torch.randn(v.shape, generator=noise) if v.is_floating_point() else v
            for k, v in weights.items()
        }
        copy = content | {"state_dict": changed, "global_step": step}
        torch.save(copy, folder / f"checkpoints/{step}.ckpt")
    child, sizes = forked(lambda: monitor(folder, "--once", "--serve=0")), {}
    for count in (100, MANY):
        until(lambda: lines_with(folder, b'"evaluated"') >= count, 900)  # noqa: B023
        sizes[count] = resident(child)
    ended(child)
    what = f"resident memory of a monitor after 100 and after {MANY} checkpoints"
    return [(what, "flat", " and ".join(f"{size:.0f} MB" for size in sizes.values()))]


def lines_with(folder, text):
    """Count lines, faster than by parsing them."""
    record = folder / "monitor.jsonl"
    return record.read_bytes().count(b'"event": ' + text) if record.exists() else 0


def resident(pid):
    """Return the memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def cost(top, source):
    """Train with and without a monitor beside it, in turns; the shortest time of each counts."""
    seconds = {False: [], True: []}
    for number in range(2 * FITS):
        watched, folder = bool(number % 2), top / f"cost-{number}"
        (folder / "run").mkdir(parents=True)
        over = folder / "over"
        suite = ["--suite", str(top / "digits.yaml"), f"--until={over}", "--every=1"]
        args = ["monitor", str(folder / "run"), *suite, "--trainer.accelerator=cpu"]
        command = [sys.executable, "-m", "lightning_rob"]
        (top / "digits.yaml").write_text(DIGITS)
        child = subprocess.Popen([*command, *args], cwd=ROOT) if watched else None
        time.sleep(8 if watched else 0)  # its imports are not the training's cost
        began = time.monotonic()
        env = os.environ | {"PYTHONPATH": str(ROOT)}  # the fit leaves a config.yaml where it runs
        subprocess.run([*command, *training(folder)], cwd=folder, env=env, check=True)
        seconds[watched].append(time.monotonic() - began)
        if child:
            over.touch()
            child.wait()
    alone, beside = (min(seconds[watched]) for watched in (False, True))
    what = "duration of a training of 6 epochs on two cores, with a monitor beside it : alone"
    return [(what, "< 1.1", f"{beside:.1f} s : {alone:.1f} s = {beside / alone:.2f}")]


DIGITS = """
class_path: RobustEval
init_args:
  attacks:
    pgd: {class_path: PGD, init_args: {threat: {norm: linf, eps: 0.1}, steps: 20, step_size: 0.02}}
"""


def training(folder):
    """Return the command line of a training that keeps every epoch."""
    kept = {"class_path": "ModelCheckpoint"}
    kept["init_args"] = {"dirpath": str(folder / "run/checkpoints"), "save_top_k": -1}
    kept["init_args"]["every_n_train_steps"] = 30  # an epoch
    options = {"trainer.max_epochs": 6, "trainer.logger": "false", "test_after_fit": "false"}
    options |= {"trainer.enable_progress_bar": "false", "trainer.callbacks+": json.dumps(kept)}
    return ["fit", "--config=madry_digits", *(f"--{k}={v}" for k, v in options.items())]


PARTS = {part.__name__: part for part in (kills, disk, hang, memory, cost)}


def figures(names=tuple(PARTS)) -> list[tuple[str, str, str]]:
    """Return (promise, target, result)."""
    torch.set_num_threads(1)  # a fork does not copy the threads of a pool, and would wait for them
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        source = fit(top)
        return [row for name in names for row in PARTS[name](top, source)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=PARTS, action="append")
    for row in figures(parser.parse_args().only or tuple(PARTS)):
        print(" | ".join(row), flush=True)
