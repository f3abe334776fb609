# SPDX-License-Identifier: Apache-2.0
"""A `kvcache serve` process, and HTTP requests over plain sockets."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from kvcache.cli import main
from tests.machinery.forked import context


class Reply(NamedTuple):
    """A server's reply: the status (0: no reply) and everything after the headers."""

    status: int
    body: bytes


class ServeProcess:
    """A context manager that runs a server of a tiny model.

    `args`: options of `kvcache serve`. `environment`: variables of the process. After the process
    has ended, `log` holds its stderr. Request logging is off by default.
    """

    def __init__(
        self, *args: str, model: str = "llama", environment: dict[str, str] | None = None
    ) -> None:
        self.log, self._reader = "", None
        self._pipe, theirs = context.Pipe(duplex=False)
        argv = ["serve", model, "--port", "0", "--log-level", "warning", *args]
        self._process = context.Process(
            target=_serve, args=(argv, theirs, environment or {}), daemon=True
        )
        self._process.start()
        theirs.close()
        self._errors = os.fdopen(os.dup(self._pipe.fileno()))
        lines, found = [], None
        while found is None:
            lines.append(self._errors.readline())
            if not lines[-1]:
                raise RuntimeError(f"no server: {''.join(lines)}{self._end()}")
            found = re.search(r"http://([^ ]+):(\d+)/v1", lines[-1])
        self.start = "".join(lines)
        self.host, self.port = found[1], int(found[2])
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ServeProcess:
        until = time.monotonic() + 60
        while self.ask("GET", "/health").status != 200:
            assert time.monotonic() < until, "the server does not answer"
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running:
            self.send_signal(signal.SIGTERM)
        self.log = self._end()

    def _read(self) -> None:
        self.log = self._errors.read()

    def _end(self) -> str:
        """Wait until the process has ended, and return the rest of its stderr."""
        self._process.join(60)
        is_late = self.is_running
        if is_late:
            self._process.kill()
            self._process.join()
        with self._pipe, self._errors:
            if self._reader is None:
                self._read()
            else:
                self._reader.join()
            log = self.log
        if is_late:
            raise TimeoutError(f"the server did not exit within 60 s: {log}")
        return log

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self._process.pid, number)

    @property
    def is_running(self) -> bool:
        """Whether the process is still running."""
        return self._process.is_alive()

    def state(self) -> dict:
        """Return the server's reported state."""
        return json.loads(self.ask("GET", "/state").body)

    def ask(self, method: str, path: str, body: bytes | dict = b"", seconds: float = 60) -> Reply:
        """Send a request to this server. See the function `ask`."""
        return ask(self.port, method, path, body, seconds, host=self.host)

    def wait_until_empty(self, seconds: float = 60) -> None:
        """Wait until the server has no requests and holds no blocks."""
        until = time.monotonic() + seconds
        while True:
            state = self.state()
            pool = state["pool"]
            if state["num_sequences"] == pool["held"] == pool["held_cached"] == 0:
                return
            assert time.monotonic() < until, state
            time.sleep(0.1)


def _serve(argv: list[str], errors: Connection, environment: dict[str, str]) -> None:
    """Run a command line in a forked process, with stderr on a pipe."""
    os.environ.update(environment)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(errors.fileno(), 2)
    errors.close()
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    torch.set_num_threads(1)
    sys.exit(main(argv))


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os.kill(os.getpid(), signal.SIGKILL)


def request_of(method: str, path: str, body: bytes | dict = b"", *, more: str = "") -> bytes:
    """Return a complete HTTP request that closes the connection."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def ask(
    port: int,
    method: str,
    path: str,
    body: bytes | dict = b"",
    seconds: float = 60,
    *,
    host: str = "127.0.0.1",
) -> Reply:
    """Send a request and return the reply. Raises TimeoutError if it does not finish in time."""
    try:
        with connect(port, seconds, host) as connection:
            connection.sendall(request_of(method, path, body))
            return reply_of(connection, seconds)
    except (ConnectionError, BrokenPipeError):
        return Reply(0, b"")


def connect(port: int, seconds: float, host: str = "127.0.0.1") -> socket.socket:
    """Open a connection. Each call on it times out after `seconds`."""
    return socket.create_connection((host, port), timeout=seconds)


def reply_of(connection: socket.socket, seconds: float) -> Reply:
    """Read until the server closes the connection. Raises TimeoutError if it does not."""
    data, until = b"", time.monotonic() + seconds
    try:
        while True:
            connection.settimeout(max(0.001, until - time.monotonic()))
            piece = connection.recv(1 << 16)
            if not piece:
                break
            data += piece
    except ConnectionError:
        pass
    head, _, rest = data.partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.1 (\d{3}) ", head)
    if found is None:
        return Reply(0, data)
    is_chunked = b"transfer-encoding: chunked" in head.lower()
    return Reply(int(found[1]), _joined(rest) if is_chunked else rest)


def _joined(data: bytes) -> bytes:
    """Join the chunks of a body."""
    joined = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        count = int(size or b"0", 16)
        joined, data = joined + data[:count], data[count + 2 :]
    return joined


def text_of(reply: Reply) -> str | None:
    """Return the text of a complete completion, streamed or not, and None for any other reply."""
    if reply.status != 200:
        return None
    if reply.body.startswith(b"{"):
        return json.loads(reply.body)["choices"][0]["text"]
    events = [line[6:] for line in reply.body.decode().split("\n") if line.startswith("data: ")]
    if not events or events[-1] != "[DONE]":
        return None
    pieces = [json.loads(event) for event in events[:-1]]
    if any("error" in piece for piece in pieces):
        return None
    return "".join(choice["text"] for piece in pieces for choice in piece["choices"])
