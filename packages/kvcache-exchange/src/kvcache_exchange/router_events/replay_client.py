# SPDX-License-Identifier: Apache-2.0
"""Requests earlier batches from a publisher."""

from __future__ import annotations

import time
from collections.abc import Generator

import zmq

from kvcache_exchange.router_events.wire import (
    END_OF_REPLAY,
    WireError,
    decode_sequence,
    encode_sequence,
)


class ReplayTimeout(Exception):
    """Raised if a publisher does not respond or has stopped responding."""


def replay(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    first: int,
    timeout_s: float,
    topic: bytes = b"",
) -> Generator[tuple[int, bytes], None, None]:
    """Yield (sequence number, payload) of the publisher's batches, starting at `first`.

    Batches of topics other than `topic` are skipped. b"": all topics. Each call opens a new
    connection, so that responses to earlier calls cannot interfere. Raises ReplayTimeout if the
    replay has not ended within `timeout_s` seconds. Batches that were already yielded remain valid.
    Raises WireError for a malformed response.
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
                raise ReplayTimeout(f"{endpoint} did not send all batches within {timeout_s:g} s")
            frames = socket.recv_multipart()
            if len(frames) != 4:
                raise WireError(f"reply has {len(frames)} frames: expected 4")
            if frames[2] == END_OF_REPLAY:
                return
            if topic and frames[1] != topic:
                continue
            yield decode_sequence(frames[2]), frames[3]
    finally:
        socket.close()
