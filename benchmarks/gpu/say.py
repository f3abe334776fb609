"""The protocol from a stage to the run: one JSON object per line of output; all other lines are log.

A row is a measurement or an answer. `learned` is a line for the reader. `skipped` says why a stage, or
a part of it, did nothing. `failed` is a fault after which the stage goes on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_started = time.monotonic()
_num_failed = 0
_lock = threading.Lock()


def log(text: str) -> None:
    """Lines of log, in one piece: `print` writes the end of a line by itself where output is not
    buffered, and another thread's row could come in between."""
    with _lock:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _tell(fields: dict[str, object]) -> None:
    log(json.dumps(fields))


def row(**fields: object) -> None:
    """One measurement or answer, with names of its own."""
    _tell(fields)


def learned(text: str) -> None:
    """A line for the reader of the run."""
    _tell({"learned": text})


def skipped(reason: str) -> None:
    """The stage, or a part of it, was not done, and why."""
    _tell({"skipped": reason})


def failed(text: str) -> None:
    """Reports a fault. The stage goes on, and `exit_code` is 1 at its end."""
    global _num_failed
    _num_failed += 1
    _tell({"failed": text})


@contextmanager
def attempt(name: str) -> Iterator[None]:
    """Reports an exception within under a name, with the traceback in the log; the stage goes on."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        failed(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")


def exit_code() -> int:
    """1 where something failed, else 0."""
    return int(_num_failed > 0)


def seconds_left() -> float:
    """Seconds left of the stage's time limit, less a little for its end."""
    limit = float(os.environ.get("KVCACHE_STAGE_LIMIT", "3600"))
    return limit - 2 - (time.monotonic() - _started)
