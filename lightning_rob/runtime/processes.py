"""The processes of a run: values of all of them, and how they end."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from lightning_rob.runtime.errors import Fault, LostRank

PARENT = "LIGHTNING_ROB_PARENT"
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
LOST = r"(?i)connection (closed|reset)|connection refused|timed out|timeout|broken pipe"
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalHandler:
    """Handler that ends a run by SystemExit with 128 + the signal's number, as shells expect.

    It leaves at once, or, while `defer()` is true, at the next call of `leave`. A second signal
    never waits.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all signals and leave at once from now on."""
        self.received = 0
        self.reported = False
        self.closing = False
        self.defer: Callable[[], bool] = bool

    def __call__(self, signum: int, frame: Any) -> None:
        """Leave, or remember the signal until `leave`."""
        again, self.received = self.received, signum
        if not self.closing and (again or not self.defer()):
            self.leave()

    def leave(self, received: int = 0) -> None:
        """Leave if a signal was received, here or (`received`) by another rank."""
        if received := self.received or received:
            line = f"lightning-rob: stopped by {signal.Signals(received).name}\n"
            if os.environ.get("LOCAL_RANK", "0") == "0" and not self.reported:
                self.reported = True  # first: a second signal may come during the line
                sys.stderr.write(line)  # once: between print's two writes that signal would cut it
            raise SystemExit(128 + received)

    def install(self) -> None:
        """Become the handler of all `SIGNALS`, in place of any other."""
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                signal.signal(signum, self)


stop = SignalHandler()


@contextmanager
def handle_signals() -> Iterator[None]:
    """End the block on SIGTERM (exit code 143) and Ctrl-C (130); restore the handlers after it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _register_fork_reset()
    stop.reset()
    handlers = {signum: signal.getsignal(signum) for signum in SIGNALS}
    stop.install()
    try:
        yield
    finally:
        stop.closing = True  # else one of several signals could leave before all is restored
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    stop.leave()


@cache  # a registration cannot be taken back, so there must be only one
def _register_fork_reset() -> None:
    def restore_default_handlers() -> None:
        if signal.getsignal(signal.SIGTERM) is stop:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    if hasattr(os, "register_at_fork"):  # forked children, such as DataLoader workers
        os.register_at_fork(after_in_child=restore_default_handlers)


def link_to_parent() -> None:
    """Record this process as the parent of the ranks it launches; a rank exits with its parent."""
    if "LOCAL_RANK" not in os.environ:
        os.environ[PARENT] = str(os.getpid())
        return
    parent = int(os.environ.get(PARENT, "0"))
    if not parent or parent == os.getpid():  # torchrun and SLURM supervise their own ranks
        return
    # A rank that hangs in a collective reacts to nothing but SIGKILL, and its parent may not live
    # to send it: on Linux the kernel does.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the link was made
        os._exit(1)


@contextmanager
def supervised_processes(
    children: Callable[[], Sequence[Any]], limit: Callable[[], float | None]
) -> Iterator[None]:
    """Kill the ranks launched in the block if it fails; wait for them if it succeeds.

    `children` returns the launched processes on this machine, of subprocess or, waited for already,
    of multiprocessing; `limit` for how many seconds they may outlast this one, None is forever.
    """
    link_to_parent()
    try:
        yield
    except BaseException:
        for child in children():
            child.kill()  # a hung one reacts to nothing else
        raise
    finally:
        # Processes that the caller starts later belong to another run.
        if os.environ.get(PARENT) == str(os.getpid()):
            del os.environ[PARENT]
    started = [child for child in children() if isinstance(child, subprocess.Popen)]
    for rank, child in enumerate(started, start=1):
        try:
            code = child.wait(limit())
        except subprocess.TimeoutExpired as error:
            child.kill()
            raise Fault(f"process {rank} is not through {limit():g} s after process 0") from error
        if code:
            raise Fault(f"process {rank} of the run ended with exit code {code}")


def gathered(mine: Any) -> list[Any]:
    """Return the value of every process of a run, in the order of ranks; all have to call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [mine]
    everywhere = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everywhere, mine)
    return everywhere


def as_fault(error: RuntimeError) -> LostRank | None:
    """Convert a torch.distributed error about a lost or timed-out rank; None for other errors."""
    if not isinstance(error, torch.distributed.DistError) and not re.search(LOST, str(error)):
        return None
    return LostRank(
        "another process of the run has ended or hangs, which this one found out by waiting for "
        f"it: {str(error).splitlines()[0]}"
    )
