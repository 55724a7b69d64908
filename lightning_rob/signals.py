"""SIGTERM and Ctrl-C end a run with the exit codes that shells know, 143 and 130."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

HEEDED = (signal.SIGTERM, signal.SIGINT)
GRACE = 10.0  # seconds in which Python must get to hear of a signal


class Stop:
    """The handler: leaves by SystemExit with 128 + the signal's number.

    At once, or where something is to be brought to its end first, when that asks by `leave`. The
    second signal never waits. Python hears of a signal between two of its steps only: `overhear`
    ends a process that is stuck within one, such as a collective whose other side hangs.
    """

    def __init__(self) -> None:
        self.told = 0
        self.heard = 0.0
        self.waits: Callable[[], bool] = bool

    def __call__(self, signum: int, frame: Any) -> None:
        """Leave, or remember it."""
        self.heard = time.monotonic()
        again, self.told = self.told, signum
        if again or not self.waits():
            self.leave()

    def leave(self, told: int = 0) -> None:
        """Leave, if there was a signal, here or as another process tells."""
        if told := self.told or told:
            if os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"lightning-rob: stopped by {signal.Signals(told).name}", file=sys.stderr)
            raise SystemExit(128 + told)

    def take(self) -> None:
        """Become the handler, whoever is it now."""
        if threading.current_thread() is threading.main_thread():
            for signum in HEEDED:
                signal.signal(signum, self)

    def overhear(self, ear: int) -> None:
        """End the process for a signal that does not get through to Python: a thread's life.

        Args:
            ear: where the numbers of signals can be read; 0 ends it.
        """
        waiting, since = 0, 0.0
        while True:
            ready, _, _ = select.select([ear], [], [], 0.5 if waiting else None)
            if ready and (waiting := os.read(ear, 1)[0]) == 0:
                return os.close(ear)
            since = time.monotonic() if ready else since
            if self.heard > since - 1 or signal.getsignal(waiting) is not self:
                waiting = 0
            elif time.monotonic() > since + GRACE:
                print("lightning-rob: stopped in the midst of a call", file=sys.stderr, flush=True)
                os._exit(128 + waiting)


stop = Stop()


@contextmanager
def heeded() -> Iterator[None]:
    """Heed signals within, and then as before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    stop.told, stop.heard, stop.waits = 0, 0.0, bool
    before = {signum: signal.getsignal(signum) for signum in HEEDED}
    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    stop.take()
    threading.Thread(target=stop.overhear, args=(ear,), daemon=True).start()
    earlier = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    try:
        yield
        stop.leave()
    finally:
        signal.set_wakeup_fd(earlier)
        os.write(mouth, b"\0")
        os.close(mouth)
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _be_another() -> None:
    """In a process forked from here, such as a data loader's, signals mean what they always do."""
    if signal.getsignal(signal.SIGTERM) is stop:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_be_another)
