# SPDX-License-Identifier: Apache-2.0
"""Publishes the events of a manager to routers from a background thread."""

from __future__ import annotations

import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from kvcache.allocator import DEFAULT_SEED
from kvcache.checks import MAX_INT64, flag, integer, listed, seconds, text
from kvcache.events import CacheEvent
from kvcache_exchange.router_events.endpoints import bound, checked_context, checked_endpoint
from kvcache_exchange.router_events.replay_buffer import ReplayBuffer
from kvcache_exchange.router_events.replay_server import ReplayServer
from kvcache_exchange.router_events.translator import EventTranslator, check_event
from kvcache_exchange.router_events.wire import (
    EventEncoding,
    WireBatch,
    WireCleared,
    WireEvent,
    checked_encoding,
    encode_batch,
    encode_sequence,
)

_log = logging.getLogger("kvcache.exchange")
_BUSY_POLL_MS = 5  # polling interval in ms while a reader of a replay accepts no data
_QUEUE_CHECK_SECONDS = 0.1
_LONGEST_SECONDS = 86_400.0  # maximum timeout of `close`; ZMQ and threads support a few days
_MOST_BYTES_OF_A_SUBSCRIPTION = 4096


class PublisherCounts(NamedTuple):
    """Cumulative counts of a publisher."""

    batches: int  # without the first batch, which announces an empty cache
    payload_bytes: int
    replays: int  # number of replays that were started
    snapshots: (
        int  # snapshots sent because a reader requested batches that are no longer in the buffer
    )
    refused_requests: int  # malformed replay requests
    given_up_replays: int  # replays dropped because the reader left, stalled or sent a new request


