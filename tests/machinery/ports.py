# SPDX-License-Identifier: Apache-2.0
"""Ports for servers that must be given a port, and cannot choose and report one."""

import random
import socket

_LEAST, _MOST = 10_000, 32_767  # below Linux's default range for outgoing connections
_taken: set[int] = set()
_random = random.SystemRandom()  # a seeded generator would return the same ports in each process


def free_port() -> int:
    """Return a port on which nothing listens, and which this process has not returned before.

    A port that the kernel selects would be in its range for outgoing connections, so another
    connection could occupy it before the server starts.
    """
    while True:
        port = _random.randint(_LEAST, _MOST)
        if port in _taken:
            continue
        _taken.add(port)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
