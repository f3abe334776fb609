# SPDX-License-Identifier: Apache-2.0
"""Runs uvicorn with limits on slow, silent or too many clients, and with a graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import time

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcache.checks import instance
from kvcache_serve.server.engine_loop import EngineError
from kvcache_serve.server.limits import Limits

_SECONDS_TO_WRITE = 5  # time in seconds for sending the last events after the grace period
_POLL_SECONDS = 0.02  # interval in seconds between checks for answers in progress
_KEEP_ALIVE_SECONDS = 60  # TCP keep-alive; detects a dead peer within a few minutes


class Server(uvicorn.Server):
    """Serves an application created by `make_app`, and enforces its `Limits`.

    After a stop request (SIGTERM, Ctrl-C), answers in progress may finish within `grace_seconds`.
    Meanwhile, the server keeps listening, but rejects new requests and `/health` with status 503. It
    then ends the remaining answers with an error: a 503 response, or the last event of a stream. A
    second Ctrl-C ends these answers immediately. Accepts the options of `uvicorn.Config`.
    """

    def __init__(self, app: FastAPI, **options: object) -> None:
        instance(app, FastAPI, "app")
        self._limits: Limits = app.state.limits
        self._state = app.state
        limits = self._limits

        class BoundedProtocol(_Protocol):
            pass

        BoundedProtocol.limits = limits
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                proxy_headers=False,  # do not trust forwarding headers, because any client can send them
                server_header=False,
                timeout_keep_alive=limits.keep_alive_seconds,
                timeout_graceful_shutdown=_SECONDS_TO_WRITE,
                **options,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for answers in progress, stop listening, and end the remaining answers."""
        self._state.admission.refuse(EngineError("the server is shutting down: try another", 503))
        until = time.monotonic() + self._limits.grace_seconds
        while self._is_answering and not self.force_exit and time.monotonic() < until:
            await asyncio.sleep(_POLL_SECONDS)
        if self._is_answering:
            self._end_answers()
        for connection in list(self.server_state.connections):
            if connection.is_receiving_body:
                connection.transport.abort()  # otherwise, uvicorn would wait for the remaining answers
        await super().shutdown(sockets)

    @property
    def _is_answering(self) -> bool:
        return any(not each.is_receiving for each in self.server_state.connections)

    def _end_answers(self) -> None:
        error = EngineError(
            f"the server is shutting down: the answer was ended after {self._limits.grace_seconds} s",
            503,
        )
        self._state.admission.close(error)
        self._state.loop.end_all(error)


def _framing_problem(data: bytes) -> str | None:
    """Return why the header at the beginning of `data` leaves the end of its request open to different
    readings, or None if it does not. A proxy that reads it differently would let a client smuggle a
    second request into the body of the first one (RFC 9112, 6 and 11.2).
    """
    end = re.search(rb"\n\r?\n", data)
    if end is None:
        return None
    first, *lines = data[: end.start()].split(b"\n")
    if any(line.startswith((b" ", b"\t")) for line in lines):
        return "a header continues on a second line: expected one line per header"
    fields = [line.partition(b":") for line in lines]
    lengths = [value for name, _, value in fields if name.lower() == b"content-length"]
    if len(lengths) > 1 or any(b"," in value for value in lengths):
        return "content-length has several values: expected one"
    if any(name.lower() == b"transfer-encoding" for name, *_ in fields):
        if lengths:
            return "transfer-encoding is given with content-length: expected one of the two"
        if first.rstrip().endswith(b"HTTP/1.0"):
            return "transfer-encoding is given with HTTP/1.0: expected HTTP/1.1"
    return None


class _Protocol(H11Protocol):
    """A connection with timeouts for receiving a request and for sending the response."""

    limits: Limits

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.receiving_since = time.monotonic()
        self._receiving: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def is_receiving(self) -> bool:
        """Whether the connection is waiting for a request or for the rest of a request."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    @property
    def is_receiving_body(self) -> bool:
        """Whether a request's headers have arrived, but not its complete body."""
        return self.is_receiving and self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:
        # If many clients connect at once, all protocols are created before the first one is
        # connected.
        self.receiving_since = time.monotonic()
        super().connection_made(transport)
        # An aborted connection remains in the list until the event loop has closed it.
        open_ones = [each for each in self.connections if not each.transport.is_closing()]
        if len(open_ones) > self.limits.max_connections:
            waiting = [each for each in open_ones if each.is_receiving]
            min(waiting, key=lambda each: each.receiving_since).transport.abort()
        own = transport.get_extra_info("socket")
        if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with contextlib.suppress(AttributeError, OSError):  # some options are platform-specific
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
        self._bound_receiving()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._bound_receiving()

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE:
            problem = _framing_problem(self.conn.trailing_data[0])
            if problem is not None:
                self.logger.warning(problem)
                self.send_400_response(problem)  # also closes the connection
                return
        super().handle_events()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.receiving_since = time.monotonic()
        if self.transport.is_closing():
            self._bound_reading()  # the client must read the response before the connection is closed
        elif self.timeout_keep_alive_task is None:
            self._bound_receiving()  # the next request may already be buffered

    def connection_lost(self, error: Exception | None) -> None:
        for timer in (self._receiving, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._bound_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _bound_receiving(self) -> None:
        """Start the timeout for receiving a request.

        The timeout starts at the first byte of the request or, for the first request, when the client
        connects.
        """
        if not self.is_receiving:
            if self._receiving is not None:
                self._receiving.cancel()
                self._receiving = None
        elif self._receiving is None:
            self.receiving_since = time.monotonic()
            self._receiving = self.loop.call_later(self.limits.request_seconds, self._give_up)

    def _bound_reading(self) -> None:
        if self._stalled is None:
            self._stalled = self.loop.call_later(self.limits.stall_seconds, self.transport.abort)

    def _give_up(self) -> None:
        if self.is_receiving:
            self.transport.abort()
