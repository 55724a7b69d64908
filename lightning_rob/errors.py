"""Exceptions that end a command with one line on stderr."""


class InputError(Exception):
    """The user's input cannot be run; the message says what would be right. Exit code 2."""


class Fault(Exception):
    """A failure of a run whose input is correct. Exit code 1."""


class LostRank(Fault):
    """Another process of the run is gone; this one must not wait for it even while exiting."""
