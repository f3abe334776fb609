"""What ends a command early: one line on stderr, and the exit code."""

from __future__ import annotations


class UsageError(Exception):
    """What was asked for cannot be; one line that says what was expected. Exit code 2."""


class OutputError(Exception):
    """Standard output does not take what was found; one line. Exit code 1."""


class MissingError(Exception):
    """Something is not installed; one line that says how to get it. Exit code 1."""


def shown(text: str) -> str:
    """A value of the command line for an error: quoted, and shortened where it is endless."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
