"""`lightning-rob sweep`: a checkpoint under attack, value by value of a variable."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import ClassVar

from lightning_rob.commands.config import SpreadConfig

OF_DEFENSE = ("probability", "members")
SWEPT = (*OF_DEFENSE, "eps", "steps", "neighbours")
MAX_VALUES = 1000


@dataclass(frozen=True)
class Value:
    """One value of the variable, as a number and as a user would write it."""

    number: float
    label: str


def parse_values(over: str, text: str) -> tuple[Value, ...]:
    """Return the values of a list such as "1/255,2/255" or "0.5:1:0.1", each once."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    numbers = [number for part in parts for number in _numbers(part)]
    if not numbers:
        raise ValueError(f"--values must name at least one value, such as 1,2,4, got {text!r}")
    for number in numbers:
        if over == "eps":
            fits, allowed = number > 0, "above 0"
        elif over == "probability":
            fits, allowed = 0 <= number <= 1, "in [0, 1]"
        else:
            fits, allowed = number >= 1 and number.denominator == 1, "whole and at least 1"
        if not fits:
            raise ValueError(f"--values: {over} must be {allowed}, got {float(number):g}")
    if all("/255" in part for part in parts):
        return tuple(Value(float(n), f"{float(n * 255):g}/255") for n in dict.fromkeys(numbers))
    return tuple(Value(float(n), f"{float(n):g}") for n in dict.fromkeys(numbers))


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
    if not 0 <= count < MAX_VALUES:
        raise ValueError(f"--values {part!r} names {max(count + 1, 0)} values")
    return [start + i * step for i in range(count + 1)]


@dataclass(frozen=True)
class SweepConfig(SpreadConfig):
    r"""Attack a checkpoint value by value of a variable: one table, figure and record.

    The variable is the sampling probability of the first member, the number of members,
    the radius eps (step sizes of PGD and ARC are scaled with it), the steps of every
    attack, or the neighbours, the competing classes that ARC searches.

      lightning-rob sweep last.ckpt --over probability \
          --values 0.5:1:0.05 --best adaptive_pgd \
          --trainer.callbacks+=adaptive_pgd --trainer.callbacks+=arc

    The same command again resumes. A recorded result is used only if weights, attack,
    data, seed and versions are the same.

    Args:
        over: probability, members, eps, steps or neighbours
        values: numbers, fractions, ranges start:stop:step, such as 1/255,2/255
        best: the attack under which to find the best value for the defense; over steps or
            neighbours the value at which that attack is strongest
        out: for sweep.jsonl and .png; else sweeps/CHECKPOINT_FINGERPRINT_VARIABLE
        workers: processes on this machine that share the values
        ray: workers of a Ray cluster that share them: RAY_ADDRESS, or this machine
        part: i/n, the values of this process alone, such as 3/8 in an array of jobs
    """

    usage: ClassVar[str] = "CHECKPOINT --over VARIABLE --values LIST [options of test]"
    module: ClassVar[str] = "study"

    over: str | None = None
    values: str | float = ""
    best: str | None = None
    out: Path | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over not in SWEPT:
            raise ValueError(f"--over must be one of {', '.join(SWEPT)}, got {self.over}")
        if self.best and self.over == "eps":
            raise ValueError("--best has no meaning over eps: a larger radius is never better")
        parse_values(self.over, str(self.values))

    @property
    def points(self) -> tuple[Value, ...]:
        return parse_values(str(self.over), str(self.values))
