# SPDX-License-Identifier: Apache-2.0
"""A peer in a separate process, for `test_transports.py`.

The peer registers memory with a known pattern, reports its metadata, and executes commands. `lie`
names a protocol violation that the peer commits, and `delay` names a step that it slows down.
"""

import json
import os
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection

import numpy as np
import torch

from kvcache.transfer.transport import base
from kvcache_exchange.transport import channel, connection, factory, handshake, lane
from tests.machinery.forked import Forked, received, send
from tests.machinery.network import enter

POOL_BYTES = 1 << 20
_FRAGMENT = 4096


def pattern(seed: int) -> np.ndarray:
    """Return uint8[POOL_BYTES] that depends only on the seed."""
    return np.random.default_rng(seed).integers(0, 256, POOL_BYTES, np.uint8)


class Peer(Forked):
    """A peer process that is controlled by a test.

    Args:
        name: Name of the transport.
        agent: The name under which other agents know the peer.
        options: Options of `serve`.
    """

    def __init__(self, name: str, agent: str = "peer", **options: object) -> None:
        super().__init__(serve, name=name, agent=agent, **options)
        self.metadata, self.address = self.greeting["metadata"].encode(), self.greeting["address"]


def tell_lies(how: str) -> None:
    """Patch the transport to violate the protocol in this way."""
    if how == "version":
        handshake.TRANSPORT_VERSION += 1
    if how == "corrupt":  # changes the bytes after their digest was computed
        real = lane.digest_of

        def changed(piece: torch.Tensor) -> str:
            digest = real(piece)
            piece[0] ^= 1
            return digest

        lane.digest_of = changed
    start = channel.Channel.put

    def put(self: channel.Channel, header: dict, *parts: object, **body: object) -> None:
        if how == "size" and header["op"] == "start":
            header = {**header, "bytes": header["bytes"] + 1}
        if how == "piece" and header["op"] == "piece":
            header = {**header, "bytes": header["bytes"] + 1}
        if how == "taken" and header["op"] == "start":
            start(self, {"op": "taken"})
        if how == "id" and header["op"] == "start":
            header = {**header, "id": header["id"] + 1}
        if how == "twice" and header["op"] == "start":
            start(self, header, *parts, **body)
        if how == "op" and header["op"] == "start":
            header = {**header, "op": "begin"}
        start(self, header, *parts, **body)

    channel.Channel.put = put


def take_longer(what: str) -> None:
    """Make the step `what` of the transport half a second slower. Only "open" has an effect."""
    if what == "open":
        real = connection.Connection.open

        def slow(self: connection.Connection, lane: object) -> None:
            time.sleep(0.5)
            real(self, lane)

        connection.Connection.open = slow


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
    name: str,
    agent: str,
    seed: int = 1,
    secret: bytes = b"",
    lie: str = "",
    delay: str = "",
    digest: bool = False,
    host: str = "127.0.0.1",
    timeout_s: float = 20.0,
    namespace: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Execute commands until the test process ends."""
    os.environ.update(environment or {})
    if namespace is not None:
        enter(namespace)
    tell_lies(lie)
    take_longer(delay)
    pool = pattern(seed)
    transport = factory.make_transport(
        agent, name, secret=secret, host=host, timeout_s=timeout_s, digest=digest
    )
    transport.register([(pool.ctypes.data, pool.nbytes)])

    def answer(**values: object) -> None:
        send(commands, **values)

    told = transport.metadata().decode()
    if lie == "version":
        told = json.dumps({**json.loads(told), "version": handshake.TRANSPORT_VERSION})
    answer(metadata=told, address=pool.ctypes.data)
    while True:
        command = received(commands)
        match command.pop("command"):
            case "notifications":
                deadline, found = time.monotonic() + 30, transport.notifications()
                while len(found) < command["least"] and time.monotonic() < deadline:
                    time.sleep(0.01)
                    found += transport.notifications()
                answer(found=[(peer, message.decode()) for peer, message in found])
            case "busy":  # keeps the main thread busy until the next command
                answer(begun=True)
                while not commands.poll():
                    pass
            case "pool":
                answer(hex=pool[command["first"] : command["last"]].tobytes().hex())
            case "connect":
                try:
                    peer = transport.connect(command["metadata"].encode(), timeout_s=20)
                    answer(peer=peer)
                except (ConnectionError, ValueError) as error:
                    answer(error=str(error))
            case "read":
                here = pool.ctypes.data + np.array(command["local"])
                read = transport.read(
                    command["peer"], here, np.array(command["remote"]), np.array(command["length"])
                )
                read.wait(20)
                answer(done=True)
            case "attempt":
                answer(**attempt(transport, pool, timeout_s, **command))
            case "fill":
                pool[:] = command["value"]
                answer(done=True)
