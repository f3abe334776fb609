"""Transfers that NIXL moves directly between registered memory of two sides."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np

from kvcache.transfer.transport.connection import Connection, StagedTransfer
from kvcache.transfer.transport.nixl_agent import Agent, Handle
from kvcache.transfer.transport.spans import Spans

_MOST_DESCRIPTORS = 1 << 14  # of one list: 400 KiB
_RETRY_S = 0.05


class DirectTransfer(StagedTransfer):
    """A transfer without staging memory: NIXL reads and writes pages itself.

    kinds: NIXL's kind of memory and device, local and remote.
    """

    def __init__(
        self,
        connection: Connection,
        kind: str,
        local: Spans,
        remote: Spans,
        kinds: tuple[tuple[str, int], tuple[str, int]],
        notify: bytes,
        timeout_s: float,
    ) -> None:
        super().__init__(connection, local.num_bytes, timeout_s)
        self.operation = "READ" if kind == "pull" else "WRITE"
        self.spans, self.kinds, self.notify = (local, remote), kinds, notify
        self.number = connection.track(self, local, "direct", notify)
        self.is_touching = False  # set by the thread that moves it

    @property
    def is_released(self) -> bool:
        return self.has_ended and not self.is_touching


class DirectFlow:
    """A thread that begins transfers one after the other, and tells the peer when they are done."""

    def __init__(self, agent: Agent, connection: Connection) -> None:
        self._agent, self._connection = agent, connection
        self._transfers: queue.SimpleQueue[DirectTransfer | None] = queue.SimpleQueue()
        self.thread = threading.Thread(
            target=self._run, name=f"kvcache direct {connection.peer.agent}", daemon=True
        )
        self.thread.start()

    def put(self, transfer: DirectTransfer) -> None:
        """Queues a transfer."""
        self._transfers.put(transfer)

    def close(self) -> None:
        """The thread ends once NIXL has let go of local memory."""
        self._transfers.put(None)

    def _run(self) -> None:
        while (transfer := self._transfers.get()) is not None:
            try:
                transfer.is_touching = True
                if transfer.has_ended:
                    continue
                self._move(transfer)
            except Exception as error:  # NIXL's: the peer is gone, or does not answer
                self._connection.fail(f"{type(error).__name__}: {error}")
            finally:
                transfer.is_touching = False

    def _move(self, transfer: DirectTransfer) -> None:
        for tiles in zip(*(_lists(spans) for spans in transfer.spans)):
            sides = [(tile.addresses(), *kind) for tile, kind in zip(tiles, transfer.kinds)]
            length = np.tile(tiles[0].length, len(tiles[0].bases))
            handle = self._agent.begin(
                transfer.operation, self._connection.peer.incarnation, sides, length
            )
            try:
                handle.wait(transfer.deadline, lambda: transfer.has_ended)
            finally:
                self._let_go(handle)
        if transfer.notify:
            self._connection.put({"op": "message"}, transfer.notify)
        self._connection.untrack(transfer.number)
        transfer.finish()

    def _let_go(self, handle: Handle) -> None:
        """Waits until NIXL has, however long that takes: the pages are not used again before."""
        while not handle.release() and not handle.has_ended():
            time.sleep(_RETRY_S)


def _lists(spans: Spans) -> list[Spans]:
    """The spans in parts of at most `_MOST_DESCRIPTORS` fragments."""
    runs = max(1, min(len(spans.length), _MOST_DESCRIPTORS))
    bases = max(1, _MOST_DESCRIPTORS // runs)
    return [
        Spans(spans.bases[b : b + bases], spans.offsets[m : m + runs], spans.length[m : m + runs])
        for b in range(0, len(spans.bases), bases)
        for m in range(0, len(spans.length), runs)
    ]
