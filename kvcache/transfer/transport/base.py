# SPDX-License-Identifier: Apache-2.0
"""The transport interface: registered memory, peers, and reads with deadlines."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcache.checks import seconds
from kvcache.transfer.transport.spans import Spans, check_match, joined

if TYPE_CHECKING:
    from kvcache.worker.pages.pages import Pages


class TransferError(RuntimeError):
    """Raised if a transfer failed or was canceled. The message contains the reason."""


class Transfer(ABC):
    """A read in flight.

    Every transfer ends: it either completes, or fails no later than `timeout_s` after its start.

    Attributes:
        peer: The peer whose memory is accessed.
        num_bytes: Total size of all fragments in bytes.
    """

    peer: str
    num_bytes: int

    @abstractmethod
    def poll(self) -> bool:
        """Return whether all bytes have moved. Raises TransferError if the transfer has failed."""

    @abstractmethod
    def cancel(self, reason: str) -> None:
        """Cancel the transfer, so that `poll` raises TransferError. Has no effect after the
        transfer has ended.

        Other transfers with the peer continue. If the peer does not release the canceled transfer
        in time, the peer is disconnected.

        Args:
            reason: Reason to state in the error message.
        """

    @property
    @abstractmethod
    def is_released(self) -> bool:
        """Whether the transport no longer accesses local memory for this transfer.

        After a failure, it may take a while until this becomes True. Until then, the transfer's
        pages must not be reused.
        """

    @abstractmethod
    def _wait_for_end(self, timeout_s: float) -> None:
        """Wait until the transfer has ended, for at most `timeout_s`."""

    def wait(self, timeout_s: float) -> None:
        """Wait until all bytes have moved. If the transfer does not complete in time, it is
        canceled.

        Args:
            timeout_s: Maximum time to wait, in seconds.

        Raises:
            TransferError: The transfer failed or did not complete in time.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        deadline = time.monotonic() + timeout_s
        while not self.poll():
            left = deadline - time.monotonic()
            if left <= 0:
                self.cancel(f"not finished within {timeout_s:g} s")
                continue  # `poll` then raises
            self._wait_for_end(left)


