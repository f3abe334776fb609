# SPDX-License-Identifier: Apache-2.0
"""Moves packed bytes between two peers in both directions, piece by piece."""

from __future__ import annotations

import mmap
import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from kvcache.transfer import Spans
from kvcache.worker.pages.pinning import pin
from kvcache_exchange.transport.digest import digest_of, digest_of_answer
from kvcache_exchange.transport.registered import CopyStreams, RegisteredMemory

# Minimum size in bytes of the pieces of a short job. Each piece has a fixed cost that equals the cost of
# copying 1 MiB.
_LEAST_PART = 1 << 20
PIECES_AHEAD = 4  # maximum number of staged pieces, and of pieces announced to the other side


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


class PieceWork(Protocol):
    """A piece in flight."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the piece has arrived or may be overwritten.

        An exception means that neither will ever happen.
        """


class Lane(ABC):
    """Moves pieces of staging memory to and from one peer. Pieces with equal tags arrive in order.

    Attributes:
        threads: The threads that end with the lane. Until then, they may access registered memory.
    """

    threads: Sequence[threading.Thread] = ()

    @abstractmethod
    def staging(self, *, is_outgoing: bool) -> tuple[Sequence[torch.Tensor], PieceStaging]:
        """Return the pieces to send or receive, and the memory that contains them.

        If a transfer is canceled, the peer may receive the previous content of these pieces.
        """

    @abstractmethod
    def send(self, piece: torch.Tensor, tag: int) -> PieceWork:
        """Start sending a piece."""

    @abstractmethod
    def receive(self, piece: torch.Tensor, tag: int) -> PieceWork:
        """Start receiving a piece. It must have the size of the sent piece."""

    @abstractmethod
    def close(self) -> None:
        """Close the lane. Pieces in flight fail no later than their deadline."""


class Job:
    """A job that sends or receives fragments of local memory, piece by piece.

    After `stop`, the job no longer accesses local memory once `is_idle` is True. Pieces that the
    other side expects are still sent or received, but only to or from staging memory.

    Args:
        spans: The fragments.
        tag: Tag that all of the job's pieces carry.
        timeout_s: Maximum time per piece, in seconds.
        on_done: Called after all pieces have moved, by the thread that moved them.
        request: Digest of the request, if digests are enabled.
    """

    def __init__(
        self,
        spans: Spans,
        tag: int,
        timeout_s: float,
        on_done: Callable[[], None],
        request: str = "",
    ) -> None:
        self.request = request
        self.spans, self.tag, self.timeout_s, self.on_done = spans, tag, timeout_s, on_done
        self._copying = threading.Lock()
        self._changed = threading.Condition()
        self._stopped = False
        self._is_over = False  # whether all pieces have been announced
        self.num_promised = PIECES_AHEAD
        self._digests: deque[str] = deque()  # digests of pieces that were not checked yet
        self._num_digests = 0
        self.is_spoiled = False  # whether the received bytes differ from the sent bytes

    def stop(self) -> None:
        """Prevent the job from starting further copies."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    @property
    def is_idle(self) -> bool:
        """Whether none of the job's copies is running."""
        return not self._copying.locked()

    def copy(self, run: Callable[[], None]) -> bool:
        """Run a copy unless the job was stopped. Returns whether it ran."""
        with self._copying:
            if self._stopped:
                return False
            run()
            return True

    # Methods that track the pieces that the sender has announced.

    def promise(self) -> None:
        """Record that the sender has announced another piece."""
        with self._changed:
            self.num_promised += 1
            self._changed.notify_all()

    def end(self) -> None:
        """Record that no more pieces will arrive, or that no piece is expected."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def is_promised(self, number: int) -> bool:
        """Wait until the sender has announced whether another piece follows, and return the answer.

        Raises TimeoutError if the sender does not announce it in time.
        """

        def is_known() -> bool:
            return number < self.num_promised or self._is_over

        with self._changed:
            if not self._changed.wait_for(is_known, self.timeout_s):
                raise TimeoutError(
                    "the peer did not announce in time whether another piece follows"
                )
            return number < self.num_promised

    def digest_of(self, number: int, piece: torch.Tensor) -> str:
        """Compute the digest of the piece with this number."""
        return digest_of_answer(self.request, number, digest_of(piece))

    def put_digest(self, digest: str) -> None:
        """Record the next piece's digest.

        Raises ValueError if there are more digests than announced pieces.
        """
        with self._changed:
            if self._num_digests >= self.num_promised:
                raise ValueError("unexpected digest: expected the digest of an announced piece")
            self._num_digests += 1
            self._digests.append(digest)
            self._changed.notify_all()

    def check(self, number: int, piece: torch.Tensor) -> None:
        """Verify the digest of the piece with this number, and stop the job on a mismatch."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._digests or self._stopped, self.timeout_s):
                raise TimeoutError("the peer did not send a digest in time")
            told = self._digests.popleft() if self._digests else None
        if not self._stopped and told != self.digest_of(number, piece):
            self.is_spoiled = True
            self.stop()


