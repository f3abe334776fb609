"""Answers requests for replay, a few batches at a time, so that publishing goes on meanwhile.

A request is [identity, b"", first sequence number]; the empty frame may be missing, and is then missing
in the answers. Each batch is an answer, [identity, b"", topic, sequence number, payload], and the last
answer has sequence number -1. A reader that asks for batches which the buffer no longer has gets one
that clears its view and stores everything that is cached, under the last sequence number.

What waits for readers is bounded in bytes: a batch is handed to ZMQ only while less than
`MOST_BYTES_OF_A_READER` waits for its reader and less than `MOST_BYTES` for all. ZMQ says when it has let
go of a batch, so bytes count until the kernel has them. A reader that takes nothing for `SLOW_SECONDS` is
dropped: its replay here, and its connection by the kernel.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvcache.router_events.replay_buffer import ReplayBuffer
from kvcache.router_events.wire import END_OF_REPLAY, WireError, decode_sequence, encode_sequence

MOST_REQUESTS_WAITING = 64
_BATCHES_AT_A_TIME = 32
_MOST_BYTES_OF_A_FRAME = 256  # of a request
_SEND_HWM = 1_000  # messages to a reader that it has not taken yet; then its replay waits
_KERNEL_BYTES = 2**18  # of a connection, in the kernel's buffer
MOST_BYTES = 2**26  # that wait for all readers
MOST_BYTES_OF_A_READER = (
    MOST_BYTES // MOST_REQUESTS_WAITING
)  # so that idle ones leave room for others
SLOW_SECONDS = 10.0


@dataclass
class _Replay:
    identity: bytes
    prefix: list[bytes]
    next: int  # sequence numbers
    stop: int


@dataclass
class _Held:
    """Batches that ZMQ holds for a reader, the oldest first."""

    batches: deque[tuple[zmq.MessageTracker, int]] = field(default_factory=deque)
    num_bytes: int = 0
    since: float = 0.0  # of the monotonic clock: when it has last taken one

    def take_in(self, tracker: zmq.MessageTracker, size: int) -> None:
        if not self.batches:
            self.since = time.monotonic()
        self.batches.append((tracker, size))
        self.num_bytes += size

    def waiting(self) -> int:
        """Bytes that ZMQ still holds, also where `let_go` was not called since."""
        return sum(size for tracker, size in list(self.batches) if not tracker.done)

    def let_go(self) -> None:
        """Forgets those that ZMQ no longer holds."""
        while self.batches and self.batches[0][0].done:
            self.num_bytes -= self.batches.popleft()[1]
            self.since = time.monotonic()


class ReplayServer:
    """Serves readers on a bound ROUTER socket. `snapshot`: the payload that stores everything."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        topic: bytes,
        buffer: ReplayBuffer,
        snapshot: Callable[[], bytes],
    ) -> None:
        self._socket, self._topic, self._buffer = socket, topic, buffer
        self._make_snapshot = snapshot
        self._snapshot: tuple[int, bytes] = (-1, b"")  # the sequence number after it
        self._replays: dict[bytes, _Replay] = {}  # by identity, the oldest first
        self._held: dict[bytes, _Held] = {}  # by identity, also of those that were given up
        self.num_replays = self.num_snapshots = self.num_refused = self.num_given_up = 0

    @staticmethod
    def prepare(socket: zmq.Socket[bytes]) -> None:
        """Options that must be set before the socket is bound."""
        socket.router_mandatory = True  # a full queue and a lost reader are told, not ignored
        socket.maxmsgsize = _MOST_BYTES_OF_A_FRAME
        socket.sndhwm = _SEND_HWM
        socket.rcvhwm = _SEND_HWM
        socket.sndbuf = _KERNEL_BYTES
        socket.tcp_maxrt = int(1000 * SLOW_SECONDS)  # ends connections that take nothing
        socket.copy_threshold = 0  # batches are shared with the buffer, and tracked

    @property
    def is_busy(self) -> bool:
        """Whether replays are under way."""
        return bool(self._replays)

    @property
    def held_bytes(self) -> dict[bytes, int]:
        """Bytes that wait for readers, by identity."""
        return {identity: each.waiting() for identity, each in list(self._held.items())}

    def hear(self) -> None:
        """Takes in the requests that have come."""
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
                    f"request has {len(request)} frames: expected an empty one and 8 bytes"
                )
            first = decode_sequence(request[-1])
        except WireError:
            self.num_refused += 1
            return
        if self._replays.pop(identity, None) is not None:
            self.num_given_up += 1  # a reader has one replay at a time
        while len(self._replays) >= MOST_REQUESTS_WAITING:
            del self._replays[next(iter(self._replays))]
            self.num_given_up += 1
        self._replays[identity] = _Replay(identity, prefix, first, self._buffer.stop)
        self.num_replays += 1

    def serve(self) -> None:
        """Sends a few batches to each reader that takes them."""
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
                continue  # its queue is full
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                del self._replays[replay.identity]  # it is gone
                self.num_given_up += 1

    def _let_go(self) -> None:
        for identity, held in list(self._held.items()):
            held.let_go()
            if not held.batches:
                del self._held[identity]

    def _has_room(self, replay: _Replay) -> bool:
        """Whether the next batch may wait for this reader; one may where none does, however large."""
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
        """Whether more is to come."""
        if replay.next >= replay.stop:
            self._send(replay, b"", END_OF_REPLAY, b"")
            return False
        number, payload = self._payload(replay)
        tracker = self._send(replay, self._topic, encode_sequence(number), payload)
        self._held.setdefault(replay.identity, _Held()).take_in(tracker, len(payload))
        replay.next = number + 1
        return True

    def _payload(self, replay: _Replay) -> tuple[int, bytes]:
        """The batch that comes next, under its number."""
        if replay.next < self._buffer.first:
            return self._buffer.stop - 1, self._snapshot_payload()
        return replay.next, self._buffer[replay.next]

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
