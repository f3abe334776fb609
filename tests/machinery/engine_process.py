# SPDX-License-Identifier: Apache-2.0
"""Engines in separate processes."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time

from tests.machinery import roots
from tests.machinery.shared import REPO

DEADLINE_S = 240


def run_module(module, *arguments, timeout_s=None, **settings):
    """Run a module with these environment variables. Return the JSON in the last line of its output."""
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    path = os.pathsep.join(filter(None, [roots.python_path(), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=REPO, timeout=timeout_s,
        env={**os.environ, "PYTHONPATH": path, **settings},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return json.loads(done.stdout.splitlines()[-1])


class EngineInProcess:
    """An engine in a separate process, which reads commands and writes responses, one JSON value per
    line.

    Args:
        command: The command that starts the engine.
        environment: Environment variables in addition to those of this process.
    """

    def __init__(self, command, environment):
        self.lines, self.errors = [], []
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env=os.environ | environment,
            start_new_session=True,
        )
        for stream, kept in ((self.process.stdout, self.lines), (self.process.stderr, self.errors)):
            threading.Thread(target=self._keep, args=(stream, kept), daemon=True).start()

    @staticmethod
    def _keep(stream, kept):
        for line in stream:
            kept.append(line)

    def answer(self, timeout_s=DEADLINE_S):
        """Return the next response of the engine."""
        deadline = time.monotonic() + timeout_s
        while not any(line.startswith("@") for line in self.lines):
            assert self.process.poll() is None, "".join(self.errors)[-3000:]
            assert time.monotonic() < deadline, f"no answer: {''.join(self.errors)[-3000:]}"
            time.sleep(0.01)
        return json.loads(
            self.lines.pop(next(i for i, line in enumerate(self.lines) if line.startswith("@")))[1:]
        )

    def ask(self, command, *arguments, timeout_s=DEADLINE_S):
        """Send a command and return its response."""
        self.send(command, *arguments)
        return self.answer(timeout_s)

    def send(self, command, *arguments):
        """Send a command whose response is read later."""
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def wait_until_empty(self, timeout_s=30):
        """Wait until no block is held. Fails after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (held := self.ask("held")) != [0, 0.0]:
            assert time.monotonic() < deadline, f"requests and usage: {held}"
            time.sleep(0.05)
        assert self.ask("reset") is True

    def said(self, text):
        """Return the number of log lines that contain `text`."""
        return sum(text in line for line in list(self.errors))

    def signal(self, number):
        """Send a signal to the engine and its workers."""
        os.killpg(self.process.pid, number)

    def end(self):
        """Request that the process end, without waiting for it."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
        self.process.stdin.close()

    def close(self):
        """Wait for the processes to end, or kill them."""
        self.end()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


class Lines:
    """Reads lines from the standard input."""

    def __init__(self):
        self.rest = b""

    def next(self, timeout_s):
        """Return the next line, None after a timeout, or "" at the end of the input."""
        if b"\n" not in self.rest and select.select([0], [], [], timeout_s)[0]:
            data = os.read(0, 1 << 20)
            if not data:
                return ""
            self.rest += data
        if b"\n" not in self.rest:
            return None
        line, self.rest = self.rest.split(b"\n", 1)
        return line.decode()


def say(value):
    print("@" + json.dumps(value), flush=True)


def some_prompts(seed, count=6, least=2, most=300):
    """Return prompts of random lengths and tokens, and print the seed."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    return [
        [rng.randrange(3, 512) for _ in range(rng.randrange(least, most))] for _ in range(count)
    ]
