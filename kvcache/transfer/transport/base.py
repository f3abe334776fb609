# SPDX-License-Identifier: Apache-2.0
"""The transport interface, with registered memory, peers, and reads and writes with deadlines."""

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
    """A read or write in flight.

    Every transfer ends. It either completes, or fails no later than `timeout_s` after its start.

    Attributes:
        peer: The peer whose memory is accessed.
        num_bytes: Bytes of all fragments.
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

        Other transfers with the peer continue. If the peer does not release the transfer in time,
        it is disconnected.

        Args:
            reason: Reason, for the error message.
        """

    @property
    @abstractmethod
    def is_released(self) -> bool:
        """Whether the transport no longer accesses local memory for this transfer.

        After a failure, this may become true later. Until then, the transfer's pages must not be reused.
        """

    @abstractmethod
    def _wait_for_end(self, timeout_s: float) -> None:
        """Return once the transfer has ended, or after at most `timeout_s`."""

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
                self.cancel(f"not done within {timeout_s:g} s")
                continue  # `poll` raises
            self._wait_for_end(left)


class Transport(ABC):
    """Moves bytes between registered memory of this process and of its peers.

    Only one thread at a time may call a transport, except for `connect`, which any thread may call. Until
    `close`, the transport's own threads serve reads and writes of peers, even while the calling thread is
    busy.

    Transfers are not ordered with the caller's CUDA streams. On both sides, work that accesses the memory
    must have finished before a transfer starts. Work launched on any stream after the transfer has
    completed sees its bytes.

    Attributes:
        name: "gloo" or "nixl".
        agent: The name of this side, as known to peers.

    Example:
        >>> from kvcache.transfer.transport.factory import make_transport
        >>> a, b = make_transport("a", "gloo"), make_transport("b", "gloo")
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
        """Register memory that reads and writes of both sides may access.

        Register memory before calling `metadata`, which reports it to peers. Registering memory again is
        allowed. A fragment must lie in a single region. It must not cross the boundary between the
        memory of two calls, or the end of an allocation of pages.

        Args:
            memory: The pages of a pool, or (address, bytes) of host memory. The caller must keep the
                memory alive until `close`.

        Raises:
            ValueError: A size is zero, or the memory is registered under another device. Nothing was
                registered.
            RuntimeError: NIXL cannot share the memory.
        """

    @abstractmethod
    def unregister(self, memory: Pages | Sequence[tuple[int, int]]) -> None:
        """Withdraw registered memory, which may then be freed or remapped.

        All peers are disconnected, and transfers in flight fail. Peers that connect again can access only
        the other memory. After the memory is registered again, `metadata` is as before, and peers that
        connect from then on can access all of it.

        Args:
            memory: The argument of an earlier `register`.

        Raises:
            TimeoutError: A copy of the memory was still running after the transport's timeout.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """Return the version, agent, address and registered memory as JSON.

        A peer needs them to connect.
        """

    @abstractmethod
    def connect(self, metadata: bytes, *, timeout_s: float = 10.0) -> str:
        """Connect to the peer that created `metadata`.

        If the peer is already connected, from either side, it is reconnected only if it was
        restarted. Both sides may call this method at the same time.

        Args:
            metadata: The peer's `metadata`.
            timeout_s: Maximum time to wait, in seconds.

        Returns:
            The peer's name.

        Raises:
            ValueError: The metadata is malformed, belongs to another version or transport, or has
                the name of another live peer.
            ConnectionError: The peer was not reached in time or refused the connection.
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
            timeout_s: Deadline in seconds, after which the transfer fails. None: the transport's default.

        Returns:
            The transfer in flight.

        Raises:
            ValueError: The peer is unknown, memory is not registered, or local bytes are written twice.
                Nothing has moved.
            TransferError: The peer is no longer connected.
        """
        spans = self._joined(peer, local, remote, length)
        return self._begin("pull", peer, *spans, notify, timeout_s)

    def write(
        self,
        peer: str,
        local: np.ndarray,
        remote: np.ndarray,
        length: np.ndarray,
        *,
        notify: bytes = b"",
        timeout_s: float | None = None,
    ) -> Transfer:
        """Start copying local memory into the peer's memory. See `read`.

        `notify` is delivered after all bytes have arrived.
        """
        spans = self._joined(peer, local, remote, length)
        return self._begin("push", peer, *spans, notify, timeout_s)

    def _joined(
        self, peer: str, local: np.ndarray, remote: np.ndarray, length: np.ndarray
    ) -> tuple[Spans, Spans]:
        mine = Spans.of(local, length, "local")
        return joined(mine, mine.beside(remote, "remote"), self._borders(peer))

    def _borders(self, peer: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the starts of the local and remote registered regions.

        Fragments are not joined across them.
        """
        return np.empty(0, np.int64), np.empty(0, np.int64)

    @abstractmethod
    def _begin(
        self,
        kind: str,
        peer: str,
        local: Spans,
        remote: Spans,
        notify: bytes,
        timeout_s: float | None,
    ) -> Transfer:
        """Start a transfer, "pull" or "push", of matching spans.

        The spans have passed `Spans.checked`.
        """

    def read_spans(
        self,
        peer: str,
        local: Spans,
        remote: Spans,
        *,
        notify: bytes = b"",
        timeout_s: float | None = None,
    ) -> Transfer:
        """Start a `read` of factored fragments, with equal numbers of bases and equal run lengths."""
        check_match(local, remote)
        return self._begin("pull", peer, local, remote, notify, timeout_s)

    def write_spans(
        self,
        peer: str,
        local: Spans,
        remote: Spans,
        *,
        notify: bytes = b"",
        timeout_s: float | None = None,
    ) -> Transfer:
        """Start a `write` of factored fragments. See `read_spans`."""
        check_match(local, remote)
        return self._begin("push", peer, local, remote, notify, timeout_s)

    @abstractmethod
    def send(self, peer: str, message: bytes) -> None:
        """Send a message, which the peer's `notifications` returns.

        Raises ValueError or TransferError.
        """

    @abstractmethod
    def notifications(self) -> list[tuple[str, bytes]]:
        """Return (peer, message) for all messages since the last call.

        Messages of a peer are in order.
        """

    @abstractmethod
    def peers(self) -> list[str]:
        """Return the names of connected peers, including peers that initiated the connection."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Disconnect a peer.

        Its transfers in flight fail. Raises ValueError if the peer never connected.
        """

    @abstractmethod
    def close(self) -> None:
        """End all connections and threads, and stop listening. Later calls have no effect."""
