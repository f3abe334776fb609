# SPDX-License-Identifier: Apache-2.0
"""The rank side of a connector.

It runs the transport in a separate thread and manages the leases and the loads in flight.
"""

from __future__ import annotations

import base64
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from kvcache.checks import instance, shown
from kvcache.worker.swap.streams import Event
from kvcache_exchange.disaggregation.layout import GroupLayout
from kvcache_exchange.disaggregation.leases import Leases
from kvcache_exchange.disaggregation.offer import Offer, RankAddress
from kvcache_exchange.disaggregation.reading import Read, Reader
from kvcache_exchange.disaggregation.steps import Load, RankHandshake, Results, Step

_BUSY_S, _IDLE_S = 0.0005, 0.05
_MOST_WRONG = 20  # consecutive failed passes after which the thread gives up
_OF_STEP = {"loads": dict, "leases": dict, "ends": set, "cancels": set, "unread": list}
_FAILED = "the thread that loads KV has failed: see the log"
_UNTOLD = "the sender of request %s was not notified that its KV will not be read: %s"
_log = logging.getLogger("kvcache.exchange")


class _QueuedStep(NamedTuple):
    """A queued step, with the time at which it was requested and the event that its loads must wait
    for.
    """

    at: float
    step: Step
    after: Event | None = None


