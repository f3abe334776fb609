# SPDX-License-Identifier: Apache-2.0
"""The output of commands: results on standard output, everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kvcache.cli.errors import OutputError


@contextmanager
def writing() -> Iterator[None]:
    """Return a context manager that raises OutputError if a write to standard output fails."""
    try:
        yield
    except OSError as error:
        # Discard the rest of the buffer, so that the flush at exit does not raise a second error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"standard output cannot be written: {error.strerror}") from None


def say(message: str) -> None:
    """Write one line to stderr, and ignore failures."""
    with suppress(OSError):
        print(f"kvcache: {message}", file=sys.stderr)


def show(what: object) -> None:
    """Print a string or a rich table to standard output."""
    from rich.console import Console

    with writing():
        Console(highlight=False).print(what)
