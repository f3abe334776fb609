"""The interface of a transport: registered memory, peers, reads and writes with deadlines."""

from __future__ import annotations

import importlib.util
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcache.checks import seconds, shown
from kvcache.transfer.transport.spans import Spans, check_match, joined

if TYPE_CHECKING:
    from kvcache.worker.pages.pages import Pages

TRANSPORTS = ("nixl", "gloo")  # in the order in which they are chosen


class TransferError(RuntimeError):
    """A transfer that failed or was given up; the message says why."""


class Transfer(ABC):
    """A read or a write under way.

    peer: whose memory it touches. num_bytes: of all fragments. A transfer ends by itself: it is done, or
    it fails, at the latest `timeout_s` after it began.
    """

    peer: str
    num_bytes: int

    @abstractmethod
    def poll(self) -> bool:
        """Whether all bytes have moved. TransferError where the transfer has failed."""

    @abstractmethod
    def cancel(self, reason: str) -> None:
        """Gives a transfer up that is under way; `poll` raises then. No effect once it has ended.

        Others of the same peer go on. A peer that does not let go of it in time is disconnected.
        """

    @property
    @abstractmethod
    def is_released(self) -> bool:
        """Whether the transport no longer writes to local memory for this transfer, nor reads from it.

        Of a transfer that failed it may become true later than the failure. Until then its pages must
        not be used again.
        """

    @abstractmethod
    def _wait_for_end(self, timeout_s: float) -> None:
        """Returns once the transfer has ended, or after some of `timeout_s` at the latest."""

    def wait(self, timeout_s: float) -> None:
        """Waits until all bytes have moved.

        TransferError where the transfer fails, or is not done within `timeout_s` seconds: then it is
        given up.
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

    One thread at a time may call it, and any thread `connect`. Reads and writes of peers are answered by
    threads of its own, also while the calling thread is busy, until `close`.

    Transfers are not ordered with the caller's CUDA streams. On both sides, work that accesses the memory
    must have finished before a transfer begins. Work launched after the transfer is done, on any stream,
    sees its bytes.

    name: "gloo" or "nixl". agent: this side's name, by which peers know it.

    >>> from kvcache.transfer.transport.base import make_transport
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
        """Adds memory that reads and writes of both sides may touch.

        memory: the pages of a pool, or (address, bytes) of host memory. The caller keeps it alive until
        `close`. Peers learn of it with `metadata`, so register before that. Memory that is registered
        already may come again; a fragment lies in one region, so that it does not go over the border of
        two calls, nor over the end of an allocation of pages. ValueError, and nothing is added, for no
        bytes and for memory that is registered as of another device. RuntimeError where NIXL cannot share
        it.
        """

    @abstractmethod
    def metadata(self) -> bytes:
        """What a peer needs to connect, as JSON: version, agent, address, registered memory."""

    @abstractmethod
    def connect(self, metadata: bytes, *, timeout_s: float = 10.0) -> str:
        """Connects to the peer that made `metadata`, and returns its name.

        A peer that is connected already, by either side, is not connected anew; one that was started
        again is. Both sides may call at the same time. ValueError for metadata that is malformed, of
        another version or transport, or of a name that another live peer has; ConnectionError where the
        peer is not reached within `timeout_s` or refuses.
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
        """Copies bytes of the peer's memory into local memory; returns at once.

        local, remote: int64[n] addresses, those of the peer as in its metadata. length: int64[n] bytes.
        notify: a message that the peer gets once all bytes were read. timeout_s: by when the transfer is
        done or fails; None: the transport's. ValueError, and nothing moves, for an unknown peer,
        memory that is not registered, or local bytes that are written twice; TransferError for a peer
        that is no longer connected.
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
        """Copies bytes of local memory into the peer's; as `read`, with `notify` once all have landed."""
        spans = self._joined(peer, local, remote, length)
        return self._begin("push", peer, *spans, notify, timeout_s)

    def _joined(
        self, peer: str, local: np.ndarray, remote: np.ndarray, length: np.ndarray
    ) -> tuple[Spans, Spans]:
        mine = Spans.of(local, length, "local")
        return joined(mine, mine.beside(remote, "remote"), self._borders(peer))

    def _borders(self, peer: str) -> tuple[np.ndarray, np.ndarray]:
        """Where registered regions begin, local and remote ones: fragments are not joined over that."""
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
        """Begins a transfer, "pull" or "push", of spans that are `checked` and match."""

    def read_spans(
        self,
        peer: str,
        local: Spans,
        remote: Spans,
        *,
        notify: bytes = b"",
        timeout_s: float | None = None,
    ) -> Transfer:
        """`read` of factored fragments: both sides have as many bases, and runs of the same lengths."""
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
        """`write` of factored fragments."""
        check_match(local, remote)
        return self._begin("push", peer, local, remote, notify, timeout_s)

    @abstractmethod
    def send(self, peer: str, message: bytes) -> None:
        """Sends a message, which `notifications` of the peer returns. ValueError or TransferError."""

    @abstractmethod
    def notifications(self) -> list[tuple[str, bytes]]:
        """The messages (peer, message) that have come since the last call, in the order of each peer."""

    @abstractmethod
    def peers(self) -> list[str]:
        """The names of connected peers, also of those that connected themselves."""

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Ends the connection; transfers under way fail. ValueError for a peer that never connected."""

    @abstractmethod
    def close(self) -> None:
        """Ends all connections and threads, and stops listening. A second call does nothing."""


def make_transport(
    agent: str,
    name: str | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    **options: object,
) -> Transport:
    """A transport that listens at `host` and `port` (0: any free one).

    agent: its name among its peers, unique. name: "nixl" or "gloo"; None: NIXL where it is installed,
    else gloo. options: `secret` (bytes that both sides must have), `timeout_s` of a transfer (30),
    `piece_bytes` of staging memory (8 MiB; a connection has eight pieces), `digest` (False; True: what
    arrives is compared with a digest of what was sent, and a transfer fails where it differs),
    `advertise` (the address that peers are told; None: host. Needed where host is every address),
    `accepts_writes` (True; False: writes of peers are refused. Over NIXL all bytes go through staging
    memory then, as with `direct_bytes=None`: a peer could write to registered pages unasked), and over
    NIXL `direct_bytes` ("auto": fragments of as many bytes are not packed; see docs/transports.md).
    ValueError or TypeError for other options, ImportError where NIXL is named and not installed, OSError
    where the address is taken.
    """
    if name is None:
        name = "nixl" if importlib.util.find_spec("nixl") else "gloo"
    if not isinstance(name, str) or name not in TRANSPORTS:
        raise ValueError(f"name is {shown(name)}: expected one of {', '.join(TRANSPORTS)}, or None")
    if name == "nixl":
        from kvcache.transfer.transport.nixl import NixlTransport as Chosen
    else:
        from kvcache.transfer.transport.gloo import GlooTransport as Chosen
    return Chosen(agent, host=host, port=port, **options)