class _QueuedTask:
    """A function that the thread calls between two passes."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._error: BaseException | None = None
        self.is_done = threading.Event()

    def run(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error
        self.is_done.set()

    def check(self) -> None:
        """Raise the exception that the function raised, if any."""
        if self._error is not None:
            raise self._error


class RankThread:
    """A thread that serves readers and performs loads until `close` is called. Only this thread
    uses the transport.

    On a CUDA device, blocks are written only after all work that was already launched on the
    current stream when `begin` was called.

    Args:
        reader: The reader. The caller has registered the pages with the reader's transport and no
            longer uses this transport.
        layouts: Layouts of the transferred groups.
        addresses: Start address of each region of the rank's pages, per group.
        begin_load: Function that creates the read of a load.
        rank: Index of the rank.
    """

    def __init__(
        self,
        reader: Reader,
        layouts: Sequence[GroupLayout],
        addresses: Sequence[Sequence[int]],
        begin_load: Callable[[Load], Read],
        rank: int,
    ) -> None:
        self._leases, self._reader, self._begin_load = Leases(), reader, begin_load
        transport, slots = reader.transport, self._leases.slots
        transport.register([(slots.ctypes.data, slots.nbytes)])
        self._steps: queue.SimpleQueue[_QueuedStep | _QueuedTask | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._results = Results()
        self._loads: dict[str, Read] = {}
        # Reads whose senders must be notified, with the error that is already logged.
        self._unread: list[tuple[str, Read]] = []
        self._has_failed = False
        address = RankAddress(
            transport.name,
            base64.b64encode(transport.metadata()).decode(),
            tuple(tuple(int(each) for each in of_group) for of_group in addresses),
            slots.ctypes.data,
        )
        self.handshake = RankHandshake(tuple(layouts), address, rank)
        self._thread = threading.Thread(target=self._run, name="kvcache loads", daemon=True)
        self._thread.start()

    def begin(self, step: Step) -> None:
        """Queue a step's loads and other work. Its leases begin immediately.

        Raises:
            RuntimeError: The step has loads, but the current stream is being captured in a CUDA
                graph. Nothing was started.
        """
        instance(step, Step, "step")
        for name, kind in _OF_STEP.items():
            instance(getattr(step, name), kind, f"step.{name}")
        after: Event | None = None
        if step.loads:
            streams = self._reader.streams
            if streams.is_capturing():
                raise RuntimeError(
                    "begin was called while the current stream is captured in a CUDA graph: begin "
                    "loads outside graphs"
                )
            after = streams.record(streams.current())
        for request_id, lease in step.leases.items():
            self._leases.begin(request_id, *lease)
        for request_id in step.ends:
            self._leases.end(request_id)
        with self._lock:
            if self._has_failed:
                self._refuse(step)
            elif not step.is_empty:
                self._steps.put(_QueuedStep(time.monotonic(), step, after))

    def call(self, function: Callable[[], None]) -> None:
        """Run a function that uses the transport in the rank's thread, and wait for its result.

        Raises what the function raises, and TypeError if it is not callable. If the thread has ended,
        its transport is closed, and the function is not called.
        """
        if not callable(function):
            raise TypeError(f"function is {shown(function)}: expected a function without arguments")
        task = _QueuedTask(function)
        self._steps.put(task)
        while self._thread.is_alive() and not task.is_done.wait(_IDLE_S):
            pass
        task.check()

    def take_results(self) -> Results:
        """Return the results that were collected since the last call."""
        with self._lock:
            results, self._results = self._results, Results()
        return results

    def close(self) -> None:
        """Stop the thread and close the transport. Loads in flight are abandoned."""
        if self._thread.is_alive():
            self._steps.put(None)
            self._thread.join(timeout=10)

    def _run(self) -> None:
        """Run passes over the queued and current work until `close` is called.

        Failed passes are logged. After `_MOST_WRONG` consecutive failures, the thread gives up.
        """
        self._reader.streams.enter()
        failed: set[str] = set()  # failed loads that are still in flight
        num_wrong = 0
        while True:
            try:
                if not self._pass(failed):
                    break
                num_wrong = 0
            except Exception:
                num_wrong += 1
                _log.exception("a pass of the thread that serves and loads KV failed")
                if num_wrong == _MOST_WRONG:
                    self._give_up(failed)
                    return
                time.sleep(_IDLE_S)
        for load in self._under_way():
            load.cancel("the engine ends")
            _has_ended(load)  # notify the sender
        self._reader.transport.close()

    def _pass(self, failed: set[str]) -> bool:
        """Run one pass: process new steps, loads in flight, readers' messages and leases. Returns
        False after the last pass.
        """
        try:
            asked = self._steps.get(timeout=_BUSY_S if self._loads or self._unread else _IDLE_S)
        except queue.Empty:
            asked = _QueuedStep(time.monotonic(), Step())
        if asked is None:
            return False
        if isinstance(asked, _QueuedTask):
            asked.run()
            return True
        self._take(asked)
        self._step_unread()
        ended = [request_id for request_id, load in self._loads.items() if load.step()]
        self._report(ended, failed)
        for peer, message in self._reader.transport.notifications():
            self._leases.note(message, peer)
        return True

    def _take(self, asked: _QueuedStep) -> None:
        step = asked.step
        for offer in step.unread:
            self._decline(offer, asked.at)
        for request_id, load in step.loads.items():
            try:
                read = self._begin_load(load)
            except Exception as error:  # no transfer can write to the load's blocks
                self._fail_unbegun(request_id, f"the load did not begin: {error!r}")
                self._decline(load.offer, asked.at, logged=str(error))
                continue
            read.count_from(asked.at, asked.after)
            self._loads[request_id] = read
        for request_id in step.cancels & set(self._loads):
            self._loads[request_id].cancel("it was canceled")

    def _decline(self, offer: Offer, at: float, logged: str = "") -> None:
        """Notify an offer's sender that the offer will not be read, as soon as it is connected.

        The offer is handled as a load of no tokens, whose end is reported to the sender. The error
        `logged` is not logged again.
        """
        try:
            read = self._begin_load(Load(offer, 0, 0, tuple([] for _ in offer.blocks)))
        except Exception as error:
            if str(error) != logged:
                _log.warning(_UNTOLD, offer.request_id, error)
            return
        read.count_from(at)
        self._unread.append((logged, read))

    def _step_unread(self) -> None:
        left = []
        for logged, read in self._unread:
            if not read.step():
                left.append((logged, read))
            elif read.error not in (None, logged):
                _log.warning(_UNTOLD, read.offer.request_id, read.error)
        self._unread = left

    def _report(self, ended: Sequence[str], failed: set[str]) -> None:
        sent = self._leases.ended()
        with self._lock:
            self._results.sent |= sent
            for request_id, load in self._loads.items():
                if load.error is None or request_id in failed:
                    continue
                failed.add(request_id)
                _log.warning("KV of request %s is not loaded: %s", request_id, load.error)
                self._results.failed[request_id] = load.error
            for request_id in ended:
                load = self._loads.pop(request_id)
                self._results.num_bytes += load.num_bytes
                if load.error is None:
                    self._results.received.add(request_id)
                else:
                    self._results.released.add(request_id)
                    if not load.is_told:  # it failed while a connection was being established
                        self._decline(load.offer, time.monotonic(), logged=load.error)
        failed -= set(ended)

    def _under_way(self) -> list[Read]:
        return [*self._loads.values(), *(read for _, read in self._unread)]

    def _give_up(self, failed: set[str]) -> None:
        """End all loads and leases and reject new ones, so that no caller waits for this thread
        forever.
        """
        _log.error("KV is no longer served or loaded: requests are computed locally")
        for load in self._under_way():
            with suppress(Exception):
                load.cancel(_FAILED)
        self._leases.end_all()
        ended = {name for name, load in self._loads.items() if _has_ended(load)}
        with suppress(Exception):
            self._reader.transport.close()
        ended |= {n for n, load in self._loads.items() if n not in ended and _has_ended(load)}
        self._report(list(ended), failed)
        with self._lock:
            self._has_failed = True
            while not self._steps.empty():
                if isinstance(asked := self._steps.get(), _QueuedStep):
                    self._refuse(asked.step)

    def _refuse(self, step: Step) -> None:
        """Reject a step after the thread has given up. The caller holds the lock."""
        for request_id in step.loads:
            self._results.failed[request_id] = _FAILED
            self._results.released.add(request_id)
        self._leases.end_all()
        self._results.sent |= self._leases.ended()

    def _fail_unbegun(self, request_id: str, reason: str) -> None:
        _log.warning("KV of request %s is not loaded: %s", request_id, reason)
        with self._lock:
            self._results.failed[request_id] = reason
            self._results.released.add(request_id)


def _has_ended(load: Read) -> bool:
    try:
        return load.step()
    except Exception:  # the load's blocks stay in quarantine
        return False
