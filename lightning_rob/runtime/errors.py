"""Exceptions that end a command with one line, a warning, and checks of what they quote."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import SupportsFloat


class InputError(Exception):
    """The user's input cannot be run; the message says what would be right. Exit code 2."""


class Fault(Exception):
    """A failure of a run whose input is correct. Exit code 1."""


class LostRank(Fault):
    """Another process of the run is gone; this one must not wait for it even while exiting."""


class NoGradientError(RuntimeError):
    """An attack that follows gradients meets predictions that have none."""

    def __init__(self) -> None:
        super().__init__(
            "no gradient leads from the logits to the images: attack with Square, which needs "
            "none, or give the defense another backward pass (BPDA); detach, numpy, no_grad, "
            "argmax and integers cut it, and `lightning-rob audit` says more"
        )


class ZeroGradientWarning(UserWarning):
    """A gradient attack has nothing to follow: its accuracy says nothing about robustness."""


class FindingWarning(UserWarning):
    """Something makes the accuracies of an evaluation suspicious."""


def _check_numbers(numbers: Mapping[str, float | None]) -> None:
    for name, number in numbers.items():
        if not isinstance(number, SupportsFloat):  # a text is not
            raise ValueError(f"{name} must be a number, got {number!r}")


def at_least(minimum: int, **numbers: float | None) -> None:
    """Raise a ValueError that names the first number below the minimum; None is allowed."""
    _check_numbers({name: number for name, number in numbers.items() if number is not None})
    for name, number in numbers.items():
        if number is not None and not number >= minimum:  # NaN neither
            raise ValueError(f"{name} must be at least {minimum}, got {number}")


def within(low: float, high: float, **numbers: float) -> None:
    """Raise a ValueError that names the first number outside [low, high]."""
    _check_numbers(numbers)
    for name, number in numbers.items():
        if not low <= number <= high:  # NaN neither
            raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {number}")


def is_of_shape(error: BaseException) -> bool:
    """Return whether an error is of a network for images of another shape than it takes."""
    torch = r"shapes cannot be multiplied|Given groups=|[Ee]xpected (\dD.* )?input"
    kinds = RuntimeError | ValueError
    return isinstance(error, kinds) and bool(re.search(f"{torch}|network expects", str(error)))


def visible(text: str) -> str:
    """Return text for any terminal and file: what is not printable becomes an escape."""
    # A name of a file may hold a newline, codes of a terminal or bytes that are no UTF-8.
    return "".join(
        part if part.isprintable() else part.encode("unicode_escape").decode() for part in text
    )


def reason_of(error: Exception) -> str:
    """Return an error's class, the first line of its message, and its note: what raised it."""
    first = [*str(error).strip().splitlines()[:1], *getattr(error, "__notes__", ())[:1]]
    return visible(": ".join(filter(None, [type(error).__name__, " ".join(first)])))


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a sentence that suggests names like a misspelt one, else `otherwise`."""
    names = sorted({*known})
    # By letters alone "epsilon" would be nearer to "version" than to "eps".
    begun = [k for k in names if len(k) > 2 and (k.startswith(name) or name.startswith(k))]
    near = get_close_matches(name, begun, 1, 0) + get_close_matches(name, names, 2, 0.65)
    close = [*dict.fromkeys(near)][:2]
    return f", did you mean {' or '.join(close)}?" if close else otherwise
