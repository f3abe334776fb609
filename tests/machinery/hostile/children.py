# SPDX-License-Identifier: Apache-2.0
"""Processes that may die: each result is a line, and the next process continues after the death."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator

from tests.machinery import roots
from tests.machinery.shared import REPO

DIED = "died"


def run(kind: str, name: str, environment: dict[str, str]) -> Iterator[list]:
    """Yield the lines of `python -m tests.machinery.hostile --child KIND NAME`.

    The lines start with the number of a call and of a trial. A process that dies in a trial yields
    the line [call, trial, DIED, stderr].
    """
    environment = {**os.environ, "PYTHONPATH": roots.python_path(), **environment}
    first = (0, 1)
    while True:
        command = [sys.executable, "-X", "faulthandler", "-m", "tests.machinery.hostile", "--child"]
        done = subprocess.run(
            [*command, kind, name, *map(str, first)], capture_output=True, text=True, cwd=REPO,
            env=environment, timeout=3600,
        )  # fmt: skip
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
        yield from lines
        if done.returncode == 0:
            return
        if (done.returncode > 0 and "Timeout (" not in done.stderr) or not lines:
            raise RuntimeError(f"{kind} {name}: {done.stderr[-4000:]}")
        at, n = lines[-1][:2]
        yield [at, n, DIED, done.stderr[-300:]]
        first = at, n + 1
