# SPDX-License-Identifier: Apache-2.0
"""Measures one side's file descriptors and memory while many connections are opened and closed.

`python -m tests.machinery.reconnects --count 1000` prints the curves for both transports, with
peers that are disconnected and with peers that are killed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvcache_exchange.transport import make_transport
from tests.machinery.forked import context

OPTIONS = {"timeout_s": 5.0, "piece_bytes": 8192}
_WAIT_S = 10.0
_numbers = itertools.count()


class Mark(NamedTuple):
    """The resources used by this process after a number of connections.

    `descriptors` is the maximum since the previous mark, because NIXL opens and closes descriptors
    in groups of 16.
    """

    connections: int
    descriptors: int
    resident_mib: float


def _serve(name: str, agent: str, pipe: Connection) -> None:
    """Run the peer, a transport with one page of ones, until the process is killed."""
    os.setsid()
    memory = np.ones(4096, np.uint8)
    transport = make_transport(agent, name, **OPTIONS)
    transport.register([(memory.ctypes.data, memory.nbytes)])
    pipe.send((transport.metadata(), memory.ctypes.data))
    signal.pause()


def _started(name: str) -> tuple:
    """Start a peer process. Return the process, the peer's metadata and the address of the peer's
    memory.
    """
    mine, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(name, f"p{next(_numbers)}", theirs), daemon=True)
    process.start()
    theirs.close()
    with mine:
        if not mine.poll(60):
            raise TimeoutError("the peer did not start")
        metadata, address = mine.recv()
    return process, metadata, address


def _end(process) -> None:
    process.kill()
    process.join()
    process.close()


def mark(connections: int) -> Mark:
    """Measure the current resources."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Mark(
        connections, len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE") / 2**20
    )


def curve(
    name: str, count: int, *, kill: bool, every: int, most_more: int | None = None
) -> list[Mark]:
    """Open `count` connections one after another, read over each, and close it.

    Return a mark after every `every` connections. If `most_more` is given, wait before each mark
    until at most this many additional descriptors are open, or until a timeout.
    """
    memory = np.zeros(4096, np.uint8)
    side = make_transport(f"a{next(_numbers)}", name, **OPTIONS)
    side.register([(memory.ctypes.data, memory.nbytes)])
    process, metadata, address = _started(name)
    marks, most = [mark(0)], 0
    try:
        for number in range(1, count + 1):
            peer = _connected(side, metadata)
            memory[:8] = 0
            side.read(peer, [memory.ctypes.data], [address], [8]).wait(_WAIT_S)
            if not memory[:8].all():
                raise AssertionError(f"wrong bytes over connection {number}")
            if kill:
                _end(process)
                process, metadata, address = _started(name)
            # The peer has already disconnected.
            with contextlib.suppress(ValueError, ConnectionError):
                side.disconnect(peer)
            side.notifications()  # releases ended connections
            if number % every == 0:
                time.sleep(0.3)
            deadline = time.monotonic() + _WAIT_S
            while (
                most_more is not None
                and mark(number).descriptors > marks[0].descriptors + most_more
                and time.monotonic() < deadline
            ):
                time.sleep(0.01)
            now = mark(number)
            most = max(most, now.descriptors)
            if number % every == 0:
                marks.append(now._replace(descriptors=most))
                most = 0
    finally:
        side.close()
        _end(process)
    return marks


def _connected(side, metadata: bytes) -> str:
    """Connect, and retry until the peer has noticed that the previous connection has ended."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            return side.connect(metadata, timeout_s=5)
        except ConnectionError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=["tcp", "nixl"])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--how", choices=("both", "disconnected", "killed"), default="both")
    given = parser.parse_args()
    for name in given.names:
        for how in ("disconnected", "killed") if given.how == "both" else (given.how,):
            begin = time.monotonic()
            marks = curve(name, given.count, kill=how == "killed", every=given.every)
            shown = ", ".join(f"{n}: {fds} fds {mib:.0f} MiB" for n, fds, mib in marks)
            print(f"{name}, peer {how} ({time.monotonic() - begin:.0f} s): {shown}", flush=True)


if __name__ == "__main__":
    main()
