"""Answers requests for replay, a few batches at a time, so that publishing goes on meanwhile.

A request is [identity, b"", first sequence number]; the empty frame may be missing, and is then missing
in the answers. Each batch is an answer, [identity, b"", topic, sequence number, payload], and the last
answer has sequence number -1. A reader that asks for batches which the buffer no longer has gets one
that clears its view and stores everything that is cached, under the last sequence number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvcache.router_events.replay_buffer import ReplayBuffer
from kvcache.router_events.wire import END_OF_REPLAY, WireError, decode_sequence, encode_sequence

MOST_REQUESTS_WAITING = 64
_BATCHES_AT_A_TIME = 32
_MOST_BYTES_OF_A_FRAME = 256  # of a request
_SEND_HWM = 1_000  # messages to a reader that it has not taken yet; then its replay waits


@dataclass
class _Replay:
    identity: bytes
    prefix: list[bytes]
    next: int  # sequence numbers
    stop: int


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
        self.num_replays = self.num_snapshots = self.num_refused = self.num_given_up = 0

    @staticmethod
    def prepare(socket: zmq.Socket[bytes]) -> None:
        """Options that must be set before the socket is bound."""
        socket.router_mandatory = True  # a full queue and a lost reader are told, not ignored
        socket.maxmsgsize = _MOST_BYTES_OF_A_FRAME
        socket.sndhwm = _SEND_HWM
        socket.rcvhwm = _SEND_HWM

    @property
    def is_busy(self) -> bool:
        """Whether replays are under way."""
        return bool(self._replays)

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
        for replay in list(self._replays.values()):
            try:
                for _ in range(_BATCHES_AT_A_TIME):
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

    def _send_next(self, replay: _Replay) -> bool:
        """Whether more is to come."""
        if replay.next >= replay.stop:
            self._send(replay, b"", END_OF_REPLAY, b"")
            return False
        if replay.next < self._buffer.first:
            number, payload = self._buffer.stop - 1, self._snapshot_payload()
        else:
            number, payload = replay.next, self._buffer[replay.next]
        self._send(replay, self._topic, encode_sequence(number), payload)
        replay.next = number + 1
        return True

    def _snapshot_payload(self) -> bytes:
        if self._snapshot[0] != self._buffer.stop:
            self._snapshot = (self._buffer.stop, self._make_snapshot())
            self.num_snapshots += 1
        return self._snapshot[1]

    def _send(self, replay: _Replay, *frames: bytes) -> None:
        self._socket.send_multipart([replay.identity, *replay.prefix, *frames], zmq.NOBLOCK)
