"""Faults that end a run lose no records: lost ranks, signals, SIGKILL and full disks.

    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/reliability_faults.py
    OMP_WAIT_POLICY=PASSIVE OMP_NUM_THREADS=1 python benchmarks/reliability_faults.py \
        --only resume --count 1

Every number comes from running `lightning-rob`: the two processes of a rank fault in the
shell's way, all others forked from one process that has imported everything. `disk` needs a kernel
that lets a user mount in a namespace of his own (`unshare -rm`). --keep leaves the runs' folders.
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
import traceback
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork with a pool of threads would hang
os.environ.setdefault("LIGHTNING_ROB_ALLOW_IMPORT", "tests")

import torch  # noqa: E402

import lightning_rob.cli.lightning_cli  # noqa: E402, F401  # once, for all forks
from lightning_rob.cli import main as command_line  # noqa: E402
from tests.cli.faulty import FAULTS, LIMIT, SMALL, intact, plan, rank_fault, slow  # noqa: E402
from tests.tiny import same_weights, weights  # noqa: E402


def fork(log, *args):
    """Run a command line in a process forked from this one; return its id."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(out, 1)
        os.dup2(out, 2)
        command_line(list(map(str, args)))
        code = 0
    except SystemExit as exit_:
        code = exit_.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(log, word):
    """Wait until a log contains a word."""
    while not log.exists() or word not in log.read_text():
        time.sleep(0.05)


