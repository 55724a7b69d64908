"""What a user may ask of `lightning-rob sweep`; nothing heavy is imported."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

VARIABLES = {
    "probability": "of the first member; the others share the rest",
    "members": "the first M of the ensemble, their shares kept",
    "eps": "radius; step_size of PGD and ARC changes with it",
    "steps": "of every attack that takes steps",
    "neighbours": "competing classes that ARC searches, G",
}
HELP = """usage: lightning-rob sweep --over VARIABLE --values LIST [options]

Attack a checkpoint value by value of a variable: one table, figure and record.

  --over VARIABLE  {variables}
  --values LIST    numbers, fractions, ranges start:stop:step: 1/255,2/255
  --best ATTACK    the value at which the defense is best under this attack, or,
                   over steps or neighbours, at which the attack is strongest
  --out FOLDER     for sweep.jsonl, sweep.md and sweep.png
                   (default: sweeps/CHECKPOINT_FINGERPRINT_VARIABLE)

All other options are those of `lightning-rob test`, see there.

  lightning-rob sweep --ckpt_path last.ckpt --over probability \\
      --values 0.5:1:0.05 --best apgd \\
      --trainer.callbacks+=callbacks/apgd.yaml \\
      --trainer.callbacks+=callbacks/arc.yaml

The same command again goes on where it was stopped. A figure is taken from the
record only if weights, attack, data, seed and versions are still the same."""
MOST_VALUES = 1000


@dataclass(frozen=True)
class Value:
    """One value of the variable.

    Args:
        number: what is meant.
        label: how the user would write it.
    """

    number: float
    label: str


@dataclass(frozen=True)
class Study:
    """A sweep as it was asked for.

    Args:
        over: the variable, one of `VARIABLES`.
        values: in the order of the table.
        out: folder for the outcome; None chooses one by the weights.
        best: the attack under which a value is chosen.
        command: the command line, for the record.
    """

    over: str
    values: tuple[Value, ...]
    out: Path | None = None
    best: str | None = None
    command: str = ""


class Arguments(argparse.ArgumentParser):
    """Arguments of a command of ours; what cannot be meant is a ValueError."""

    def error(self, message: str) -> NoReturn:
        """Raise it, where argparse would end the program."""
        raise ValueError(message)


def help_text() -> str:
    """What `lightning-rob sweep --help` prints."""
    width = max(map(len, VARIABLES))
    lines = [f"{name:{width}}  {text}" for name, text in VARIABLES.items()]
    return HELP.format(variables=("\n" + 19 * " ").join(lines))


def parse(args: Sequence[str]) -> tuple[Study, list[str]]:
    """The sweep that is asked for, and the arguments that are for `test`.

    Raises:
        ValueError: it cannot be meant.
    """
    options = Arguments(add_help=False, allow_abbrev=False)
    for name in ("--over", "--values", "--best", "--out"):
        options.add_argument(name)
    own, rest = options.parse_known_args(list(args))
    if own.over not in VARIABLES:
        raise ValueError(f"--over must be one of {', '.join(VARIABLES)}, got {own.over}")
    if own.best and own.over == "eps":
        raise ValueError("--best has no meaning over eps: a larger radius is never better")
    out = Path(own.out) if own.out else None
    command = shlex.join(["lightning-rob", "sweep", *args])
    return Study(own.over, parse_values(own.over, own.values or ""), out, own.best, command), rest


def parse_values(over: str, text: str) -> tuple[Value, ...]:
    """The values that a list such as "1/255,2/255" or "0.5:1:0.1" stands for, each once.

    Raises:
        ValueError: none, not numbers, or not what the variable can be.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = [number for part in parts for number in _numbers(part)]
    if not numbers:
        raise ValueError(f"--values must name at least one value, such as 1,2,4, got {text!r}")
    for number in numbers:
        _check(over, number)
    of_255 = all("/255" in part for part in parts)
    return tuple(Value(float(n), _label(n, of_255)) for n in dict.fromkeys(numbers))


def _numbers(part: str) -> list[Fraction]:
    try:
        start, *more = [Fraction(number.strip()) for number in part.split(":")]
        if not more:
            return [start]
        stop, step = more
        count = (stop - start) // step
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"--values takes numbers, fractions and start:stop:step, got {part!r}"
        ) from None
    if not 0 <= count < MOST_VALUES:
        raise ValueError(f"--values {part!r} names {max(count + 1, 0)} values")
    return [start + i * step for i in range(count + 1)]


def _check(over: str, number: Fraction) -> None:
    right, meant = {
        "eps": (number > 0, "above 0"),
        "probability": (0 <= number <= 1, "in [0, 1]"),
    }.get(over, (number >= 1 and number.denominator == 1, "whole and at least 1"))
    if not right:
        raise ValueError(f"--values: {over} must be {meant}, got {float(number):g}")


def _label(number: Fraction, of_255: bool) -> str:
    return f"{float(number * 255):g}/255" if of_255 else f"{float(number):g}"
