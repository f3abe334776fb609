# SPDX-License-Identifier: Apache-2.0
"""Limits on requests and connections, such as sizes, counts and timeouts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvcache.checks import MAX_INT32, MAX_INT64, integer, seconds

_DURATIONS = ("request_seconds", "stall_seconds", "keep_alive_seconds", "grace_seconds")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of a server. Raises TypeError or ValueError for invalid values.

    - `max_body_bytes`: maximum size of a request body. Larger bodies are rejected with status 413.
      None: 64 KiB plus 32 bytes per token of `max_model_len`.
    - `max_choices`: maximum number of prompts times `n` per request.
    - `max_stops`, `max_stop_length`: maximum number of stop strings per request, and maximum number of
      characters per stop string.
    - `max_waiting`: maximum number of requests that are waiting for an engine row. Additional
      requests are rejected with status 429.
    - `max_connections`: maximum number of open connections. If another client connects, the
      connection that has been sending its request for the longest time is closed.
    - `request_seconds`: timeout in seconds for receiving a complete request. For a connection's
      first request, the timeout starts when the connection is opened.
    - `stall_seconds`: timeout in seconds after which a client that does not read its answer is
      disconnected.
    - `keep_alive_seconds`: timeout in seconds for an idle connection between two requests.
    - `grace_seconds`: time in seconds within which answers in progress may finish after a stop
      request.
    """

    max_body_bytes: int | None = None
    max_choices: int = 128
    max_stops: int = 16
    max_stop_length: int = 128
    max_waiting: int = 256
    max_connections: int = 512
    request_seconds: float = 30.0
    stall_seconds: float = 30.0
    keep_alive_seconds: float = 5.0
    grace_seconds: float = 10.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name in _DURATIONS:
                seconds(value, name)
            elif name == "max_body_bytes":
                if value is not None:
                    integer(value, name, least=1, most=MAX_INT64)
            else:
                integer(value, name, least=1, most=MAX_INT32)

    def body_bytes(self, max_model_len: int) -> int:
        """Return the maximum body size for a model with this `max_model_len`."""
        max_model_len = integer(max_model_len, "max_model_len", 1)
        return self.max_body_bytes or 2**16 + 32 * max_model_len
