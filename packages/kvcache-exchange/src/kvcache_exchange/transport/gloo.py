# SPDX-License-Identifier: Apache-2.0
"""The gloo transport, which is included in torch. It sends bytes through host memory and TCP."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from kvcache_exchange.transport.channel import Channel
from kvcache_exchange.transport.connection import Connection
from kvcache_exchange.transport.lane import PIECES_AHEAD, Lane, PieceStaging
from kvcache_exchange.transport.registered import RegisteredMemory
from kvcache_exchange.transport.staged import StagedTransport, is_everywhere

_MOST_KEYS = 16  # maximum number of keys that a peer may set; gloo sets one
_POLL_S = 0.1  # polling interval in seconds while a connection is being established


class GlooTransport(StagedTransport):
    """A transport that creates a separate two-rank process group for each pair of peers.

    It does not use the engine's default group. A failed group is never reused; reconnecting creates
    a new one.
    """

    name = "gloo"

    def __init__(self, agent: str, *, host: str = "127.0.0.1", port: int = 0, **options) -> None:
        if not dist.is_available() or not dist.is_gloo_available():
            raise ImportError("this build of torch has no gloo: use the transport 'nixl'")
        super().__init__(agent, host=host, port=port, **options)
        # gloo reports its listening address to peers, so it cannot listen on every address.
        at = self.address if is_everywhere(host) else host
        try:
            self._device = dist.ProcessGroupGloo.create_device(hostname=at)
        except BaseException:
            self.close()
            raise

    def _open_lane(self, connection: Connection, channel: Channel, *, timeout_s: float) -> Lane:
        store = _PairStore(connection, channel, timeout_s)
        connection.on_lane_frame(store.on_frame)
        connection.attach(channel)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [self._device]
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1
        rank = 0 if connection.is_caller else 1
        group = dist.ProcessGroupGloo(store, rank, 2, options)
        return _GlooLane(group, 1 - rank, connection.piece_bytes, self.memory)


class _PairStore(dist.Store):
    """The store through which gloo's two ranks exchange addresses. It exchanges keys as frames of
    the channel.

    The store does not listen on a port, so only the peer can write to it.
    """

    def __init__(self, connection: Connection, channel: Channel, timeout_s: float) -> None:
        super().__init__()
        self._connection, self._channel, self._timeout_s = connection, channel, timeout_s
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def on_frame(self, header: dict, payload: bytes) -> None:
        """Store a key that the peer has set. Raises ValueError if the peer sets too many keys."""
        key = header.get("key")
        if not isinstance(key, str) or len(self._values) >= _MOST_KEYS or len(payload) > 1 << 16:
            raise ValueError(
                "the peer set a key of the store: expected one key, with a short value"
            )
        self._set(key, payload)

    def set(self, key: str, value: bytes) -> None:
        self._set(key, bytes(value))
        self._channel.put({"op": "lane", "key": key}, bytes(value))

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while key not in self._values:
                if self._connection.reason is not None:
                    raise RuntimeError(f"the connection has ended: {self._connection.reason}")
                if time.monotonic() >= deadline:
                    raise RuntimeError(f"the peer has not set {key!r} in time")
                self._changed.wait(_POLL_S)
            return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()


class _GlooWork:
    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self, timeout_s: float) -> None:
        self._work.wait(timedelta(seconds=timeout_s))


class _GlooLane(Lane):
    def __init__(
        self, group: dist.ProcessGroupGloo, other: int, piece_bytes: int, memory: RegisteredMemory
    ) -> None:
        self._group: dist.ProcessGroupGloo | None = group
        self._other, self._piece_bytes, self._memory = other, piece_bytes, memory
        # Pinning takes longer than a short transfer, so it is done when the connection opens. Memory
        # that is not pinned costs nothing until it is used.
        is_pinned = memory.cuda_device is not None
        self._pinned = [self._new_staging() for _ in range(2)] if is_pinned else []

    def staging(self, *, is_outgoing: bool) -> tuple[Sequence[torch.Tensor], PieceStaging]:
        try:
            staging = self._pinned.pop()
        except IndexError:  # device memory was registered later, or the connection has ended
            staging = self._new_staging()
        return list(staging.pieces), staging

    def _new_staging(self) -> PieceStaging:
        return PieceStaging(PIECES_AHEAD, self._piece_bytes, self._memory.cuda_device)

    def send(self, piece: torch.Tensor, tag: int) -> _GlooWork:
        return _GlooWork(self._alive().send([piece], self._other, tag))

    def receive(self, piece: torch.Tensor, tag: int) -> _GlooWork:
        return _GlooWork(self._alive().recv([piece], self._other, tag))

    def close(self) -> None:
        self._group = None  # the group's sockets are closed once no piece is in flight
        self._pinned.clear()

    def _alive(self) -> dist.ProcessGroupGloo:
        group = self._group
        if group is None:
            raise ConnectionError("the connection has ended")
        return group
