"""Errors that end a command: one line on stderr, and the exit code."""

from __future__ import annotations


class UsageError(Exception):
    """Wrong usage; one line that says what was expected. Exit code 2."""


class OutputError(Exception):
    """Standard output cannot be written; one line. Exit code 1."""


class MissingError(Exception):
    """Something is not installed; one line that says how to get it. Exit code 1."""


def quoted(text: str) -> str:
    """A value of the command line for an error message: in quotes, and cut after 40 characters."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