class Transport(ABC):
    """Moves bytes between the registered memory of this process and that of its peers.

    Only one thread at a time may call the methods of a transport, except for `connect`, which any
    thread may call. Until `close`, the transport's own threads serve the peers' reads, even while
    the calling thread is busy.

    Transfers are not ordered with the caller's CUDA streams. On both sides, work that accesses the
    memory must have finished before a transfer starts. Work launched on any stream after the
    transfer has completed sees the transferred bytes.

    Attributes:
        name: "tcp" or "nixl".
        agent: The name by which peers know this side.

    Example:
        >>> from kvcache_exchange.transport import make_transport
        >>> a, b = make_transport("a", "tcp"), make_transport("b", "tcp")
        >>> mine, theirs = np.zeros(64, np.uint8), np.arange(64, dtype=np.uint8)
        >>> a.register([(mine.ctypes.data, 64)]); b.register([(theirs.ctypes.data, 64)])
        >>> peer = a.connect(b.metadata())
        >>> local, remote = mine.ctypes.data + np.array([0, 8]), theirs.ctypes.data + np.array([32, 16])
        >>> a.read(peer, local, remote, np.array([8, 8]), notify=b"read").wait(timeout_s=5)
        >>> mine[:16].tolist()
        [32, 33, 34, 35, 36, 37, 38, 39, 16, 17, 18, 19, 20, 21, 22, 23]
        >>> a.close(); b.close()
    """

    name: str
    agent: str

    @abstractmethod
    def register(self, memory: Pages | Sequence[tuple[int, int]]) -> None:
        """Register memory that reads, started by either side, may access.

        Register memory before calling `metadata`, which reports the memory to peers. Registering
        memory again is allowed. Each fragment of a transfer must lie in a single region: it must
        not cross the boundary between memory registered in two calls, or the end of an allocation
        of pages.

        Args:
            memory: The pages of a pool, or (address, bytes) of host memory. The caller must keep the
                memory alive until `close` returns.

        Raises:
            ValueError: A size is zero, or the memory is already registered under another device.
                Nothing was registered.
            RuntimeError: NIXL cannot share the memory.
        """

    @abstractmethod
    def unregister(self, memory: Pages | Sequence[tuple[int, int]]) -> None:
        """Unregister memory, which may then be freed or remapped.

        All peers are disconnected, and transfers in flight fail. Peers that reconnect can access
        only memory that is still registered. After the memory is registered again, `metadata` is
        the same as before, and peers that connect from then on can access all of it.

        Args:
            memory: The argument of an earlier `register`.

        Raises:
            TimeoutError: Data was still being copied to or from the memory after the transport's timeout.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """Return the version, agent, address and registered memory as JSON.

        A peer needs this metadata to connect.
        """

    @abstractmethod
    def connect(self, metadata: bytes, *, timeout_s: float = 10.0) -> str:
        """Connect to the peer that created `metadata`.

        If a connection opened by either side already exists, it is replaced only if the peer was
        restarted. Both sides may call this method at the same time.

        Args:
            metadata: The peer's `metadata`.
            timeout_s: Maximum time to wait, in seconds.

        Returns:
            The peer's name.

        Raises:
            ValueError: The metadata is malformed, is from another version or transport, or contains
                the name of another live peer.
            ConnectionError: The peer could not be reached in time, or refused the connection.
        """

    def read(
        self,
        peer: str,
        local: np.ndarray,
        remote: np.ndarray,
        length: np.ndarray,
        *,
        notify: bytes = b"",
        timeout_s: float | None = None,
    ) -> Transfer:
        """Start copying the peer's memory into local memory, without waiting.

        Args:
            peer: Name of the peer.
            local: int64[n]. Local addresses.
            remote: int64[n]. Addresses in the peer's process.
            length: int64[n]. Length of each fragment in bytes.
            notify: Message that the peer receives after all bytes have been read.
            timeout_s: Maximum duration in seconds, after which the transfer fails. None: the
                transport's default.

        Returns:
            The transfer in flight.

        Raises:
            ValueError: The peer is unknown, memory is not registered, or local bytes would be
                written twice. Nothing was transferred.
            TransferError: The peer is no longer connected.
        """
        mine = Spans.of(local, length, "local")
        spans = joined(mine, mine.beside(remote, "remote"), self._borders(peer))
        return self._begin(peer, *spans, notify, timeout_s)

    def _borders(self, peer: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts of the local and remote registered regions, which end fragments."""
        return np.empty(0, np.int64), np.empty(0, np.int64)

    @abstractmethod
    def _begin(
        self, peer: str, local: Spans, remote: Spans, notify: bytes, timeout_s: float | None
    ) -> Transfer:
        """Start a read of matching spans, which `Spans.checked` has validated."""

    def read_spans(
        self,
        peer: str,
        local: Spans,
        remote: Spans,
        *,
        notify: bytes = b"",
        timeout_s: float | None = None,
    ) -> Transfer:
        """Start a `read` of factored fragments, whose sides have equal bases and run lengths."""
        check_match(local, remote)
        return self._begin(peer, local, remote, notify, timeout_s)

    @abstractmethod
    def send(self, peer: str, message: bytes) -> None:
        """Send a message, which the peer receives by calling `notifications`.

        Raises ValueError or TransferError.
        """

    @abstractmethod
    def notifications(self) -> list[tuple[str, bytes]]:
        """Return (peer, message) for all messages since the last call.

        Messages from the same peer are in the order in which they were sent.
        """

    @abstractmethod
    def peers(self) -> list[str]:
        """Return the names of all connected peers, including those that initiated the connection."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Disconnect a peer.

        Its transfers in flight fail. Raises ValueError if the peer was never connected.
        """

    @abstractmethod
    def close(self) -> None:
        """End all connections and threads, and stop listening.

        Waits until no thread accesses registered memory. Direct transfers by NIXL count as accesses;
        over TCP, they may not end while the peer hangs. Threads that only wait for a peer may end
        after this call. If called again, only waits.

        Raises:
            TimeoutError: A thread still accessed registered memory after the transport's timeout.
                Everything else was closed. The memory must stay alive until a later call returns.
        """
