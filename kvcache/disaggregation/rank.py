"""A rank's side: its transport in a thread of its own, leases, and loads under way."""

from __future__ import annotations

import base64
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from kvcache.disaggregation.layout import GroupLayout
from kvcache.disaggregation.leases import Leases, Progress
from kvcache.disaggregation.offer import RankAddress
from kvcache.disaggregation.reading import Read, Reader
from kvcache.disaggregation.steps import Load, RankHandshake, Results, Step

_BUSY_S, _IDLE_S = 0.0005, 0.05
_log = logging.getLogger(__name__)


class RankThread:
    """Serves readers and carries out loads, until `close`. The transport is used by its thread alone.

    begin_load(load): the read of a load, by this reader. The caller has registered the pages with the
    reader's transport, and no longer touches it.
    """

    def __init__(
        self,
        reader: Reader,
        layouts: Sequence[GroupLayout],
        addresses: Sequence[Sequence[int]],
        begin_load: Callable[[Load], Read],
    ) -> None:
        self._leases, self._reader, self._begin_load = Leases(), reader, begin_load
        transport, slots = reader.transport, self._leases.slots
        transport.register([(slots.ctypes.data, slots.nbytes)])
        self._steps: queue.SimpleQueue[tuple[float, Step] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._results = Results()
        self._loads: dict[str, Read] = {}
        address = RankAddress(
            transport.name,
            base64.b64encode(transport.metadata()).decode(),
            tuple(tuple(int(each) for each in of_group) for of_group in addresses),
            slots.ctypes.data,
        )
        self.handshake = RankHandshake(tuple(layouts), address)
        self._thread = threading.Thread(target=self._run, name="kvcache loads", daemon=True)
        self._thread.start()

    def begin(self, step: Step) -> None:
        """Begins what the scheduler's side has decided; leases begin at once."""
        for request_id, lease in step.leases.items():
            self._leases.begin(request_id, *lease)
        for request_id in step.ends:
            self._leases.end(request_id)
        if not step.is_empty:
            self._steps.put((time.monotonic(), step))

    def advance(self, request_id: str, progress: Progress) -> None:
        """Tells readers what is computed of a request under lease. Its bytes are in memory by then."""
        self._leases.advance(request_id, progress)

    def take_results(self) -> Results:
        """What has ended since the last call."""
        with self._lock:
            results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        """Ends the thread and the transport; loads under way are given up."""
        if self._thread.is_alive():
            self._steps.put(None)
            self._thread.join(timeout=10)

    def _run(self) -> None:
        """New steps, loads under way, messages of readers, leases."""
        transport = self._reader.transport
        failed: set[str] = set()  # of the loads under way
        while True:
            try:
                asked = self._steps.get(timeout=_BUSY_S if self._loads else _IDLE_S)
            except queue.Empty:
                asked = time.monotonic(), Step()
            if asked is None:
                break
            self._take(*asked)
            ended = [request_id for request_id, load in self._loads.items() if load.step()]
            for peer, message in transport.notifications():
                self._leases.note(message, peer)
            self._report(ended, failed)
        for load in self._loads.values():
            load.cancel("the engine ends")
        transport.close()

    def _take(self, asked: float, step: Step) -> None:
        loads = dict(step.loads)
        for offer in step.unread:
            # An offer that is not read is a load of nothing: its sender hears of it all the same.
            nothing = Load(offer, 0, 0, tuple([] for _ in offer.blocks))
            loads[f"\0{offer.request_id}"] = nothing
        for request_id, load in loads.items():
            read = self._loads[request_id] = self._begin_load(load)
            read.count_from(asked)
        for request_id in step.cancels & set(self._loads):
            self._loads[request_id].cancel("it was given up")

    def _report(self, ended: list[str], failed: set[str]) -> None:
        sent = self._leases.ended()
        with self._lock:
            self._results.sent |= sent
            for request_id, load in self._loads.items():
                if load.error is None or request_id in failed:
                    continue
                failed.add(request_id)
                _log.warning(
                    "KV of request %s is not loaded: %s", request_id.strip("\0"), load.error
                )
                if not request_id.startswith("\0"):
                    self._results.failed[request_id] = load.error
            for request_id in ended:
                load = self._loads.pop(request_id)
                if request_id.startswith("\0"):
                    continue
                self._results.num_bytes += load.num_bytes
                if load.error is None:
                    self._results.received.add(request_id)
                else:
                    self._results.released.add(request_id)
        failed -= set(ended)
