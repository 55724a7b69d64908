"""The command `lightning-rob`; answers what it can before anything heavy is imported."""

import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

COMMANDS = {
    "fit": "train, evaluating the configured attacks at every validation",
    "validate": "evaluate on the validation split",
    "test": "evaluate on the test set and print a table; needs only --ckpt_path",
    "predict": "the probability of each answer, image by image",
    "sweep": "attack a checkpoint value by value of a variable: a table and a figure",
    "tune": "search the values of a recipe's keys by Bayesian optimisation",
    "bpda": "train networks whose gradients stand in for those of random transforms",
    "audit": "look for what makes a defense seem more robust than it is",
    "monitor": "follow a folder of checkpoints and raise an alarm when robustness falls",
    "compare": "two attacks or checkpoints on the same images: difference and significance",
    "export": "write a whole defense as a program that runs without this package",
    "report": "turn the records of runs into one HTML page and a Markdown table",
}
OURS = ("sweep", "tune", "bpda", "audit", "monitor", "export")
READERS = ("compare", "report")  # of records
HELP = """usage: lightning-rob COMMAND [options]

Train adversarially robust ensembles and tell the truth about them, every epoch.

commands:
{commands}

A run is described by recipes and by callbacks that are plugged in:
  lightning-rob fit --config configs/demo.yaml
  lightning-rob fit --config configs/demo.yaml --trainer.callbacks+=callbacks/arc.yaml
  lightning-rob test --ckpt_path last.ckpt --trainer.callbacks+=callbacks/rec_suite.yaml

  lightning-rob COMMAND --help              what matters; --help all for every option
  lightning-rob COMMAND --model.help BAT    the options of a class
  lightning-rob --version

LIGHTNING_ROB_DEBUG=1 shows the whole traceback of an error."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        args: as a shell would give them; None takes the shell's.

    Raises:
        SystemExit: with code 2 and one line on stderr if the input is at fault.
    """
    args = list(sys.argv[1:] if args is None else args)
    if not args or args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        print(HELP.format(commands="\n".join(f"  {k:{width}}  {v}" for k, v in COMMANDS.items())))
    elif args[0] == "--version":
        from importlib.metadata import version

        print(f"lightning-rob {version('lightning-rob')}")
    elif args[0] not in COMMANDS:
        _fail(f"unknown command {args[0]!r}, choose from {', '.join(COMMANDS)}")
    elif args[0] in READERS:
        _read_records(*args)
    elif args[0] in OURS and {"-h", "--help"} & set(args):
        print(import_module(f"lightning_rob.{args[0]}.options").help_text())
    elif _short_help(args):
        from lightning_rob.help import help_text

        print(help_text(args[0]))
    else:
        _run([arg for arg in args if arg != "all" or "--help" not in args])


def _short_help(args: list[str]) -> bool:
    """Whether help is asked for, and not `--help all` of it."""
    return bool({"-h", "--help"} & set(args)) and "all" not in args


def _run(args: list[str]) -> None:
    # Threads that spin while they wait cost up to five times the run on a machine that others use
    # too, and sleeping ones a tenth on an idle one. Read when torch loads its thread pool.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    _keep_freed_memory()
    from lightning_rob.processes import Fault, severed
    from lightning_rob.reasons import InputError
    from lightning_rob.run import Command
    from lightning_rob.signals import heeded
    from lightning_rob.trust import allowing

    start: Callable[[list[str]], Any] = Command
    if args[0] in OURS:
        start = import_module(f"lightning_rob.{args[0]}.command").main
        args = args[1:]
    try:
        with heeded(), allowing(args) as rest:
            start(rest)
    except (InputError, Fault) as error:
        if os.environ.get("LIGHTNING_ROB_DEBUG"):
            raise
        _fail(str(error), code=2 if isinstance(error, InputError) else 1, at_once=severed(error))


def _read_records(command: str, *args: str) -> None:
    from lightning_rob.commands import record_configs

    if {"-h", "--help"} & set(args):
        print(record_configs.build_parser(record_configs.CONFIGS[command]).format_help().rstrip())
        return
    try:
        import_module(f"lightning_rob.commands.{command}").main(args)
    except (ValueError, OSError) as error:
        if os.environ.get("LIGHTNING_ROB_DEBUG"):
            raise
        _fail(str(error))


def _fail(message: str, code: int = 2, at_once: bool = False) -> NoReturn:
    line = re.sub(r"\s*\n\s*", " ", message.strip())
    print(f"lightning-rob: error: {line}", file=sys.stderr, flush=True)
    if at_once:
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def _keep_freed_memory() -> None:
    """Stop glibc from handing freed activations back to the system and faulting them in again.

    Worth 10 to 60 % of an attack's time on a CPU.
    """
    import ctypes

    try:
        mallopt: Any = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 1 << 28)