class Flow:
    """One direction of a lane. Its thread runs jobs in order, with a few pieces in flight at a time.

    While some pieces are in flight, the next piece is gathered or scattered. `say` notifies the
    other side that a job has another piece ("more") or no more pieces ("end") and, with
    `has_digest`, sends each piece's digest ("digest").
    """

    def __init__(
        self,
        lane: Lane,
        memory: RegisteredMemory,
        piece_bytes: int,
        on_failure: Callable[[str], None],
        say: Callable[..., None],
        *,
        is_outgoing: bool,
        has_digest: bool,
        name: str,
    ) -> None:
        self._lane, self._memory, self._piece_bytes = lane, memory, piece_bytes
        self._on_failure, self._say = on_failure, say
        self._is_outgoing, self._has_digest = is_outgoing, has_digest
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._staging: Sequence[torch.Tensor] = ()
        self._kept: PieceStaging | None = None  # stays pinned while copies may be running
        self._streams = CopyStreams()
        self._current: Job | None = None
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, job: Job) -> None:
        """Queue a job."""
        self._jobs.put(job)

    @property
    def is_copying(self) -> bool:
        """Whether the thread accesses registered memory. Once False after `close`, it stays False."""
        job = self._current
        return job is not None and not job.is_idle

    def close(self) -> None:
        """Stop the thread. The current job's remaining pieces are not copied."""
        self._is_closed = True
        if (job := self._current) is not None:
            job.stop()
            job.end()
        self._jobs.put(None)

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._current = job
                if self._is_closed:
                    return
                self._memory.enter_device()
                if self._kept is None:
                    self._staging, self._kept = self._lane.staging(is_outgoing=self._is_outgoing)
                    self._streams.staging_is_pinned = self._kept.is_pinned
                (self._send if self._is_outgoing else self._receive)(job)
                if self._is_closed:
                    return
                job.on_done()
                self._current = None
        except Exception as error:  # raised by the lane if the peer is gone or does not answer
            self._on_failure(f"{type(error).__name__}: {error}")
        finally:
            self._streams.close()
            self._staging, self._kept = (), None

    def _tiles(self, job: Job) -> Iterator[Spans]:
        """Yield a job's pieces, which are the same on both sides.

        Short jobs are also split, so that one piece is gathered or scattered while another piece is
        in flight.
        """
        part = -(-job.spans.num_bytes // PIECES_AHEAD)
        return job.spans.tiles(min(self._piece_bytes, max(part, _LEAST_PART)))

    def _gather(self, tile: Spans, piece: torch.Tensor) -> None:
        self._memory.gather(tile, piece, self._streams)

    def _scatter(self, piece: torch.Tensor, tile: Spans) -> None:
        self._memory.scatter(piece, tile, self._streams)

    def _send(self, job: Job) -> None:
        # Pieces are started in the same order in which they are awaited.
        under_way: deque[PieceWork] = deque()
        tiles = _with_more(self._tiles(job))
        for number, (tile, has_more) in enumerate(tiles):
            if len(under_way) == PIECES_AHEAD:
                under_way.popleft().wait(job.timeout_s)
            piece = self._staging[number % PIECES_AHEAD][: tile.num_bytes]
            if job.copy(lambda tile=tile, piece=piece: self._gather(tile, piece)):
                if has_more:
                    job.promise()
                    self._say("more", job)
                if self._has_digest:
                    self._say("digest", job, digest=job.digest_of(number, piece))
            elif self._is_closed:
                return
            elif number == job.num_promised:
                self._say("end", job)
                break
            under_way.append(self._lane.send(piece, job.tag))
        while under_way:
            under_way.popleft().wait(job.timeout_s)

    def _receive(self, job: Job) -> None:
        under_way: deque[tuple[int, Spans, torch.Tensor, PieceWork]] = deque()
        tiles = self._tiles(job)
        tile, following = next(tiles, None), 0  # the next piece and its number

        def begin() -> None:
            nonlocal tile, following
            if tile is not None and job.is_promised(following) and not self._is_closed:
                piece = self._staging[following % PIECES_AHEAD][: tile.num_bytes]
                under_way.append((following, tile, piece, self._lane.receive(piece, job.tag)))
                tile, following = next(tiles, None), following + 1

        for _ in range(PIECES_AHEAD):
            begin()
        while under_way:
            number, to, piece, work = under_way.popleft()
            work.wait(job.timeout_s)
            if self._has_digest:
                job.check(number, piece)
            job.copy(lambda to=to, piece=piece: self._scatter(piece, to))
            begin()
        if tile is not None:
            job.stop()  # the sender has canceled the transfer


def _with_more(tiles: Iterator[Spans]) -> Iterator[tuple[Spans, bool]]:
    """Yield each tile together with a flag that is True if the job also has the tile `PIECES_AHEAD`
    positions later.
    """
    window: deque[Spans] = deque()
    for tile in tiles:
        window.append(tile)
        if len(window) > PIECES_AHEAD:
            yield window.popleft(), True
    for tile in window:
        yield tile, False
