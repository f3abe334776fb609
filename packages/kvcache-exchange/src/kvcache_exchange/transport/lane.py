# SPDX-License-Identifier: Apache-2.0
"""Moves packed bytes between two peers in both directions, piece by piece."""

from __future__ import annotations

import mmap
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from kvcache.checks import shown
from kvcache.transfer import Spans
from kvcache.worker.pages.pinning import pin
from kvcache_exchange.transport.digest import digest_of, digest_of_answer
from kvcache_exchange.transport.registered import CopyStreams, RegisteredMemory

# Minimum size in bytes of the pieces of a short job. Each piece has a fixed cost that equals the cost of
# copying 1 MiB.
_LEAST_PART = 1 << 20
PIECES_AHEAD = 4  # number of slots, which is the maximum number of pieces ahead of the receiver

# Waits until a piece was sent, for at most the given seconds, and then announces it to the peer. An
# exception means that the piece never arrives.
Announce = Callable[[float], None]


def nothing_to_wait_for(timeout_s: float) -> None:
    """Do nothing, because the piece was announced when it was sent."""


class PieceStaging:
    """Zero-initialized memory for pieces, uint8[num_pieces, piece_bytes].

    If a device is given, the memory is pinned for this device until it is freed.
    """

    def __init__(self, num_pieces: int, piece_bytes: int, device: torch.device | None) -> None:
        self.mapped = mmap.mmap(-1, num_pieces * piece_bytes)
        memory = torch.frombuffer(self.mapped, dtype=torch.uint8)
        self.pieces = memory.view(num_pieces, piece_bytes)
        self._pin = None if device is None else pin(memory, self.mapped, device, memory.numel())

    @property
    def is_pinned(self) -> bool:
        """Whether CUDA kernels can access the memory."""
        return self._pin is not None


class Lane(ABC):
    """Moves pieces from the slots of one side's staging memory to the same slots of the other side.

    A slot is used again only after the receiver has copied its piece.

    Attributes:
        outgoing, incoming: The slots, uint8[PIECES_AHEAD, piece_bytes]. If a transfer is canceled,
            the peer may receive the previous content of these slots.
        staging: The memory that contains the slots, or None once the lane has let go of it.
        threads: The threads that end with the lane. Until then, they may access registered memory.
    """

    threads: Sequence[threading.Thread] = ()

    def __init__(self, piece_bytes: int, memory: RegisteredMemory) -> None:
        # Pinning takes longer than a short transfer, so it is done when the connection opens. Memory
        # that is not pinned costs nothing until it is used.
        staging = PieceStaging(2 * PIECES_AHEAD, piece_bytes, memory.cuda_device)
        self.staging: PieceStaging | None = staging
        self.outgoing, self.incoming = staging.pieces.view(2, PIECES_AHEAD, piece_bytes)

    @abstractmethod
    def send(self, slot: int, header: dict) -> Announce:
        """Start sending a slot's first `header["bytes"]` bytes, which `header` announces."""

    @abstractmethod
    def receive(self, slot: int, num_bytes: int) -> None:
        """Receive a piece that was just announced. Called by the thread that reads frames."""

    @abstractmethod
    def close(self) -> None:
        """Close the lane. Pieces in flight fail no later than their deadline."""


