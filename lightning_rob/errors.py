"""Exceptions that end a command with one line on stderr, a warning, and the check of numbers."""

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(Exception):
    """The user's input cannot be run; the message says what would be right. Exit code 2."""


class Fault(Exception):
    """A failure of a run whose input is correct. Exit code 1."""


class LostRank(Fault):
    """Another process of the run is gone; this one must not wait for it even while exiting."""


class ZeroGradientWarning(UserWarning):
    """A gradient attack has nothing to follow: its accuracy says nothing about robustness."""


def at_least(minimum: int, **numbers: int | None) -> None:
    """Raise a ValueError that names the first number below the minimum; None is allowed."""
    for name, number in numbers.items():
        if number is not None and number < minimum:
            raise ValueError(f"{name} must be at least {minimum}, got {number}")


def nearest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the end of a sentence that suggests the names most like a misspelt one.

    Args:
        name: the name that was given.
        known: the names that exist.
        otherwise: the end where none is alike.
    """
    close = get_close_matches(name, sorted({*known}), n=2, cutoff=0.65)
    return f", did you mean {' or '.join(close)}?" if close else otherwise
