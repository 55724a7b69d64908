"""Entry point of `lightning-rob`; it prints help before anything heavy is imported."""

import ctypes
import io
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from lightning_rob import __version__
from lightning_rob.commands.config import SpreadConfig, config_of, function_of
from lightning_rob.runtime.errors import Fault, InputError, LostRank, nearest, visible

COMMANDS = {
    "fit": "train, evaluating the configured attacks at every validation",
    "validate": "evaluate on the validation split",
    "test": "evaluate on the test set and print a table; needs only a checkpoint",
    "predict": "write the class probabilities of each image",
    "sweep": "attack a checkpoint value by value of a variable: a table and a figure",
    "tune": "search the values of a recipe's keys by Bayesian optimization",
    "bpda": "train networks whose gradients stand in for those of random transforms",
    "attack": "attack by what the defense calls for, and show what was tried",
    "audit": "look for what makes a defense seem more robust than it is",
    "certify": "radii within which no attack changes a smoothed prediction, and attacks",
    "monitor": "follow a folder of checkpoints and raise an alarm when robustness falls",
    "leaderboard": "rank defenses under one protocol, random and adapting ones too",
    "compare": "two attacks or checkpoints on the same images: difference, significance",
    "export": "write a whole defense as a program that runs without this package",
    "recipes": "list the recipes and plug-ins, or copy one to edit",
    "report": "turn the records of runs into one HTML page and a Markdown table",
}
HELP = """usage: lightning-rob COMMAND [options]

Train adversarially robust classifiers and evaluate them honestly, every epoch.

commands:
{commands}

A run is described by recipes and by callbacks that are plugged in:
  lightning-rob fit --config demo --trainer.callbacks+=arc
  lightning-rob test last.ckpt --trainer.callbacks+=rec_suite

  lightning-rob COMMAND --help              what matters; --help all for every option
  lightning-rob COMMAND --model.help BAT    the options of a class
  lightning-rob --version
LIGHTNING_ROB_DEBUG=1 shows the whole traceback of an error."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line, by default the shell's arguments.

    Raises:
        SystemExit: with code 2 and one line on stderr if the input cannot be run, with code 1
            after a fault of the run.
    """
    args = list(sys.argv[1:] if args is None else args)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the table of a long run, in a locale without "…"
    if not args or args[0] in ("-h", "--help"):
        width = max(map(len, COMMANDS))
        _show(HELP.format(commands="\n".join(f"  {k:{width}}  {v}" for k, v in COMMANDS.items())))
    elif args[0] == "--version":
        _show(f"lightning-rob {__version__}")
    elif args[0] not in COMMANDS:
        choices = f", choose from {', '.join(COMMANDS)}"
        _fail(f"unknown command {args[0]!r}{nearest(args[0], COMMANDS, choices)}")
    else:
        config = config_of(args[0])
        reads_records = config is not None and config.reads_records
        # `--help all` prints the parser's own page.
        if not {"-h", "--help"} & {*args} or ("all" in args and not reads_records):
            given = (arg for arg in args if arg != "all" or "--help" not in args)
            _run(reads_records, *given)
        elif config:
            from lightning_rob.cli.options import build_parser  # jsonargparse takes a moment

            _show(build_parser(args[0], config).format_help().rstrip())
        else:
            from lightning_rob.cli.help import run_help

            _show(run_help(args[0], COMMANDS[args[0]]))


def _show(page: str) -> None:
    """Print a page, to a reader such as `head` that may close the pipe before its end."""
    try:
        print(page, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit


def _run(reads_records: bool, command: str, *args: str) -> None:
    import yaml

    from lightning_rob.cli.options import parse_records, read_command_line

    try:
        if command == "fit" and any(re.match("--seeds\\b", arg) for arg in args):
            from lightning_rob.cli.seeds import fit_seeds

            fit_seeds(args)
        elif reads_records:
            config = parse_records(command, args)  # before the function is imported, and torch
            function_of(command)(config)
        else:
            line = read_command_line(command, *args)
            share_work(line)
            if sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0":
                # A file or a pipe keeps to the results and errors, of which an error is one line.
                print(f"lightning-rob {command}: loading PyTorch …", file=sys.stderr, flush=True)
            tune_process()
            from lightning_rob.cli.commands import run_command
            from lightning_rob.recipes.trust import allow_imports
            from lightning_rob.runtime.processes import handle_signals

            with handle_signals(), allow_imports(line.allowed):
                run_command(line)
    except (InputError, ValueError, OSError, ModuleNotFoundError, yaml.YAMLError, Fault) as error:
        if os.environ.get("LIGHTNING_ROB_DEBUG"):
            raise
        code = 1 if isinstance(error, Fault) else 2
        _fail(str(error), code, at_once=isinstance(error, LostRank))


def share_work(line: Any) -> None:
    """Let several processes do the parts of a command, where its options ask for it."""
    options = line.options
    # `tune` spreads each round of its trials by itself.
    if isinstance(options, SpreadConfig) and options.processes and line.command != "tune":
        from lightning_rob.runtime.spread import spread

        spread([line.command, *line.given], options.processes, ray=options.ray > 0)


def _fail(message: str, code: int = 2, at_once: bool = False) -> NoReturn:
    # The error of a loader's process holds a traceback, and ends with what was raised.
    message = re.sub(r"(?s)Caught \w+ in DataLoader worker .*\w+Error: ", "", message)
    line = visible(re.sub(r"\s*\n\s*", " ", message.strip()))
    print(f"lightning-rob: error: {line}", file=sys.stderr, flush=True)
    if at_once:  # skip exit handlers: torch's would wait for a lost rank
        sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def tune_process() -> None:
    """Set the process's thread and memory options for speed; call it before torch is imported."""
    # Waiting threads sleep: on a shared machine spinning costs up to five times the run, on an idle
    # one sleeping costs a tenth.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        mallopt: Any = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # of another system
        return
    # glibc keeps freed activations: returning them to the system takes 10 to 60 % of an attack's
    # time on a CPU.
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3
    mallopt(mmap_threshold, 1 << 30)
    mallopt(trim_threshold, (1 << 31) - 1)
    mallopt(top_pad, 1 << 28)
