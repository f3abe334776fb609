# SPDX-License-Identifier: Apache-2.0
"""Transfers that NIXL performs directly between the two sides' registered memory."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

import numpy as np

from kvcache.transfer import Spans
from kvcache_exchange.transport.connection import Connection, StagedTransfer
from kvcache_exchange.transport.nixl_agent import Agent, Handle

_MOST_DESCRIPTORS = 1 << 14  # maximum number of descriptors per list; such a list takes 400 KiB
_RETRY_S = 0.05
# Packing fragments smaller than this is at least as fast as moving them directly. The first limit was
# measured in host memory. The second limit applies to CUDA memory within one machine, where a
# descriptor takes about 20 times as long with cuda_ipc (vllm-project/vllm#55434).
_DIRECT_BYTES, _DIRECT_BYTES_BESIDE = 8 << 10, 256 << 10


def least_direct_bytes(local_kind: str, remote_kind: str, *, is_beside: bool) -> int:
    """Return the minimum mean fragment size, in bytes, at which a transfer is not packed.

    Args:
        local_kind: NIXL's kind for the local memory, "DRAM" or "VRAM".
        remote_kind: The same for the peer's memory.
        is_beside: Whether the peer runs on the same machine.
    """
    on_device = "VRAM" in (local_kind, remote_kind)
    return _DIRECT_BYTES_BESIDE if on_device and is_beside else _DIRECT_BYTES


class DirectTransfer(StagedTransfer):
    """A read without staging memory, in which NIXL accesses pages directly.

    `kinds`: NIXL's memory kind and the device number, for the local and the remote side.
    """

    def __init__(
        self,
        connection: Connection,
        local: Spans,
        remote: Spans,
        kinds: tuple[tuple[str, int], tuple[str, int]],
        notify: bytes,
        timeout_s: float,
    ) -> None:
        super().__init__(connection, local.num_bytes, timeout_s)
        self.spans, self.kinds, self.notify = (local, remote), kinds, notify
        self.is_touching = False  # NIXL may access pages; set by the flow's thread
        connection.track(self, None, notify)

    def cancel(self, reason: str) -> None:
        self.fail(reason)  # only the thread that runs the transfer releases it

    @property
    def is_released(self) -> bool:
        return self.has_ended and not self.is_touching


class DirectFlow:
    """A thread that starts transfers in order, and notifies the peer when they have completed.

    After `close`, when NIXL has released all transfers, the thread removes the peer and calls
    `on_end`. If the peer were removed earlier, NIXL would report its transfers as ended but still
    continue them.
    """

    def __init__(
        self,
        agent: Agent,
        connection: Connection,
        enter_device: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self._agent, self._connection, self._on_end = agent, connection, on_end
        self._enter_device = enter_device
        self._transfers: queue.SimpleQueue[DirectTransfer | None] = queue.SimpleQueue()
        self._held: list[tuple[Handle, DirectTransfer]] = []  # transfers not yet released by NIXL
        self.thread = threading.Thread(
            target=self._run, name=f"kvcache direct {connection.peer.agent}", daemon=True
        )
        self.thread.start()

    def put(self, transfer: DirectTransfer) -> None:
        """Queue a transfer."""
        self._transfers.put(transfer)

    def close(self) -> None:
        """End the thread once NIXL no longer accesses local memory."""
        self._transfers.put(None)

    def _run(self) -> None:
        is_open = True
        while is_open or self._held:
            self._held = [each for each in self._held if not self._let_go(*each)]
            if not is_open:
                time.sleep(_RETRY_S)
                continue
            try:
                transfer = self._transfers.get(timeout=_RETRY_S if self._held else None)
            except queue.Empty:
                continue
            if transfer is None:
                is_open = False
                continue
            try:
                self._enter_device()
                self._move(transfer)
            except Exception as error:  # raised by NIXL if the peer is gone
                self._connection.fail(f"{type(error).__name__}: {error}")
            self._connection.untrack(transfer.number)
        self._agent.remove(self._connection.peer.incarnation)
        self._on_end()

    def _move(self, transfer: DirectTransfer) -> None:
        for tiles in zip(*(_lists(spans) for spans in transfer.spans)):
            sides = [(tile.addresses(), *kind) for tile, kind in zip(tiles, transfer.kinds)]
            length = np.tile(tiles[0].length, len(tiles[0].bases))
            transfer.is_touching = True
            if transfer.has_ended:
                transfer.is_touching = False
                return
            try:
                handle = self._agent.begin("READ", self._connection.peer.incarnation, sides, length)
            except BaseException:
                transfer.is_touching = False
                raise
            try:
                handle.wait(transfer.deadline, lambda: transfer.has_ended)
            except TimeoutError:
                transfer.fail(f"not finished within {transfer.timeout_s:g} s")
                return
            finally:
                if not self._let_go(handle, transfer):
                    self._held.append((handle, transfer))
        transfer.finish(
            lambda is_done: (
                self._connection.put({"op": "message"}, transfer.notify)
                if is_done and transfer.notify
                else None
            )
        )

    def _let_go(self, handle: Handle, transfer: DirectTransfer) -> bool:
        """Return whether NIXL has released the transfer. Until then, its pages must not be reused.

        A handle must not be released while NIXL still uses it, because NIXL would discard the
        handle but continue to write.
        """
        if not handle.has_ended():
            return False
        handle.release()
        transfer.is_touching = False
        return True


def _lists(spans: Spans) -> list[Spans]:
    """Split spans into parts of at most `_MOST_DESCRIPTORS` fragments."""
    runs = max(1, min(len(spans.length), _MOST_DESCRIPTORS))
    bases = max(1, _MOST_DESCRIPTORS // runs)
    return [
        Spans(spans.bases[b : b + bases], spans.offsets[m : m + runs], spans.length[m : m + runs])
        for b in range(0, len(spans.bases), bases)
        for m in range(0, len(spans.length), runs)
    ]
