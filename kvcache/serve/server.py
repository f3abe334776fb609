"""uvicorn, with bounds for clients that are slow, silent or many, and an end that tells them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcache.checks import instance
from kvcache.serve.engine_loop import EngineError
from kvcache.serve.limits import Limits

_SECONDS_TO_WRITE = 5  # the last events, when the grace is over
_KEEP_ALIVE_SECONDS = 60  # of TCP: a peer whose machine is gone is noticed in a few minutes


class Server(uvicorn.Server):
    """Serves an application that `make_app` has made, within the `Limits` that it has.

    When it is asked to stop (SIGTERM, Ctrl-C), it accepts no more connections and requests, lets answers
    that are under way finish for `grace_seconds`, and then ends each with an error that says so: 503, or
    the last event of a stream. Options are those of `uvicorn.Config`.
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
                proxy_headers=False,  # any client can send them
                server_header=False,
                timeout_keep_alive=limits.keep_alive_seconds,
                timeout_graceful_shutdown=limits.grace_seconds + _SECONDS_TO_WRITE,
                **options,
            )
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, waits for answers, ends the others."""
        ending = asyncio.create_task(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        self._state.admission.refuse(EngineError("the server is shutting down: try another", 503))
        await asyncio.sleep(self._limits.grace_seconds)
        error = EngineError(
            f"the server is shutting down: the answer was cut after {self._limits.grace_seconds} s",
            503,
        )
        self._state.admission.close(error)
        self._state.loop.end_all(error)
        for connection in list(self.server_state.connections):
            if connection.is_receiving:
                connection.transport.abort()


class _Protocol(H11Protocol):
    """A connection that has a time in which a request must arrive, and an answer be read."""

    limits: Limits

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self.receiving_since = time.monotonic()
        self._receiving: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def is_receiving(self) -> bool:
        """Whether a request, or the rest of one, has to come before anything else happens."""
        cycle = self.cycle
        return cycle is None or cycle.response_complete or cycle.more_body

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.max_connections:
            waiting = [each for each in self.connections if each.is_receiving]
            min(waiting, key=lambda each: each.receiving_since).transport.abort()
        own = transport.get_extra_info("socket")
        if own is not None and own.family in (socket.AF_INET, socket.AF_INET6):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            with contextlib.suppress(AttributeError, OSError):  # not on every system
                own.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_SECONDS)
        self._bound_receiving()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._bound_receiving()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.receiving_since = time.monotonic()
        if self.transport.is_closing():
            self._bound_reading()  # what was written has to be read before it closes
        elif self.timeout_keep_alive_task is None:
            self._bound_receiving()  # a request that was sent ahead

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
        """The time of a request begins with its first byte, of the first one with the connection."""
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
