"""The output of a command: results on standard output, everything else on stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from kvcache.cli.errors import OutputError


@contextmanager
def writing() -> Iterator[None]:
    """A context for writes to standard output; a full disk becomes an OutputError."""
    try:
        yield
    except OSError as error:
        # The rest of the buffer is dropped: the flush at exit must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise
        raise OutputError(f"standard output cannot be written: {error.strerror}") from None


def say(message: str) -> None:
    """Writes one line to stderr; ignores that it cannot be written."""
    with suppress(OSError):
        print(f"kvcache: {message}", file=sys.stderr)


def show(what: object) -> None:
    """A string or a rich table, on standard output."""
    from rich.console import Console

    with writing():
        Console(highlight=False).print(what)


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; yields what to call after each request."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)
