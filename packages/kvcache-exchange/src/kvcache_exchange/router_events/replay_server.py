# SPDX-License-Identifier: Apache-2.0
"""Serves replay requests a few batches at a time, so that publishing can continue in between.

A request is [identity, b"", first sequence number]. The empty frame is optional. If a request omits
it, the responses omit it as well. Each batch is one response, [identity, b"", topic, sequence number,
payload]. The last response has sequence number -1. If the requested batches are no longer in the
buffer, the reader receives a snapshot with the last sequence number. The snapshot is a batch that
clears the reader's view and then stores all cached blocks.

The data queued for readers is bounded. A batch is passed to ZMQ only while less than
`MOST_BYTES_OF_A_READER` is queued for its reader and less than `MOST_BYTES` for all readers. ZMQ
reports when it releases a batch, so a batch is counted until the kernel has accepted its bytes. If
a reader accepts no data for `SLOW_SECONDS`, the server drops its replay and the kernel drops its
connection.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvcache_exchange.router_events.replay_buffer import ReplayBuffer
from kvcache_exchange.router_events.wire import (
    END_OF_REPLAY,
    WireError,
    decode_sequence,
    encode_sequence,
)

MOST_REQUESTS_WAITING = 64
_BATCHES_AT_A_TIME = 32
_MOST_BYTES_OF_A_FRAME = 256  # maximum size of a frame in a request
_SEND_HWM = 1_000  # maximum number of messages queued for a reader, above which its replay pauses
_KERNEL_BYTES = 2**18  # size of the kernel's send buffer for a connection, in bytes
MOST_BYTES = 2**26  # maximum number of bytes queued for all readers
# Maximum number of bytes queued for one reader, so that a stalled replay leaves room for others.
MOST_BYTES_OF_A_READER = MOST_BYTES // MOST_REQUESTS_WAITING
SLOW_SECONDS = 10.0


@dataclass
class _Replay:
    identity: bytes
    prefix: list[bytes]
    next: int  # sequence number of the next batch
    stop: int


@dataclass
class _HeldBatches:
    """The batches that ZMQ holds for a reader, oldest first."""

    batches: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)
    num_bytes: int = 0
    since: float = 0.0  # monotonic time at which the reader last accepted a batch

    def take_in(self, tracker: zmq.MessageTracker, size: int) -> None:
        if not self.batches:
            self.since = time.monotonic()
        self.batches.append((tracker, size))
        self.num_bytes += size

    def waiting(self) -> int:
        """Number of bytes that ZMQ still holds.

        Always current, even if `let_go` was not called recently.
        """
        return sum(size for tracker, size in list(self.batches) if not tracker.done)

    def let_go(self) -> None:
        """Drop the batches that ZMQ has released."""
        while self.batches and self.batches[0][0].done:
            self.num_bytes -= self.batches.popleft()[1]
            self.since = time.monotonic()


class ReplayServer:
    """Serves readers on a bound ROUTER socket.

    `snapshot` returns a payload that stores all cached blocks.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        topic: bytes,
        buffer: ReplayBuffer,
        snapshot: Callable[[], bytes],
    ) -> None:
        self._socket, self._topic, self._buffer = socket, topic, buffer
        self._make_snapshot = snapshot
        # The last snapshot, with the sequence number at which it was created.
        self._snapshot: tuple[int, bytes] = (-1, b"")
        self._replays: dict[bytes, _Replay] = {}  # replays by reader identity, oldest first
        # Batches held for each reader identity, including batches of dropped replays.
        self._held: dict[bytes, _HeldBatches] = {}
        self.num_replays = self.num_snapshots = self.num_refused = self.num_given_up = 0

    @staticmethod
    def prepare(socket: zmq.Socket[bytes]) -> None:
        """Set the socket options that must be set before the socket is bound."""
        # Raise an error for full queues and lost readers instead of ignoring them.
        socket.router_mandatory = True
        socket.maxmsgsize = _MOST_BYTES_OF_A_FRAME
        socket.sndhwm = _SEND_HWM
        socket.rcvhwm = _SEND_HWM
        socket.sndbuf = _KERNEL_BYTES
        socket.tcp_maxrt = int(1000 * SLOW_SECONDS)  # close connections that accept no data
        socket.copy_threshold = 0  # share batches with the buffer, and track them

    @property
    def is_busy(self) -> bool:
        """Whether replays are in progress."""
        return bool(self._replays)

    @property
    def held_bytes(self) -> dict[bytes, int]:
        """Number of bytes queued for each reader, by identity."""
        return {identity: each.waiting() for identity, each in list(self._held.items())}

    def hear(self) -> None:
        """Read the requests that have arrived."""
        for _ in range(MOST_REQUESTS_WAITING):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        identity, *request = frames
        prefix = request[:-1]
        try:
            if prefix not in ([], [b""]) or not request:
                raise WireError(
                    f"request has {len(request)} frames: expected an empty frame and a frame of 8 bytes"
                )
            first = decode_sequence(request[-1])
        except WireError:
            self.num_refused += 1
            return
        if self._replays.pop(identity, None) is not None:
            self.num_given_up += 1  # a new request replaces the reader's current replay
        while len(self._replays) >= MOST_REQUESTS_WAITING:
            del self._replays[next(iter(self._replays))]
            self.num_given_up += 1
        self._replays[identity] = _Replay(identity, prefix, first, self._buffer.stop)
        self.num_replays += 1

    def serve(self) -> None:
        """Send a few batches to each reader that accepts data."""
        self._let_go()
        for replay in list(self._replays.values()):
            try:
                for _ in range(_BATCHES_AT_A_TIME):
                    if not self._has_room(replay):
                        self._drop_if_slow(replay)
                        break
                    if not self._send_next(replay):
                        del self._replays[replay.identity]
                        break
            except zmq.Again:
                continue  # the reader's queue is full
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                del self._replays[replay.identity]  # the reader has disconnected
                self.num_given_up += 1

    def _let_go(self) -> None:
        for identity, held in list(self._held.items()):
            held.let_go()
            if not held.batches:
                del self._held[identity]

    def _has_room(self, replay: _Replay) -> bool:
        """Return whether the next batch may be queued for this reader.

        If no batch is queued, the size of the next batch is not limited.
        """
        if replay.next >= replay.stop or not self._held:
            return True
        size = len(self._payload(replay)[1])
        held = self._held.get(replay.identity)
        if held is not None and held.num_bytes + size > MOST_BYTES_OF_A_READER:
            return False
        return sum(each.num_bytes for each in self._held.values()) + size <= MOST_BYTES

    def _drop_if_slow(self, replay: _Replay) -> None:
        held = self._held.get(replay.identity)
        if held is not None and time.monotonic() - held.since > SLOW_SECONDS:
            del self._replays[replay.identity]
            self.num_given_up += 1

    def _send_next(self, replay: _Replay) -> bool:
        """Send the next batch. Return whether more batches remain."""
        if replay.next >= replay.stop:
            self._send(replay, b"", END_OF_REPLAY, b"")
            return False
        number, payload = self._payload(replay)
        tracker = self._send(replay, self._topic, encode_sequence(number), payload)
        self._held.setdefault(replay.identity, _HeldBatches()).take_in(tracker, len(payload))
        replay.next = number + 1
        return True

    def _payload(self, replay: _Replay) -> tuple[int, bytes]:
        """Return the next batch and its sequence number."""
        number, first = replay.next, self._buffer.first
        if number < first:
            if first > self._buffer.start:
                return self._buffer.stop - 1, self._snapshot_payload()
            number = first  # an earlier publisher had the number: send everything
        return number, self._buffer[number]

    def _snapshot_payload(self) -> bytes:
        if self._snapshot[0] != self._buffer.stop:
            self._snapshot = (self._buffer.stop, self._make_snapshot())
            self.num_snapshots += 1
        return self._snapshot[1]

    def _send(self, replay: _Replay, *frames: bytes) -> zmq.MessageTracker:
        *before, payload = replay.identity, *replay.prefix, *frames
        for each in before:
            self._socket.send(each, zmq.NOBLOCK | zmq.SNDMORE)
        return self._socket.send(payload, zmq.NOBLOCK, copy=False, track=True)
