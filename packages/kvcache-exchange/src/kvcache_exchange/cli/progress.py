# SPDX-License-Identifier: Apache-2.0
"""Progress bars of commands, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

_STATE_WIDTH = 72  # minimum terminal width in columns at which a bar's state is shown


def progress_bars() -> Progress:
    """Return progress bars on stderr that fit into the terminal.

    A task's field `state` is shown after its bar if the terminal is wide enough.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
    )

    console = Console(stderr=True)
    has_state = console.width >= _STATE_WIDTH
    return Progress(
        SpinnerColumn(),  # keeps moving during long steps and while a model is loaded
        TextColumn("{task.description}"),
        BarColumn(bar_width=max(4, min(40, console.width - (60 if has_state else 36)))),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *([TextColumn("{task.fields[state]}")] if has_state else []),
        console=console,
        transient=True,
    )


@contextmanager
def progress(total: int | None) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr, and yield a function to call after each request."""
    with progress_bars() as bar:
        task = bar.add_task("requests", total=total, state="")
        yield lambda: bar.advance(task)
