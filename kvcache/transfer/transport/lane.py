"""The two directions in which packed bytes flow between two peers, piece by piece."""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from kvcache.transfer.transport.registered import RegisteredMemory
from kvcache.transfer.transport.spans import Spans


class PieceWork(Protocol):
    """A piece under way."""

    def wait(self, timeout_s: float) -> None:
        """Waits until the piece has arrived, or may be overwritten. Any exception: it never will."""


class Lane(ABC):
    """Moves pieces of staging memory to and from one peer; pieces of one tag arrive in order.

    threads: those that end with the lane.
    """

    threads: Sequence[threading.Thread] = ()

    @abstractmethod
    def staging(self, *, is_outgoing: bool) -> list[torch.Tensor]:
        """Host memory of two pieces that are sent, or received: uint8[piece_bytes] each."""

    @abstractmethod
    def send(self, piece: torch.Tensor, tag: int) -> PieceWork:
        """Begins to send a piece."""

    @abstractmethod
    def receive(self, piece: torch.Tensor, tag: int) -> PieceWork:
        """Begins to receive a piece, which has as many bytes as the one that is sent."""

    @abstractmethod
    def close(self) -> None:
        """Ends the lane; pieces under way fail, at the latest when their time is over."""


class Job:
    """Fragments of local memory that are sent or received.

    tag: that of its pieces. on_done is called once all bytes have moved, by the thread that moved them.
    timeout_s: of each piece. Once `stop` was called, memory is touched no more when `is_idle`.
    """

    def __init__(
        self, spans: Spans, tag: int, timeout_s: float, on_done: Callable[[], None]
    ) -> None:
        self.spans, self.tag, self.timeout_s, self.on_done = spans, tag, timeout_s, on_done
        self._lock = threading.Lock()
        self._stopped = False

    def stop(self) -> None:
        """No further copy begins."""
        self._stopped = True

    @property
    def is_idle(self) -> bool:
        """Whether no copy is under way."""
        return not self._lock.locked()

    def copy(self, run: Callable[[], None]) -> bool:
        """Runs a copy, unless the job was stopped. Whether it ran."""
        with self._lock:
            if self._stopped:
                return False
            run()
            return True


class Flow:
    """One direction of a lane: a thread that moves jobs one after the other, two pieces at a time.

    While one piece is under way, the other one is gathered or scattered.
    """

    def __init__(
        self,
        lane: Lane,
        memory: RegisteredMemory,
        piece_bytes: int,
        on_failure: Callable[[str], None],
        *,
        is_outgoing: bool,
        name: str,
    ) -> None:
        self._lane, self._memory, self._piece_bytes = lane, memory, piece_bytes
        self._on_failure, self._is_outgoing = on_failure, is_outgoing
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._staging: list[torch.Tensor] = []
        self._current: Job | None = None
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, job: Job) -> None:
        """Queues a job."""
        self._jobs.put(job)

    def close(self) -> None:
        """The thread ends; of the job that it is at no further piece is copied."""
        self._is_closed = True
        if (job := self._current) is not None:
            job.stop()
        self._jobs.put(None)

    @property
    def is_idle(self) -> bool:
        """Whether no copy is under way."""
        return self._current is None or self._current.is_idle

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                self._current = job
                if self._is_closed:
                    return
                if not self._staging:
                    self._staging = self._lane.staging(is_outgoing=self._is_outgoing)
                if not (self._send(job) if self._is_outgoing else self._receive(job)):
                    return
                job.on_done()
                self._current = None
        except Exception as error:  # of the lane: the peer is gone, or does not answer
            self._on_failure(f"{type(error).__name__}: {error}")

    def _send(self, job: Job) -> bool:
        works: list[PieceWork | None] = [None, None]
        for number, tile in enumerate(job.spans.tiles(self._piece_bytes)):
            slot = number % 2
            if (work := works[slot]) is not None:
                work.wait(job.timeout_s)
            piece = self._staging[slot][: tile.num_bytes]
            if not job.copy(lambda tile=tile, piece=piece: self._memory.gather(tile, piece)):
                return False
            works[slot] = self._lane.send(piece, job.tag)
        for work in works:
            if work is not None:
                work.wait(job.timeout_s)
        return True

    def _receive(self, job: Job) -> bool:
        under_way: list[tuple[Spans, torch.Tensor, PieceWork]] = []
        tiles = enumerate(job.spans.tiles(self._piece_bytes))

        def begin() -> None:
            if (following := next(tiles, None)) is not None:
                number, tile = following
                piece = self._staging[number % 2][: tile.num_bytes]
                under_way.append((tile, piece, self._lane.receive(piece, job.tag)))

        begin()
        begin()
        while under_way:
            tile, piece, work = under_way.pop(0)
            work.wait(job.timeout_s)
            if not job.copy(lambda tile=tile, piece=piece: self._memory.scatter(piece, tile)):
                return False
            begin()
        return True
