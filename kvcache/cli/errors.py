# SPDX-License-Identifier: Apache-2.0
"""Errors that end a command with one line on stderr and an exit code."""

from __future__ import annotations


class UsageError(Exception):
    """Incorrect usage. The message is one line that states the expected usage. Exit code 2."""


class OutputError(Exception):
    """Standard output cannot be written. The message is one line. Exit code 1."""


class MissingError(Exception):
    """A requirement is missing. The message is one line with the install command. Exit code 1."""


def quoted(text: str) -> str:
    """Quote a command-line value for an error message, truncated to 40 characters."""
    return repr(text if len(text) <= 40 else text[:37] + "...")
