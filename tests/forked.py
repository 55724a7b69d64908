"""The command in processes forked from one that has imported everything: no start costs seconds.

`tests.tiny.shell` starts an interpreter; whatever depends on how a process starts needs that.
"""

import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

from lightning_rob.cli import main
from tests.tiny import ROOT

IMPORTED = ["pytest", "lightning_rob.cli.lightning_cli", "lightning_rob.cli.commands", __name__]


@cache
def _forks() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with patch.dict(os.environ, PYTHONPATH=str(ROOT)):
        forkserver.ensure_running()
    return context


def _call(
    function: Callable, args: tuple, env: dict[str, str], folder: str, out: str, error: str
) -> None:
    """Call a function in a forked process with the environment and output of its own."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for descriptor, path in ((1, out), (2, error)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), descriptor)
    sys.stdout.reconfigure(line_buffering=True)
    function(*args)


class Forked:
    """A function called in a forked process.

    Args:
        function: importable, of `args`.
        folder: its working folder.
        env: variables of its environment besides those of this process.
    """

    def __init__(
        self, function: Callable, *args: object, folder: Path | str = ROOT, **env: str
    ) -> None:
        output = tempfile.mkdtemp()
        self.out, self.error = Path(output, "out"), Path(output, "error")
        settings = os.environ | {"PYTHONPATH": str(ROOT)} | env
        given = (function, args, dict(settings), str(folder), str(self.out), str(self.error))
        self.process = _forks().Process(target=_call, args=given)
        self.process.start()

    def wait(self, timeout: float = 600) -> CompletedProcess[str]:
        """Wait for its end, and kill it after `timeout` seconds."""
        self.process.join(timeout)
        self.process.kill()
        self.process.join()
        out, error = (p.read_text() if p.exists() else "" for p in (self.out, self.error))
        return CompletedProcess([], self.process.exitcode, out, error)


def start(*args: object, **env: str) -> Forked:
    """Start the command."""
    return Forked(main, list(map(str, args)), **env)


def forked(*args: object, **env: str) -> CompletedProcess[str]:
    """Run the command to its end."""
    return start(*args, **env).wait()


def forked_child(
    line: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | str = ".", **_: object
) -> tuple[int, str]:
    """Run the command as `lightning_rob.runtime.spread.run_child` does, which starts Python."""
    done = Forked(main, list(line[3:]), folder=Path(cwd).resolve(), **(env or {})).wait()
    return done.returncode, done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def two_ranks(*args: object) -> CompletedProcess[str]:
    """Run the command in two processes, as torchrun starts them; return the first's result."""
    return two_processes(main, list(map(str, args)))


def two_processes(function: Callable, *args: object) -> CompletedProcess[str]:
    """Call a function in two processes that can find each other; return the first's result."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    settings = [where | {"LOCAL_RANK": str(i), "WORLD_SIZE": "2"} for i in range(2)]
    ranks = [Forked(function, *args, **env) for env in settings]
    first, second = (rank.wait() for rank in ranks)
    assert first.returncode or not second.returncode, second.stderr
    return first
