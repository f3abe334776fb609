# SPDX-License-Identifier: Apache-2.0
"""Forks processes for tests from a process that has already imported torch, because the import is
slow.

Uses multiprocessing's fork server. Each pytest process has its own fork server, which ends together
with it.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        *(
            "tests.machinery.disaggregation_engine",
            "tests.machinery.transport_peer",
            "kvcache_serve.server",
        ),
        *("kvcache_serve.demo", "transformers.models.llama.modeling_llama"),
    ]
)


class Forked:
    """A process that runs `serve(commands, **options)`. Leaving the `with` block kills the process.

    Commands and responses are JSON objects. `greeting` is the first object that `serve` sends.
    """

    def __init__(self, serve: Callable[..., None], **options: object) -> None:
        self._commands, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(serve, theirs), kwargs=options, daemon=True
        )
        self._process.start()
        theirs.close()
        self.pid: int = self._process.pid
        self.greeting = self.answer(180)  # imports take a long time on a busy machine

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        self._process.close()
        self._commands.close()

    def ask(self, command: str, timeout_s: float = 90, **arguments: object) -> dict:
        """Send a command and return the response."""
        self.tell(command, **arguments)
        return self.answer(timeout_s)

    def tell(self, command: str, **arguments: object) -> None:
        """Send a command that has no response."""
        send(self._commands, command=command, **arguments)

    def signal(self, number: int) -> None:
        """Send a signal.

        For SIGKILL and SIGSTOP, return once the process has ended or all its threads have stopped.
        """
        os.kill(self.pid, number)
        if number == signal.SIGKILL:
            self._process.join()
        while number == signal.SIGSTOP and not self._is_stopped():
            time.sleep(0.001)

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self.pid}/task").glob("*/stat")
        return all(each.read_text().rpartition(") ")[2][0] == "T" for each in tasks)

    def answer(self, timeout_s: float = 90) -> dict:
        """Return the next response. For commands with exactly one response, use `ask`."""
        assert self._commands.poll(timeout_s), f"no answer within {timeout_s} s"
        return received(self._commands)


def send(to: Connection, **values: object) -> None:
    """Send a command or a response as JSON."""
    to.send_bytes(json.dumps(values).encode())


def received(commands: Connection) -> dict:
    """Return the next command. Raises EOFError if the test process has ended."""
    return json.loads(commands.recv_bytes())


def _run(serve: Callable[..., None], commands: Connection, **options: object) -> None:
    with contextlib.suppress(EOFError):
        serve(commands, **options)


def run_code(code: str, errors: Path) -> tuple[int, str]:
    """Run a program like `python -c`, with stderr redirected to a file.

    Return its exit code and stderr.
    """
    process = context.Process(target=_execute, args=(code, str(errors)))
    process.start()
    process.join()
    return process.exitcode, errors.read_text()


def _execute(code: str, errors: str) -> None:
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