class Job:
    """A job that sends or receives fragments of local memory, piece by piece.

    After `stop`, the job no longer accesses local memory once `is_idle` is True. Pieces that still
    arrive are dropped.

    Args:
        spans: The fragments.
        number: ID of the transfer.
        piece_bytes: Maximum size of a piece.
        on_done: Called after all pieces have been received, by the thread that copied them.
        request: Digest of the request, if digests are enabled.
    """

    def __init__(
        self,
        spans: Spans,
        number: int,
        piece_bytes: int,
        on_done: Callable[[], None] = lambda: None,
        request: str = "",
    ) -> None:
        self.number, self.on_done, self._request = number, on_done, request
        # The pieces, which are the same on both sides. Short jobs are also split, so that one piece
        # is gathered or scattered while another piece is in flight.
        part = -(-spans.num_bytes // PIECES_AHEAD)
        self.tiles = spans.tiles(min(piece_bytes, max(part, _LEAST_PART)))
        self.bytes_left = spans.num_bytes  # not yet received
        self._piece = 0  # number of the next piece that is digested
        self._copying = threading.Lock()
        self.is_stopped = False
        self.is_spoiled = False  # whether the received bytes differ from the sent bytes

    def stop(self) -> None:
        """Prevent the job from starting further copies."""
        self.is_stopped = True

    @property
    def is_idle(self) -> bool:
        """Whether none of the job's copies is running."""
        return not self._copying.locked()

    def copy(self, run: Callable[[], None]) -> bool:
        """Run a copy unless the job was stopped. Returns whether it ran."""
        with self._copying:
            if self.is_stopped:
                return False
            run()
            return True

    def next_digest(self, piece: torch.Tensor) -> str:
        """Compute the digest of the next piece."""
        self._piece += 1
        return digest_of_answer(self._request, self._piece - 1, digest_of(piece))

    def check(self, piece: torch.Tensor, told: object) -> None:
        """Verify the digest of the next piece, and stop the job on a mismatch."""
        if self.next_digest(piece) != told and not self.is_stopped:
            self.is_spoiled = True
            self.stop()


class Flow(ABC):
    """One direction of a lane. Its thread runs jobs in order.

    Args:
        say: Sends a frame with the given op and values to the peer.
        timeout_s: Maximum time to wait for the peer per piece, in seconds.
    """

    def __init__(
        self,
        lane: Lane,
        memory: RegisteredMemory,
        on_failure: Callable[[str], None],
        say: Callable[..., None],
        timeout_s: float,
        *,
        has_digest: bool,
        name: str,
    ) -> None:
        self._lane, self._memory, self._timeout_s = lane, memory, timeout_s
        self._on_failure, self._say, self._has_digest = on_failure, say, has_digest
        self._kept = lane.staging  # stays pinned while copies may be running
        self._streams = CopyStreams()
        self._streams.staging_is_pinned = self._kept is not None and self._kept.is_pinned
        self._work: queue.SimpleQueue[tuple | None] = queue.SimpleQueue()
        self._current: Job | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        self._num_begun = self._num_taken = (
            0  # pieces sent, and pieces that the receiver has copied
        )
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @property
    def is_copying(self) -> bool:
        """Whether the thread accesses registered memory. Once False after `close`, it stays False."""
        job = self._current
        return job is not None and not job.is_idle

    def close(self) -> None:
        """Stop the thread. The current job's remaining pieces are not copied."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if (job := self._current) is not None:
            job.stop()
        self._work.put(None)

    def _run(self) -> None:
        try:
            while (work := self._work.get()) is not None:
                self._current = work[0]
                if self._is_closed:
                    return
                self._memory.enter_device()
                self._do(*work)
                self._current = None
        except Exception as error:  # raised by the lane if the peer is gone or does not answer
            self._on_failure(f"{type(error).__name__}: {error}")
        finally:
            self._streams.close()
            self._kept = None

    @abstractmethod
    def _do(self, job: Job, *values: object) -> None:
        """Do the work of a queue entry."""


class Outgoing(Flow):
    """Sends jobs. While a piece is in flight, the next piece is gathered."""

    def put(self, job: Job) -> None:
        """Queue a job."""
        self._work.put((job,))

    def taken(self) -> None:
        """Record that the peer has copied a piece. Raises ValueError if no piece is in flight."""
        with self._changed:
            if self._num_taken == self._num_begun:
                raise ValueError("a piece was taken: expected a piece in flight")
            self._num_taken += 1
            self._changed.notify_all()

    def _do(self, job: Job) -> None:
        announce: Announce = nothing_to_wait_for
        for tile in job.tiles:
            slot = self._next_slot()
            if self._is_closed:
                return
            piece = self._lane.outgoing[slot, : tile.num_bytes]
            if not job.copy(lambda t=tile, p=piece: self._memory.gather(t, p, self._streams)):
                announce(self._timeout_s)
                self._say("end", id=job.number)
                return
            header = {"op": "piece", "id": job.number, "bytes": tile.num_bytes}
            if self._has_digest:
                header["digest"] = job.next_digest(piece)
            announce(self._timeout_s)
            self._num_begun += 1
            announce = self._lane.send(slot, header)
        announce(self._timeout_s)

    def _next_slot(self) -> int:
        """Wait until the next slot is free."""

        def is_free() -> bool:
            return self._is_closed or self._num_begun - self._num_taken < PIECES_AHEAD

        with self._changed:
            if not self._changed.wait_for(is_free, self._timeout_s):
                raise TimeoutError("the peer did not make room in time")
        return self._num_begun % PIECES_AHEAD


class Incoming(Flow):
    """Copies received pieces to their jobs' fragments."""

    def receive(self, job: Job, header: dict) -> None:
        """Receive the next piece of a job. Called by the thread that reads frames.

        Raises ValueError if the piece has another size, or if no slot is free.
        """
        tile, size = next(job.tiles, None), header.get("bytes")
        if tile is None or size != tile.num_bytes:
            expected = "no further piece" if tile is None else tile.num_bytes
            raise ValueError(f"a piece announces {shown(size)} bytes: expected {expected}")
        if self._num_begun - self._num_taken == PIECES_AHEAD:
            raise ValueError(f"a piece has no slot: expected at most {PIECES_AHEAD} pieces")
        slot = self._num_begun % PIECES_AHEAD
        self._lane.receive(slot, tile.num_bytes)
        self._num_begun += 1
        self._work.put((job, tile, slot, header.get("digest")))

    def end(self, job: Job) -> None:
        """Record that the sender has canceled the job: no further piece arrives."""
        self._work.put((job, None, 0, None))

    def _do(self, job: Job, tile: Spans | None, slot: int, told: object) -> None:
        if tile is None:
            job.stop()
            job.on_done()
            return
        piece = self._lane.incoming[slot, : tile.num_bytes]
        if self._has_digest:
            job.check(piece, told)
        job.copy(lambda: self._memory.scatter(piece, tile, self._streams))
        job.bytes_left -= tile.num_bytes
        self._num_taken += 1
        self._say("taken")
        if not job.bytes_left and not self._is_closed:
            job.on_done()
