# SPDX-License-Identifier: Apache-2.0
"""A client for Mooncake Store, which stores blocks in the memory of many machines."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kvcache.checks import byte_count, shown, text
from kvcache_exchange.store.base import BlockStore, StoreError
from kvcache_exchange.store.removals import PendingRemovals

# Maximum number of keys per call. Larger batches fail over TCP.
_KEYS_PER_CALL = 1024
_NOT_FOUND, _TOO_LARGE = -704, -600  # Mooncake's error codes
_UNANSWERED = (-900, -901)  # the master was not reached
_CONNECT_S, _PROBE_S = 1.0, 30.0
# Ends without closing the client, because that may take seconds.
_PROBE = """
import json, os, sys
sys.path[:] = json.loads(sys.argv[1])
from mooncake.store import MooncakeDistributedStore
os._exit(MooncakeDistributedStore().setup(*json.loads(sys.argv[2])) != 0)
"""
_LIMITS = {"MC_STORE_CLIENT_SETUP_RETRIES": "1", "MC_RPC_TIMEOUT_MS": "2000"}
_abandoned: list[object] = []  # clients whose master is unreachable; kept until the process ends


class MooncakeStore(BlockStore):
    """A `BlockStore` that is a client of a Mooncake Store.

    If the master restarts, the store's content is lost. While no master answers, Mooncake's `setup`
    holds the GIL for minutes, and `close` for seconds. Therefore, a client in a separate process
    first tests whether the master answers. `setup` makes a single attempt with a timeout of 2 s per
    reply; the environment variables `MC_STORE_CLIENT_SETUP_RETRIES` and `MC_RPC_TIMEOUT_MS`
    override these limits. The client itself listens on ports (docs/security.md).

    A value that cannot be read counts as missing, and is replaced by the next `put` of its key. If
    the master does not confirm a removal, all calls fail until it does (`PendingRemovals`).

    Args:
        master: Address of the master, "host:port".
        segment_bytes: Bytes of this machine's memory that the store may use for blocks of all
            clients. 0: this machine contributes no memory.
        host: Address at which other clients reach this memory. None: the address from which this
            machine connects to the master.
        protocol: "tcp" or "rdma".
        devices: Names of the RDMA devices.
        metadata: "P2PHANDSHAKE", or the address of a metadata server.
        buffer_bytes: Size of the client's internal buffers in bytes.

    Raises:
        ModuleNotFoundError: Mooncake is not installed (extra `mooncake`).
    """

    def __init__(
        self,
        master: str,
        *,
        segment_bytes: int | str = 0,
        host: str | None = None,
        protocol: str = "tcp",
        devices: str = "",
        metadata: str = "P2PHANDSHAKE",
        buffer_bytes: int | str = "64MiB",
    ) -> None:
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ModuleNotFoundError(
                f"MooncakeStore needs Mooncake ({error}): pip install 'torch-kvcache[mooncake]', and the "
                "system's libibverbs",
                name="mooncake",
            ) from error
        self._new_client = MooncakeDistributedStore
        self._host = None if host is None else text(host, "host")
        self._setup = (
            text(metadata, "metadata"),
            byte_count(segment_bytes, "segment_bytes", 0),
            byte_count(buffer_bytes, "buffer_bytes", 1 << 20),
            text(protocol, "protocol"),
            text(devices, "devices"),
            text(master, "master"),
        )
        self._client = None
        self._removals = PendingRemovals(f"mooncake {self._setup[-1]}")
        self._unreadable: set[str] = set()

    def open(self, memory: np.ndarray, value_bytes: int) -> None:
        """Connect to the master. Raises StoreError if the master cannot be reached."""
        self.close()
        self._unreadable.clear()
        own = self._reach()
        client = self._new_client()
        with _limits():
            _check(client.setup(self._host or own, *self._setup), "setup")
        self._client = client
        _check(client.register_buffer(memory.ctypes.data, memory.nbytes), "register_buffer")
        self._removals.load()
        self._remove_pending()

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key, whether the store contains a value. Raises StoreError if the master
        does not answer.
        """
        self._remove_pending()
        found = []
        for some in _batches(keys):
            codes = _answered(self._client.batch_is_exist(some), "batch_is_exist")
            found += [code == 1 and key not in self._unreadable for key, code in zip(some, codes)]
        return found

    def put(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[bool]:
        """Store values. Returns, for each value, False if the value does not fit into the store, or
        if the store cannot store it.
        """
        self._remove_pending()
        if unreadable := [key for key in keys if key in self._unreadable]:
            self.remove(unreadable)
            self._unreadable.difference_update(unreadable)
        taken = []
        for some, of_some in zip(_batches(keys), _batches(values)):
            sizes = [len(value) for value in of_some]
            codes = self._client.batch_put_from(some, _addresses(of_some), sizes)
            taken += [code >= 0 for code in _answered(codes, "batch_put_from")]
        return taken

    def get(self, keys: Sequence[str], values: Sequence[np.ndarray]) -> list[int]:
        """Read values. For a value that does not fit into its buffer, the returned size is 0."""
        self._remove_pending()
        sizes = []
        for some, of_some in zip(_batches(keys), _batches(values)):
            room = [len(value) for value in of_some]
            found = self._client.batch_get_into(some, _addresses(of_some), room)
            sizes += _answered(found, "batch_get_into")
        for key, size in zip(keys, sizes):
            if size < 0 and size not in (_NOT_FOUND, _TOO_LARGE):
                self._unreadable.add(key)
        return [0 if size == _TOO_LARGE else max(size, -1) for size in sizes]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove values, even while others read them. Raises StoreError if the master does not
        confirm each removal.
        """
        self._removals.add(keys)
        self._remove_pending()

    def _remove_pending(self) -> None:
        pending = self._removals.keys
        for some in _batches(pending):
            codes = self._client.batch_remove(some, True)
            if len(codes) != len(some) or not {*codes} <= {0, _NOT_FOUND}:
                raise StoreError(
                    f"batch_remove returned {shown(codes)}: expected {len(some)} times 0 or {_NOT_FOUND}"
                )
        if pending:
            self._removals.done(pending)

    def close(self) -> None:
        """Close the client. The content of its memory segment is lost."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            self._reach()
        except (OSError, StoreError):
            _abandoned.append(client)  # keep the client until the process ends
            return
        client.close()

    def _reach(self) -> str:
        """Return this machine's address. Raises OSError or StoreError if the master does not answer.

        A master that hangs accepts connections. Therefore, a client is set up in a process that may
        wait for the master without the GIL of this process.
        """
        address = re.fullmatch(r"\[?([^]/]+?)\]?:(\d+)", self._setup[-1])
        own = "127.0.0.1"  # for the URL of a service that returns the master's address
        if address is not None:
            with socket.create_connection((address[1], int(address[2])), _CONNECT_S) as connection:
                own = connection.getsockname()[0]
        metadata, _, _, *others = self._setup
        arguments = json.dumps([self._host or own, metadata, 0, 1 << 20, *others])
        command = [sys.executable, "-c", _PROBE, json.dumps(sys.path), arguments]
        options = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        try:
            done = subprocess.run(command, env=_LIMITS | os.environ, timeout=_PROBE_S, **options)
        except subprocess.TimeoutExpired as error:
            raise StoreError(f"the master {self._setup[-1]} does not answer") from error
        if done.returncode:
            raise StoreError(f"the master {self._setup[-1]} does not answer a new client")
        return own


@contextmanager
def _limits() -> Iterator[None]:
    """Set Mooncake's timeouts.

    Mooncake reads the timeouts from the environment when a client is created.
    """
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


def _answered(codes: Sequence[int], call: str) -> Sequence[int]:
    """Return the codes of a call, one per key. Raises StoreError if the master was not reached."""
    for code in codes:
        if code in _UNANSWERED:
            raise StoreError(f"{call} returned {code}: the master was not reached")
    return codes


def _check(code: int, what: str) -> None:
    if code != 0:
        raise StoreError(f"{what} returned {code}")
