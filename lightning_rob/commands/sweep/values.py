"""Variables of a sweep, and their values as `--values` gives them; imports nothing heavy."""

from dataclasses import dataclass
from fractions import Fraction

OF_DEFENSE = ("probability", "members")
SWEPT = (*OF_DEFENSE, "eps", "steps", "neighbours")
MAX_VALUES = 1000


@dataclass(frozen=True)
class Value:
    """One value of the variable, as a number and as a user would write it."""

    number: float
    label: str
    probs: tuple[float, ...] = ()  # of all members, where they are not those of the number


OPTIMAL = Value(-1.0, "optimal")  # the probabilities that `optimal_sampling` finds


def parse_values(over: str, text: str) -> tuple[Value, ...]:
    """Return the values of a list such as "1/255,2/255" or "0.5:1:0.1,optimal", each once."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if over == "probability" and OPTIMAL.label in parts:
        others = ",".join(part for part in parts if part != OPTIMAL.label)
        return (*(parse_values(over, others) if others else ()), OPTIMAL)
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
