"""One command in several processes, each of which does a part of its work and records it."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_rob.runtime.errors import visible

GPUS = "CUDA_VISIBLE_DEVICES"
TRIES = 3  # of a part whose process is killed
_children: set[subprocess.Popen[str]] = set()
_ending = threading.Event()


def spread(args: Sequence[str], workers: int, ray: bool = False) -> list[str]:
    """Run a command line as `workers` processes with --part=i/n; return why each failed, or "".

    The records of a part stay, whatever becomes of its process: the command itself, run
    afterwards, reads all of them and does the rest.
    """
    # As many threads as cores in each process would wait for one another.
    cores = max((os.cpu_count() or 1) // workers, 1)
    given = os.environ.get(GPUS)  # as a scheduler sets it
    here = range(len([*Path("/dev").glob("nvidia[0-9]*")]))
    devices = [*map(str, here)] if given is None else [one for one in given.split(",") if one]
    gpus = len(devices)
    parts = []
    for i in range(workers):
        own = {"OMP_NUM_THREADS": str(cores)}
        own |= {GPUS: devices[i % gpus]} if gpus and not ray else {}
        whole = [*args, "--workers=1", "--ray=0", f"--part={i + 1}/{workers}"]
        parts.append((whole, own, str(Path.cwd())))
    where = "as tasks of Ray" if ray else "side by side"
    print(f"{workers} parts {where}; the table follows when all end", file=sys.stderr, flush=True)
    if ray:
        problems = _on_ray(parts, cores, gpus / workers)
    else:
        with ThreadPoolExecutor(workers) as pool, ending_children():
            problems = [*pool.map(lambda part: run_part(*part), parts)]
    for number, problem in enumerate(problems, 1):
        if problem:
            print(visible(f"part {number}/{workers}: {problem}"), file=sys.stderr, flush=True)
    return problems


def run_part(args: Sequence[str], own: dict[str, str], folder: str) -> str:
    """Run the package's command in a folder; return its last line on stderr if it failed."""
    line = [sys.executable, "-m", "lightning_rob", *args]
    for _ in range(TRIES):
        pipe = subprocess.PIPE
        # Of the number of threads the choice of the user counts; its GPUs were dealt out.
        env = own | os.environ | {key: own[key] for key in own if key == GPUS}
        code, errors = run_child(line, env=env, cwd=folder, stdout=subprocess.DEVNULL, stderr=pipe)
        # Else a signal ended it: memory, or a machine that is taken away. Ctrl-C ends all.
        if code >= 0 or code == -signal.SIGINT or _ending.is_set():
            break
    lines = errors.strip().splitlines() or [f"exit code {code}"]
    return lines[-1] if code else ""


def run_child(line: Sequence[str], **options: Any) -> tuple[int, str]:
    """Run a process; return its exit code and stderr. `ending_children` may end it before."""
    with subprocess.Popen(line, text=True, **options) as child:
        _children.add(child)
        if _ending.is_set():
            child.terminate()
        try:
            errors = child.communicate()[1]
        except BaseException:
            child.terminate()  # leaving the block waits for it
            raise
        finally:
            _children.discard(child)
    return child.returncode, errors or ""


@contextmanager
def ending_children() -> Iterator[None]:
    """End the children where the block is left by an error, SIGTERM (exit 143) or Ctrl-C (130)."""

    def leave(signum: int, frame: Any) -> None:
        raise SystemExit(128 + signum)

    # Python lets the main thread alone set handlers; a notebook may call from another one.
    here = threading.current_thread() is threading.main_thread()
    signals = (signal.SIGTERM, signal.SIGINT) if here else ()
    handlers = {signum: signal.signal(signum, leave) for signum in signals}
    _ending.clear()
    try:
        yield
    except BaseException:
        _ending.set()
        for child in [*_children]:
            child.terminate()
        raise
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _on_ray(
    parts: Sequence[tuple[list[str], dict[str, str], str]], cores: int, gpus: float
) -> list[str]:
    """Run the parts as tasks of Ray, whose machines share the file system."""
    try:
        import ray
    except ModuleNotFoundError as error:
        needed = "--ray needs Ray: pip install 'lightning-rob[ray]'"
        raise ModuleNotFoundError(needed, name="ray") from error
    here = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": cores * len(parts)}
    # Ray's 15 starves them beside other work; a task is as important as its command.
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR", **here)
    try:
        task = ray.remote(num_cpus=cores, num_gpus=gpus, max_retries=TRIES)(run_part)
        return list(ray.get([task.remote(*part) for part in parts]))
    finally:
        ray.shutdown()