def code_of(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def finished(log, *args):
    """Run a command line to its end; return exit code and output."""
    code = code_of(fork(log, *args))
    return code, log.read_text()


def whole_run(folder):
    """Run an uninterrupted fit; return its folder and its seconds."""
    began = time.time()
    code, told = finished(folder / "log", "fit", "--config", plan(folder))
    assert code == 0, told
    return folder / "run/version_0/checkpoints", time.time() - began


def ranks(folder, count):
    """Return how many of ten rank faults end as promised."""
    checkpoints, _ = whole_run(folder / "whole")
    cases = [(kind, command) for command in ("fit", "test") for kind in FAULTS][:count]
    good = 0
    for kind, command in cases:
        place = folder / f"{command}-{kind.replace(' ', '')}"
        place.mkdir()
        good += rank_fault(place, kind, command, checkpoints / "last.ckpt")
    what = "a process of two killed, raising, hung, with NaN, out of memory, in fit and in test: "
    what += f"all gone {LIMIT + 10:g} s later at most, no orphan, exit code not 0"
    return [(what, "10/10", f"{good}/{len(cases)}")]


def resume(folder, count):
    """Return how many fits, killed at random times and resumed, end with the same weights."""
    checkpoints, seconds = whole_run(folder / "whole")
    expected = weights(checkpoints / "end-epoch=3.ckpt")
    chance, good, number = random.Random(0), 0, 0
    while number < count:
        place = folder / f"killed-{number}"
        shutil.rmtree(place, ignore_errors=True)
        file = plan(place)
        last, log = place / "run/version_0/checkpoints/last.ckpt", place / "log"
        pid = fork(log, "fit", "--config", file)
        time.sleep(chance.uniform(0.2, 1) * seconds)
        os.kill(pid, signal.SIGKILL)
        if code_of(pid) != -signal.SIGKILL:
            continue
        extra = ["--ckpt_path", last] if last.exists() else []
        step = steps(last) if extra else 0
        code, told = finished(log, "fit", "--config", file, *extra)
        same = code == 0 and same_weights(expected, weights(last.with_name("end-epoch=3.ckpt")))
        print(f"killed, resumed after step {step}: {'equal' if same else told[-500:]}", flush=True)
        number += 1
        good += same
    what = "fit killed by SIGKILL at random times (BatchNorm, random transforms, adversarial "
    what += "training) and resumed: weights bitwise those of an uninterrupted fit"
    return [(what, "20/20", f"{good}/{count}")]


def steps(checkpoint):
    return torch.load(checkpoint, weights_only=True)["global_step"]


def signals(folder, count):
    """Send SIGTERM and Ctrl-C during fit and during a long attack of test."""
    checkpoints, _ = whole_run(folder / "whole")
    rows = []
    for name, expected in (("SIGTERM", 143), ("SIGINT", 130)):
        good, longest = 0, 0.0
        for number in range(count):
            command = ("fit", "test")[number % 2]
            place = folder / f"{name}-{number}"
            file = plan(place, [slow(0.5 if command == "fit" else 60)], data=SMALL)
            extra = ["--ckpt_path", checkpoints / "last.ckpt"] if command == "test" else []
            pid = fork(place / "log", command, "--config", file, *extra)
            wait_for(place / "log", "resting")
            began = time.time()
            os.kill(pid, getattr(signal, name))
            code = code_of(pid)
            longest = max(longest, time.time() - began)
            good += code == expected and intact(place)
            print(f"{name} in {command}: exit code {code}", flush=True)
        what = f"{name} in fit and within an attack of test: exit code {expected}, files whole"
        rows.append((what, f"{count}/{count}", f"{good}/{count}, {longest:.1f} s at most"))
    return rows


def disk(folder, count):
    """Run on a disk that fills up at a random moment, and on a read-only one."""
    checkpoints, _ = whole_run(folder / "whole")
    disk_, chance = folder / "disk", random.Random(0)
    disk_.mkdir()
    extra = {"fit": [], "test": ["--ckpt_path", checkpoints / "last.ckpt"]}
    needed = {command: kilobytes(folder, disk_, command, extra[command]) for command in extra}
    rows = []
    for what in ("a full disk", "a read-only disk"):
        good = 0
        for number in range(count):
            command = ("fit", "test")[number % 2]
            size = chance.randrange(4, needed[command], 4) if "full" in what else 1024
            place = folder / f"{what.split()[1]}-{number}"
            file = plan(place, trainer__logger=logger(disk_))
            with mounted(disk_, size, read_only="read" in what):
                code, told = finished(place / "log", command, "--config", file, *extra[command])
                errors = [line for line in told.splitlines() if "error:" in line]
                named = len(errors) == 1 and str(disk_) in errors[0] and "Traceback" not in told
                fine = code == 2 and named and intact(disk_) and not litter()
            print(f"{what}, {size} kB, in {command}: exit code {code}, {errors}", flush=True)
            print("" if fine else told[-3000:], flush=True)
            good += fine
        text = f"{what} in fit and test: one line that names it, exit code 2, files whole"
        rows.append((text, f"{count}/{count}", f"{good}/{count}"))
    return rows


@contextmanager
def mounted(place, size, read_only=False):
    """Mount a disk of `size` kB."""
    mount("-t", "tmpfs", "-o", f"size={size}k", "tmpfs", place)
    try:
        if read_only:
            mount("-o", "remount,ro", place)
        yield
    finally:
        subprocess.run(["umount", str(place)], check=True)


def kilobytes(folder, disk_, command, extra):
    """Return the disk space of an uninterrupted run: a smaller disk certainly fills up."""
    file = plan(folder / f"roomy-{command}", trainer__logger=logger(disk_))
    with mounted(disk_, 1 << 16):
        code, told = finished(folder / "log", command, "--config", file, *extra)
        assert code == 0, told
        return shutil.disk_usage(disk_).used // 1024


def litter():
    """Return checkpoints left in the folder of temporary files."""
    files = (path for path in Path(tempfile.gettempdir()).rglob("*") if path.is_file())
    return [path for path in files if path.read_bytes()[:2] == b"PK"]


def logger(folder):
    init = {"save_dir": str(folder), "name": "run", "version": 0}
    return {"class_path": "lightning.pytorch.loggers.TensorBoardLogger", "init_args": init}


def mount(*args):
    subprocess.run(["mount", *map(str, args)], check=True)


PARTS = {"ranks": (ranks, 10), "resume": (resume, 20), "signals": (signals, 10), "disk": (disk, 10)}


def figures() -> list[tuple[str, str, str]]:
    """Return each measurement with its target."""
    rows = []
    for name in PARTS:
        with tempfile.TemporaryDirectory() as folder:
            table = Path(folder) / "table.json"
            own = ["unshare", "-rm"] if name == "disk" and os.geteuid() else []
            own = ["unshare", "-m"] if name == "disk" and not os.geteuid() else own
            command = [*own, sys.executable, __file__, "--only", name, "--table", table]
            subprocess.run(list(map(str, command)), check=True)
            rows += [tuple(row) for row in json.loads(table.read_text())]
    return rows


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--count", type=int)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--keep", action="store_true")
    options = parser.parse_args()
    if options.only:
        part, count = PARTS[options.only]
        folder = Path(tempfile.mkdtemp())
        (folder / "tmp").mkdir()
        tempfile.tempdir = str(folder / "tmp")
        try:
            rows = part(folder, options.count or count)
        finally:
            print(folder) if options.keep else shutil.rmtree(folder)
    else:
        rows = figures()
    if options.table:
        options.table.write_text(json.dumps(rows))
    for row in rows:
        print(" | ".join(row))


if __name__ == "__main__":
    main()
