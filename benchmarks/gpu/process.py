# SPDX-License-Identifier: Apache-2.0
"""Runs a process with a time limit, and forwards its output.

At the end, all processes that this process has started are killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MAX_LINE = 1 << 20  # bytes; longer lines are split
_KILL_S = 5.0  # time to wait for a killed process to end
_DRAIN_S = 2.0  # time to wait for output after the process has ended


@dataclass(frozen=True)
class Ended:
    """The result of a process. `returncode` is negative for a signal, as in `subprocess`."""

    returncode: int
    timed_out: bool
    seconds: float

    @property
    def status(self) -> str:
        """Return "ok" or a description of the failure."""
        if self.timed_out:
            return f"ran longer than {self.seconds:.0f} s"
        if self.returncode < 0:
            with contextlib.suppress(ValueError):
                return f"died by {signal.Signals(-self.returncode).name}"
            return f"died by signal {-self.returncode}"
        return "ok" if self.returncode == 0 else f"exit code {self.returncode}"


def run(
    command: Sequence[str],
    limit_s: float,
    on_line: Callable[[str], None],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """Run a command and pass each line of its output (stdout and stderr) to `on_line`, without newline.

    At the time limit, the process and all processes it started are killed. Processes that remain
    after a normal exit are also killed, so that a stage cannot disturb the next one. Bytes that are
    not UTF-8 are replaced.
    """
    start = time.monotonic()
    child = subprocess.Popen(
        command,
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    output = _Lines(child.stdout.fileno(), on_line)
    timed_out = False
    try:
        while child.poll() is None and not timed_out:
            output.read(0.1)
            timed_out = time.monotonic() - start > limit_s
    finally:
        _kill(_family(child.pid))
        # A process that waits for a hung driver cannot be killed. The run continues without it.
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_KILL_S)
        output.drain(_DRAIN_S)
        child.stdout.close()
    returncode = -signal.SIGKILL if child.returncode is None else child.returncode
    return Ended(returncode, timed_out, time.monotonic() - start)


class _Lines:
    """Splits the output of a pipe into lines."""

    def __init__(self, pipe: int, on_line: Callable[[str], None]) -> None:
        os.set_blocking(pipe, False)
        self._pipe, self._on_line = pipe, on_line
        self._rest = b""
        self._open = True

    def read(self, wait_s: float) -> bool:
        """Read the available output, waiting up to `wait_s` seconds. Return False if there is none."""
        if not self._open:
            time.sleep(wait_s)
            return False
        if not select.select([self._pipe], [], [], wait_s)[0]:
            return False
        data = os.read(self._pipe, 1 << 16)
        self._open = bool(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._on_line(line.decode(errors="replace").rstrip("\r"))
        return self._open

    def drain(self, limit_s: float) -> None:
        """Read the remaining output.

        The time is limited, because a process of another session may keep the pipe open.
        """
        deadline = time.monotonic() + limit_s
        while self._open and time.monotonic() < deadline and self.read(0.05):
            pass
        if self._rest:
            self._on_line(self._rest.decode(errors="replace"))
            self._rest = b""


def _family(leader: int) -> set[int]:
    """Return the processes of a session, their descendants, and all processes in the descendants'
    sessions.
    """
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # the process has already ended
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            found[int(stat.parent.name)] = (int(fields[1]), int(fields[3]))
    family, sessions, size = {leader}, {leader}, 0
    while len(family) != size:
        size = len(family)
        for pid, (parent, session) in found.items():
            if parent in family or session in sessions:
                family.add(pid)
                sessions.add(session)
    return family


def _kill(family: set[int]) -> None:
    for pid in family:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
