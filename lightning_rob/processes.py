"""The processes of one run end together, whatever ends one of them."""

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

PARENT = "LIGHTNING_ROB_PARENT"
SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)


SEVERED = r"(?i)connection (closed|reset)|connection refused|timed out|timeout|broken pipe"


class Fault(Exception):
    """What ended a run though its input was right: one line, exit code 1."""


def join_the_run() -> None:
    """Tell processes started from here whose they are; in one of them, die with who started it.

    A process hung in a collective heeds nothing but SIGKILL, and its parent may have no chance to
    send it: on Linux the kernel does, elsewhere a thread.
    """
    if "LOCAL_RANK" not in os.environ:
        os.environ[PARENT] = str(os.getpid())
        return
    parent = int(os.environ.get(PARENT, "0"))
    if not parent or parent == os.getpid():  # torchrun and SLURM look after what they start
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    else:
        threading.Thread(target=_outlive, args=(parent,), daemon=True).start()
    if os.getppid() != parent:  # it died before
        os._exit(1)


def _outlive(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


@contextmanager
def together(
    children: Callable[[], Sequence["subprocess.Popen[bytes]"]], limit: Callable[[], float | None]
) -> Iterator[None]:
    """End with the processes that are started within.

    Args:
        children: those processes, on this machine.
        limit: how many seconds longer than this one they may take; None is for ever.

    Raises:
        Fault: one failed, or is late.
    """
    join_the_run()
    try:
        yield
    except BaseException:
        for child in children():
            child.kill()  # a hung one heeds nothing else
        raise
    finally:
        if os.environ.get(PARENT) == str(os.getpid()):  # what is started later is another run
            del os.environ[PARENT]
    for rank, child in enumerate(children(), start=1):
        try:
            code = child.wait(limit())
        except subprocess.TimeoutExpired as error:
            child.kill()
            raise Fault(f"process {rank} is not through {limit():g} s after process 0") from error
        if code:
            raise Fault(f"process {rank} of the run ended with exit code {code}")


def lost(error: RuntimeError) -> Fault | None:
    """What it means if torch says that another process is gone or late; None if it does not."""
    if not isinstance(error, torch.distributed.DistError) and not re.search(SEVERED, str(error)):
        return None
    return Fault(
        "another process of the run has ended or hangs, which this one found out by waiting for "
        f"it: {str(error).splitlines()[0]}"
    )


def severed(error: Exception) -> bool:
    """Whether this process must not wait for others any more, not even to take leave of them."""
    return isinstance(error, Fault) and isinstance(error.__cause__, RuntimeError)
