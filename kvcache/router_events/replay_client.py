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
    ReplayTimeout where it has not ended within `timeout_s` seconds; what came before counts. WireError
    for an answer of another form.
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
            left = deadline - time.monotonic()
            if left <= 0 or not socket.poll(int(left * 1000)):
                raise ReplayTimeout(f"{endpoint} has not sent all within {timeout_s:g} s")
            frames = socket.recv_multipart()
            if len(frames) != 4:
                raise WireError(f"answer has {len(frames)} frames: expected 4")
            if frames[2] == END_OF_REPLAY:
                return
            yield decode_sequence(frames[2]), frames[3]
    finally:
        socket.close()