class EventPublisher:
    """Publishes cache events over ZMQ, with replay. docs/events.md describes the wire format.

    Call `publish(manager.cache.drain_events())` after each step. The call only queues the events,
    and a background thread translates and sends them. A publisher belongs to one manager and must
    receive all of the manager's events, starting with the first. Its first batch announces an empty
    cache. Numbers start at the time in microseconds, so they are above those of earlier publishers.

    Args:
        endpoint: The address that readers subscribe to.
        replay_endpoint: Address for replay requests. None disables replay. Both addresses are bound
            as given, so each data-parallel rank needs a separate pair of addresses.
        allow_remote: Whether to allow addresses other than loopback, ipc and inproc. Anyone who can
            reach such an address can read the tokens of all prompts.
        topic: Topic of the messages. Some routers expect the form "kv@POD@MODEL".
        data_parallel_rank: Data-parallel rank that is sent with every batch.
        event_encoding: "map", or "array" for subscribers that support only the event format of
            SGLang or of vLLM before 0.24.
        hash_seed: The manager's `hash_seed`.
        buffer_steps: Maximum number of batches kept for replay. A reader that requests older
            batches receives a snapshot of all cached blocks.
        buffer_bytes: Maximum total size of the kept batches, in bytes.
        hwm: Maximum number of batches queued for a slow reader. While this queue is full, the
            reader misses batches.
        max_queue_size: Maximum number of batches queued for the thread. `publish` blocks while the
            queue is full.
        context: The ZMQ context. None: the process-wide context.

    Raises:
        TypeError, ValueError: An argument is invalid.
        OSError: An endpoint cannot be bound.

    Example:
        >>> from kvcache.events import AllBlocksCleared
        >>> with EventPublisher("tcp://127.0.0.1:0", topic="kv@pod-1@llama") as publisher:
        ...     publisher.publish([AllBlocksCleared()])
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:5557",
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        data_parallel_rank: int = 0,
        event_encoding: EventEncoding = "map",
        hash_seed: str = DEFAULT_SEED,
        buffer_steps: int = 10_000,
        buffer_bytes: int = 2**28,
        hwm: int = 100_000,
        max_queue_size: int = 100_000,
        allow_remote: bool = False,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        allow_remote = flag(allow_remote, "allow_remote")
        checked_endpoint(endpoint, "endpoint", allow_remote)
        if replay_endpoint is not None:
            checked_endpoint(replay_endpoint, "replay_endpoint", allow_remote)
        self._topic = text(topic, "topic").encode()
        self._rank = integer(data_parallel_rank, "data_parallel_rank")
        self._encoding = checked_encoding(event_encoding)
        # Above all numbers of an earlier publisher, which has sent less than a batch per microsecond.
        self._buffer = ReplayBuffer(
            integer(buffer_steps, "buffer_steps", least=1),
            integer(buffer_bytes, "buffer_bytes", least=1, most=MAX_INT64),
            time.time_ns() // 1_000,
        )
        hwm = integer(hwm, "hwm", least=1)
        self._translator = EventTranslator(hash_seed)
        size = integer(max_queue_size, "max_queue_size", least=1)
        self._waiting: queue.Queue[tuple[float, list[CacheEvent]]] = queue.Queue(size)
        self._num_bytes = 0
        self._failure: BaseException | None = None
        self._is_closing = False
        self._close_by = 0.0  # deadline of `close` on the monotonic clock

        context = checked_context(context)
        self._socket = context.socket(zmq.PUB)
        self._socket.sndhwm = hwm
        self._socket.maxmsgsize = _MOST_BYTES_OF_A_SUBSCRIPTION
        self.endpoint = bound(self._socket, endpoint, "endpoint")
        self.replay_endpoint: str | None = None
        self._router: zmq.Socket[bytes] | None = None
        self._server: ReplayServer | None = None
        if replay_endpoint is not None:
            self._router = context.socket(zmq.ROUTER)
            ReplayServer.prepare(self._router)
            try:
                self.replay_endpoint = bound(self._router, replay_endpoint, "replay_endpoint")
            except OSError:
                self._socket.close(linger=0)
                raise
            self._server = ReplayServer(self._router, self._topic, self._buffer, self._snapshot)
        self._send([WireCleared()], time.time())  # the cache of an earlier publisher is gone
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvcache events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Queue the events of one `drain_events()` call as one batch. Without events, no batch is sent.

        Args:
            events: The complete result of `drain_events()`.

        Raises:
            TypeError, ValueError: An entry is not a valid event of a manager.
            RuntimeError: The publisher is closed, or its thread has failed.
        """
        events = listed(events, "events", "a list of events")
        for i, event in enumerate(events):
            check_event(event, f"events[{i}]")
        item = (time.time(), events)
        while True:
            self._check_open()
            if not events:
                return
            try:
                self._waiting.put(item, timeout=_QUEUE_CHECK_SECONDS)
            except queue.Full:
                continue  # retry unless the thread has failed
            self._wake_up()
            return

    @property
    def topic(self) -> str:
        """Topic of the messages."""
        return self._topic.decode()

    @property
    def counts(self) -> PublisherCounts:
        """Cumulative counts. They may be slightly out of date."""
        server = self._server
        replays = (
            (server.num_replays, server.num_snapshots, server.num_refused, server.num_given_up)
            if server
            else (0, 0, 0, 0)
        )
        num_batches = self._buffer.stop - self._buffer.start - 1
        return PublisherCounts(num_batches, self._num_bytes, *replays)

    def close(self, timeout_s: float = 1.0) -> None:
        """Publish queued batches and stop. Replays in progress are aborted. Repeated calls are allowed.

        Args:
            timeout_s: Approximate timeout in seconds. Must be finite and at least 0.

        Raises:
            TypeError, ValueError: `timeout_s` is invalid. The publisher continues to run.
        """
        timeout_s = min(seconds(timeout_s, "timeout_s"), _LONGEST_SECONDS)
        if self._is_closing:
            return
        self._close_by = time.monotonic() + timeout_s
        self._is_closing = True
        self._wake_up()
        self._thread.join(timeout_s + 1)
        self._wake.close()

    def __enter__(self) -> EventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the publisher's thread failed") from self._failure
        if self._is_closing:
            raise RuntimeError("the publisher is closed")

    def _wake_up(self) -> None:
        # If the pipe is full, the thread wakes up anyway. If the thread has ended, it needs no
        # wake-up.
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    # The following methods are called only in the publisher's thread.

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            _log.exception("publishing cache events failed")
            self._failure = error
        finally:
            remaining = max(self._close_by - time.monotonic(), 0.0)
            self._socket.close(linger=int(remaining * 1000))
            if self._router is not None:
                self._router.close(linger=0)
            self._woken.close()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        while not self._is_closing:
            is_busy = self._server is not None and self._server.is_busy
            poller.poll(_BUSY_POLL_MS if is_busy else None)
            self._clear_wake()
            if not self._publish_some():
                self._wake_up()  # more batches are queued
            if self._server is not None:
                self._server.hear()
                self._server.serve()
        while time.monotonic() < self._close_by and not self._publish_some():
            pass

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass

    def _publish_some(self) -> bool:
        """Publish at most 64 batches, so that replays can be served in between.

        Return whether the queue is empty.
        """
        for _ in range(64):
            try:
                seconds, events = self._waiting.get_nowait()
            except queue.Empty:
                return True
            translated = self._translator.translate(events)
            if self._buffer.stop == self._buffer.start + 1:
                # Readers without a replay connected after the announcement was sent.
                translated.insert(0, WireCleared())
            self._send(translated, seconds)
        return self._waiting.empty()

    def _send(self, events: list[WireEvent], seconds: float) -> None:
        payload = self._encoded(seconds, events)
        self._socket.send_multipart(
            [self._topic, encode_sequence(self._buffer.stop), payload], copy=False
        )
        self._buffer.append(payload)
        self._num_bytes += len(payload)

    def _snapshot(self) -> bytes:
        return self._encoded(time.time(), self._translator.snapshot())

    def _encoded(self, seconds: float, events: list[WireEvent]) -> bytes:
        return encode_batch(WireBatch(seconds, events, self._rank), self._encoding)
