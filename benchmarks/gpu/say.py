# SPDX-License-Identifier: Apache-2.0
"""The protocol by which a stage reports to the run.

Each message is a JSON object on one line of output. Other lines are log output.

`row` reports a measurement or another result. `learned` reports a message for the user. `skipped`
reports why a stage or a part of it did not run. `failed` reports an error after which the stage
continues.
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
    """Write log lines in a single call.

    With unbuffered output, `print` writes the newline separately, so a row of another thread could
    be written in between.
    """
    with _lock:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


def _tell(fields: dict[str, object]) -> None:
    log(json.dumps(fields))


def row(**fields: object) -> None:
    """Report one measurement or result with arbitrary fields."""
    _tell(fields)


def learned(text: str) -> None:
    """Report a message for the user of the run."""
    _tell({"learned": text})


def skipped(reason: str) -> None:
    """Report why the stage, or a part of it, was skipped."""
    _tell({"skipped": reason})


def failed(text: str) -> None:
    """Report an error. The stage continues, and `exit_code` becomes 1."""
    global _num_failed
    _num_failed += 1
    _tell({"failed": text})


@contextmanager
def attempt(name: str) -> Iterator[None]:
    """Report exceptions in the block under a name and log the traceback. The stage continues."""
    try:
        yield
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        failed(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}")


@contextmanager
def timed(part: str) -> Iterator[None]:
    """Report how long a part of the stage takes that does not depend on the device's speed, such as
    imports and the pinning of memory.
    """
    start = time.monotonic()
    yield
    row(timed=part, seconds=round(time.monotonic() - start, 2))


def ready() -> None:
    """Report the seconds from the start of the process: the imports and the first use of the device."""
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    row(timed="start", seconds=round(_seconds_of_process(), 2))


def _seconds_of_process() -> float:
    """Return the seconds since this process was started."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def exit_code() -> int:
    """Return 1 if any error was reported, otherwise 0."""
    return int(_num_failed > 0)


def seconds_left() -> float:
    """Return the seconds left until the stage's time limit, less a small reserve."""
    limit = float(os.environ.get("KVCACHE_STAGE_LIMIT", "3600"))
    return limit - 2 - (time.monotonic() - _started)
