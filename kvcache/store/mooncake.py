"""Mooncake Store, a distributed store of blocks in the memory of many machines."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvcache.checks import byte_count, text
from kvcache.store.base import BlockStore, StoreError

# Batches of more keys fail on the TCP lane.
_KEYS_PER_CALL = 1024
_NOT_FOUND, _FULL = -704, -200  # of its error codes
_TOO_LARGE = -600
_EXISTS_CODES = (0, 1)
_CONNECT_S = 1.0
_LIMITS = {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_RPC_TIMEOUT_MS": "2000"}
_abandoned: list[object] = []  # clients whose master is gone


class MooncakeStore(BlockStore):
    """A client of a Mooncake Store, whose master is at `master`, "host:port".

    `segment_bytes`: memory of this machine that it gives to the store, for blocks of all clients (0: it
    is a client only). `host`: the address at which other clients reach that memory; the loopback unless
    told. `protocol`: "tcp" or "rdma", with `devices`. `metadata`: "P2PHANDSHAKE", or the metadata
    server. `buffer_bytes`: memory of its own.

    The master may come, go and come again: what it knew is gone then. Mooncake's `setup` and `close` hold
    Python's lock, for minutes and for seconds where no master answers. So a connection is tried
    before, and `setup` has one attempt and a time limit for answers of 2 s, unless the environment says
    otherwise (`MC_STORE_CLIENT_SETUP_RETRIES`, `MC_RPC_TIMEOUT_MS`). ModuleNotFoundError where Mooncake
    is not installed (extra `mooncake`).

    Mooncake's client listens at ports of its own (docs/security.md).
    """

    def __init__(
        self,
        master: str,
        *,
        segment_bytes: int | str = 0,
        host: str = "127.0.0.1",
        protocol: str = "tcp",
        devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        buffer_bytes: int | str = "64MiB",
    ) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ModuleNotFoundError(
                f"MooncakeStore needs Mooncake ({error}): pip install 'kvcache[mooncake]', and the "
                "system's libibverbs",
                name="mooncake",
            ) from error
        self._new_client = MooncakeDistributedStore
        self._setup = (
            text(host, "host"),
            text(metadata, "metadata"),
            byte_count(segment_bytes, "segment_bytes", 0),
            byte_count(buffer_bytes, "buffer_bytes", 1 << 20),
            text(protocol, "protocol"),
            text(devices, "devices"),
            text(master, "master"),
        )
        self._client = None

    def open(self, memory: np.ndarray, value_bytes: int) -> None:
        """Connects. StoreError where there is no master."""
        self.close()
        self._connect()
        client = self._new_client()
        with _limits():
            _check(client.setup(*self._setup), "setup")
        self._client = client
        _check(client.register_buffer(memory.ctypes.data, memory.nbytes), "register_buffer")

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Which keys it has; StoreError where the master does not answer."""
        found = []
        for some in _batches(keys):
            codes = self._client.batch_is_exist(some)
            for code in codes:
                if code not in _EXISTS_CODES:
                    raise StoreError(f"batch_is_exist answered {code}")
            found += [code == 1 for code in codes]
        return found

    def put(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[bool]:
        """Puts values; False for those that find no room."""
        taken = []
        for some, of_some in zip(_batches(keys), _batches(values)):
            sizes = [len(value) for value in of_some]
            codes = self._client.batch_put_from(some, _addresses(of_some), sizes)
            for code in codes:
                if code < 0 and code != _FULL:
                    raise StoreError(f"batch_put_from answered {code}")
            taken += [code >= 0 for code in codes]
        return taken

    def get(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[int]:
        """Gets values; a larger one than there is room for is one of another size."""
        sizes = []
        for some, of_some in zip(_batches(keys), _batches(values)):
            room = [len(value) for value in of_some]
            sizes += self._client.batch_get_into(some, _addresses(of_some), room)
        for size in sizes:
            if size < 0 and size not in (_NOT_FOUND, _TOO_LARGE):
                raise StoreError(f"batch_get_into answered {size}")
        return [0 if size == _TOO_LARGE else max(size, -1) for size in sizes]

    def remove(self, keys: Sequence[str]) -> None:
        """Removes values, also those that somebody reads."""
        for some in _batches(keys):
            self._client.batch_remove(some, True)

    def close(self) -> None:
        """Ends the client; what its own segment holds is gone."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            self._connect()
        except OSError:
            _abandoned.append(client)  # until the process ends
            return
        client.close()

    def _connect(self) -> None:
        """OSError where no master listens."""
        address = re.fullmatch(r"\[?([^]/]+?)\]?:(\d+)", self._setup[-1])
        if address is not None:  # else a service that knows the master
            socket.create_connection((address[1], int(address[2])), _CONNECT_S).close()


@contextmanager
def _limits() -> Iterator[None]:
    """Mooncake reads its limits from the environment when a client is set up."""
    added = [name for name in _LIMITS if name not in os.environ]
    os.environ.update({name: _LIMITS[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _batches(values: Sequence) -> list[Sequence]:
    return [values[i : i + _KEYS_PER_CALL] for i in range(0, len(values), _KEYS_PER_CALL)]


def _addresses(values: Sequence[np.ndarray]) -> list[int]:
    return [value.ctypes.data for value in values]


def _check(code: int, what: str) -> None:
    if code != 0:
        raise StoreError(f"{what} answered {code}")
