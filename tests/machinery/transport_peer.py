# SPDX-License-Identifier: Apache-2.0
"""Sides of transports for tests: in the test process, or in a separate one that executes commands.

Each registers memory with a known pattern.
"""

import itertools
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import numpy as np

from kvcache.transfer.transport import base
from kvcache_exchange.transport.factory import make_transport
from tests.machinery.forked import Forked, received, send
from tests.machinery.network import enter

POOL_BYTES = 1 << 20
_FRAGMENT = 4096
_numbers = itertools.count()


def pattern(seed: int, num_bytes: int = POOL_BYTES) -> np.ndarray:
    """Return uint8[num_bytes] that depends only on the seed. A seed of 0 gives zeros."""
    if seed == 0:
        return np.zeros(num_bytes, np.uint8)
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


class Side:
    """A transport of this process, by default with a name that no other test uses."""

    def __init__(self, name, agent=None, *, seed=0, num_bytes=POOL_BYTES, **options):
        self.agent = agent or f"side {next(_numbers)}"
        self.pool = pattern(seed, num_bytes)
        self.address = self.pool.ctypes.data
        self.transport = make_transport(self.agent, name, **{"timeout_s": 20, **options})
        self.transport.register([(self.address, num_bytes)])

    @property
    def metadata(self):
        return self.transport.metadata()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.transport.close()

    def connect(self, other, **options):
        return self.transport.connect(other.metadata, **options)

    def read(self, other, local, remote, length, **options):
        """Begin to read fragments from another side, which this one has connected to before."""
        local, remote, length = np.broadcast_arrays(*map(np.atleast_1d, (local, remote, length)))
        at = self.address + local, other.address + remote
        return self.transport.read(other.agent, *at, length, **options)


class Peer(Forked):
    """A side in a process that is controlled by a test."""

    def __init__(self, name: str, agent: str = "peer", **options: object) -> None:
        super().__init__(serve, name=name, agent=agent, **options)
        self.agent = agent
        self.metadata, self.address = self.greeting["metadata"].encode(), self.greeting["address"]


def attempt(
    transport: base.Transport,
    pool: np.ndarray,
    timeout_s: float,
    *,
    metadata: str,
    address: int,
    size: int,
    source: int,
) -> dict:
    """Connect if necessary, and read the first bytes of `pattern(source)`."""
    begin, error, is_right = time.monotonic(), None, None
    at = np.random.default_rng(0).permutation(size // _FRAGMENT) * _FRAGMENT
    pool[:size] = 0
    try:
        peer = transport.connect(metadata.encode(), timeout_s=timeout_s)
        length = np.full(len(at), _FRAGMENT)
        transport.read(peer, pool.ctypes.data + at, address + at, length).wait(timeout_s)
        is_right = bool((pool[:size] == pattern(source)[:size]).all())
    except (ConnectionError, base.TransferError, ValueError) as raised:
        error = str(raised)
    return {"error": error, "is_right": is_right, "seconds": time.monotonic() - begin}


def serve(
    commands: Connection,
    *,
    namespace: str | None = None,
    environment: Mapping[str, str] | None = None,
    **options,
) -> None:
    """Execute commands until the test process ends. `options` are those of `Side`."""
    os.environ.update(environment or {})
    if namespace is not None:
        enter(namespace)
    side = Side(**{"seed": 1, **options})
    transport = side.transport
    send(commands, metadata=side.metadata.decode(), address=side.address)
    while True:
        command = received(commands)
        match command.pop("command"):
            case "notifications":
                found = []
                while len(found) < command["least"]:
                    found += transport.notifications()
                    time.sleep(0.01)
                send(commands, found=[(peer, message.decode()) for peer, message in found])
            case "busy":  # keeps the main thread busy until the next command
                while not commands.poll():
                    pass
            case "attempt":
                send(commands, **attempt(transport, side.pool, transport.timeout_s, **command))
