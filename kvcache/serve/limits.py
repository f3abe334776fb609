"""What a server accepts of clients, and how long it waits for them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvcache.checks import MAX_INT32, MAX_INT64, integer, seconds

_DURATIONS = ("request_seconds", "stall_seconds", "keep_alive_seconds", "grace_seconds")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of a server. TypeError or ValueError for values out of range.

    - `max_body_bytes`: of a request's body; larger ones are answered with 413 and not kept. None: 64 KiB,
      and 32 bytes for each token of `max_model_len`.
    - `max_choices`: prompts of a request, times `n`.
    - `max_stops`, `max_stop_length`: stop texts of a request, and the characters of each.
    - `max_waiting`: requests that wait for a row of the engine; more are answered with 429.
    - `max_connections`: open connections. A further one closes the one that has been sending its request
      for longest.
    - `request_seconds`: in which a whole request has to arrive, from the connection on.
    - `stall_seconds`: after which a client that does not read its answer is given up.
    - `keep_alive_seconds`: between the requests of a connection.
    - `grace_seconds`: for answers that are under way when the server is asked to stop.
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
        """The bound of a body, for a model with answers of so many tokens."""
        max_model_len = integer(max_model_len, "max_model_len", 1)
        return self.max_body_bytes or 2**16 + 32 * max_model_len
