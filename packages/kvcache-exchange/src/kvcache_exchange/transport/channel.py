# SPDX-License-Identifier: Apache-2.0
"""Sends and receives frames over a TCP connection.

A frame is a JSON header followed by a binary payload.
"""

from __future__ import annotations

import itertools
import json
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from kvcache.checks import shown
from kvcache.native.load import core

MOST_HEADER = 1 << 16  # maximum size of a header in bytes
MOST_PAYLOAD = 64 << 20
MOST_QUEUED = 1 << 16  # maximum number of queued frames that were not sent yet
_LENGTHS = struct.Struct("<II")
_DIGEST_BYTES = 16

Frame = tuple[dict, bytes]


class ChannelError(ConnectionError):
    """Raised if the connection ended, or received data is not a valid frame."""


def send_frame(
    sock: socket.socket, header: dict, payload: bytes = b"", *, number: int | None = None
) -> None:
    """Send a frame, with a digest if `number` is given. Raises OSError on failure."""
    text = json.dumps(header).encode()
    head = _LENGTHS.pack(len(text), len(payload)) + text
    sock.sendall(head)
    if payload:
        sock.sendall(payload)
    if number is not None:
        sock.sendall(_digest(number, head, payload))


def receive_frame(
    sock: socket.socket,
    *,
    most_payload: int = MOST_PAYLOAD,
    deadline: float | None = None,
    number: int | None = None,
) -> Frame:
    """Receive the next frame, which has a digest if `number` is given.

    Raises:
        ChannelError: The peer closed the connection, or sent a frame that is too large or has a
            wrong digest.
        TimeoutError: `deadline`, in the time of `time.monotonic`, has passed.
    """
    lengths = bytes(_receive(sock, _LENGTHS.size, deadline))
    text_bytes, payload_bytes = _LENGTHS.unpack(lengths)
    if text_bytes > MOST_HEADER or payload_bytes > most_payload:
        raise ChannelError(
            f"a frame announces {text_bytes} + {payload_bytes} bytes: "
            f"expected at most {MOST_HEADER} + {most_payload}"
        )
    text = bytes(_receive(sock, text_bytes, deadline))
    payload = bytes(_receive(sock, payload_bytes, deadline))
    if number is not None:
        told = bytes(_receive(sock, _DIGEST_BYTES, deadline))
        if told != _digest(number, lengths + text, payload):
            raise ChannelError(f"frame {number} differs from what was sent: the digests differ")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or not isinstance(header.get("op"), str):
        raise ChannelError(f"a frame begins with {shown(text)}: expected a JSON object with op")
    return header, payload


def _digest(number: int, head: bytes, payload: bytes) -> bytes:
    return core.xxh3_128(number.to_bytes(8, "little") + head + payload)


def _receive(sock: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the peer did not answer in time")
            sock.settimeout(left)
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ChannelError("the peer ended the connection")
        data += part
    return data


class Channel:
    """Exchanges frames with a connected peer, using one thread per direction.

    The receiving thread calls `on_frame(header, payload)` for each frame in order, and
    `on_end(reason)` once. `put` never waits for the peer. If the peer does not receive a frame
    within `timeout_s`, the channel is closed. With `has_digest`, each frame has a digest of its
    number and content, and a mismatch closes the channel.
    """

    def __init__(
        self,
        sock: socket.socket,
        name: str,
        on_frame: Callable[[dict, bytes], None],
        on_end: Callable[[str], None],
        timeout_s: float,
        *,
        has_digest: bool = False,
    ) -> None:
        self._sent, self._received = (  # frame counters, if frames have digests
            itertools.count() if has_digest else itertools.repeat(None) for _ in range(2)
        )
        self._sock, self._on_frame, self._on_end = sock, on_frame, on_end
        sock.settimeout(None)
        seconds, fraction = divmod(timeout_s, 1)
        timeval = struct.pack("ll", int(seconds), int(fraction * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._queue: queue.Queue[tuple[dict, bytes, np.ndarray | None] | None] = queue.Queue(
            MOST_QUEUED
        )
        self.threads = [
            threading.Thread(target=run, name=f"kvcache {what} {name}", daemon=True)
            for run, what in ((self._read, "frames of"), (self._write, "frames to"))
        ]

    def start(self) -> None:
        """Start calling `on_frame`."""
        for thread in self.threads:
            thread.start()

    def put(self, header: dict, payload: bytes = b"", body: np.ndarray | None = None) -> None:
        """Queue a frame for sending. Raises ChannelError if too many frames are queued.

        `body` follows the frame as it is. It must not change until it has been sent.
        """
        try:
            self._queue.put_nowait((header, payload, body))
        except queue.Full:
            raise ChannelError(
                f"{MOST_QUEUED} frames are waiting for the peer: expected fewer"
            ) from None

    def receive_into(self, body: np.ndarray) -> None:
        """Receive the bytes that follow the current frame. Called by `on_frame`.

        Raises ChannelError if the connection ends.
        """
        left = memoryview(body)
        while left:
            if not (count := self._sock.recv_into(left)):
                raise ChannelError("the peer ended the connection")
            left = left[count:]

    def close(self, timeout_s: float = 0.0) -> None:
        """Close the connection once the queued frames have been sent, or after `timeout_s`."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            timeout_s = 0.0
        writer = self.threads[1]
        if timeout_s and writer.is_alive() and threading.current_thread() is not writer:
            writer.join(timeout_s)
        with suppress(OSError):  # the peer closed first
            self._sock.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        try:
            while True:
                self._on_frame(*receive_frame(self._sock, number=next(self._received)))
        except OSError as error:
            self._on_end(str(error))
        except Exception as error:  # frames sent by this library never cause an exception
            self._on_end(f"a frame was refused: {error}")
        finally:
            self._sock.close()

    def _write(self) -> None:
        try:
            while (frame := self._queue.get()) is not None:
                header, payload, body = frame
                send_frame(self._sock, header, payload, number=next(self._sent))
                if body is not None:
                    self._sock.sendall(body)
        except BlockingIOError:
            self._on_end("the peer does not receive frames")
        except OSError as error:
            self._on_end(str(error))
