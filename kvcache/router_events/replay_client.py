"""Asks a publisher for batches that it has published before."""

from __future__ import annotations

import time
from collections.abc import Generator

import zmq

from kvcache.router_events.wire import END_OF_REPLAY, WireError, decode_sequence, encode_sequence


class ReplayTimeout(Exception):
    """A publisher does not answer, or no longer."""


def replay(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, first: int, timeout_s: float
) -> Generator[tuple[int, bytes], None, None]:
    """(sequence number, payload) of the batches from `first` on, as far as the publisher has them.

    Each call is a connection of its own, so that no answer to an earlier one comes in between.
    ReplayTimeout where no answer comes for `timeout_s` seconds. WireError for an answer of another form.
    """
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.rcvhwm = 1_000
    socket.ipv6 = "[" in endpoint
    try:
        socket.connect(endpoint)
        socket.send_multipart([b"", encode_sequence(first)])
        deadline = time.monotonic() + timeout_s
        while True:
            if not socket.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
                raise ReplayTimeout(f"no answer from {endpoint} for {timeout_s} s")
            frames = socket.recv_multipart()
            if len(frames) != 4:
                raise WireError(f"answer has {len(frames)} frames: expected 4")
            if frames[2] == END_OF_REPLAY:
                return
            yield decode_sequence(frames[2]), frames[3]
            deadline = time.monotonic() + timeout_s
    finally:
        socket.close()
