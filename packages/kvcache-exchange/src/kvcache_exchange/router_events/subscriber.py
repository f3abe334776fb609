# SPDX-License-Identifier: Apache-2.0
"""Subscribes to one publisher and mirrors its cache across lost messages and restarts."""

from __future__ import annotations

import logging
import time
from contextlib import closing
from typing import Any, NamedTuple

import zmq

from kvcache.checks import seconds, shown, text
from kvcache_exchange.router_events.endpoints import checked_context
from kvcache_exchange.router_events.replay_client import ReplayTimeout, replay
from kvcache_exchange.router_events.view import CacheView, EventView
from kvcache_exchange.router_events.wire import (
    WireBatch,
    WireCleared,
    WireError,
    decode_batch,
    decode_sequence,
)

_log = logging.getLogger("kvcache.exchange")
_MOST_MESSAGES = 1024  # maximum number of messages per `poll`
# A subscriber sends nothing, so it would never notice that the publisher's side of its connection is
# gone. After `_PROBE_SECONDS` without data, TCP sends a probe every `_PROBE_SECONDS`. If none of
# the probes is acknowledged, the connection is opened again.
_PROBE_SECONDS, _NUM_PROBES = 5, 3
_LONGEST_SECONDS = 86_400.0  # maximum wait per `poll`, because ZMQ counts milliseconds in 32 bits


class SubscriberCounts(NamedTuple):
    """Cumulative counts of a subscriber."""

    batches: int  # applied batches, including replayed batches
    gaps: int  # gaps in the sequence numbers
    restarts: int  # restarts of the publisher
    malformed: int  # ignored messages


class EventSubscriber:
    """Mirrors one publisher's cache. There is no background thread; `poll` reads the messages that
    have arrived.

    While `is_exact` is true, `view` reflects all batches before `next_seq`, which were applied
    individually or as a snapshot. A lost batch is detected when a later batch arrives or when
    `catch_up` is called, and is then replayed. A restarted publisher is detected by its sequence
    numbers. In addition, each new connection starts with a replay that checks whether the publisher's
    copy of the last applied batch is identical to the subscriber's.

    Args:
        endpoint: The publisher's endpoint.
        replay_endpoint: The publisher's replay endpoint. None: lost batches are not recovered.
        topic: Topic of the accepted batches, which must match exactly. "": all topics.
        replay_timeout_s: Timeout of a replay in seconds. The next `poll` continues an unfinished
            replay. After a replay without any response, the next attempt is delayed by this
            timeout.
        view: Object that mirrors the cache. None: a new `CacheView`. Any object with the methods
            `apply` and `clear` of a `CacheView` can be used, such as a view of an `EventIndex`.
        context: The ZMQ context. None: the process-wide context.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> with EventSubscriber("tcp://127.0.0.1:5557") as subscriber:
        ...     subscriber.poll(timeout_s=0), len(subscriber.view)
        (0, 0)
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        *,
        replay_timeout_s: float = 5.0,
        view: EventView | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        text(endpoint, "endpoint")
        if replay_endpoint is not None:
            text(replay_endpoint, "replay_endpoint")
        self._topic = text(topic, "topic").encode()
        self._replay_timeout_s = seconds(replay_timeout_s, "replay_timeout_s")
        self._replay_endpoint = replay_endpoint
        self._context = checked_context(context)
        for method in ("apply", "clear") if view is not None else ():
            if not callable(getattr(view, method, None)):
                raise TypeError(f"view is {shown(view)}: expected an object with apply and clear")
        self.view: Any = CacheView() if view is None else view
        self.is_exact = False
        self.next_seq = 0
        self._last_payload: bytes | None = (
            None  # payload of the batch before `next_seq`, if it can be replayed
        )
        self._last_live = -1  # the last sequence number that arrived without a replay
        self._must_catch_up, self._has_reconnected = replay_endpoint is not None, False
        self._retry_at = 0.0  # time of the next attempt on the monotonic clock
        self._num_batches = self._num_gaps = self._num_restarts = self._num_malformed = 0

        self._socket = self._context.socket(zmq.SUB)
        try:
            self._socket.linger = 0
            self._socket.tcp_keepalive, self._socket.tcp_keepalive_cnt = 1, _NUM_PROBES
            self._socket.tcp_keepalive_idle = self._socket.tcp_keepalive_intvl = _PROBE_SECONDS
            self._socket.ipv6 = "[" in endpoint
            self._connections = self._socket.get_monitor_socket(zmq.EVENT_CONNECTED)
            self._is_connected = False
            self._socket.subscribe(self._topic)
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ValueError(f"endpoint is {endpoint!r}: {error.strerror}") from None

    def poll(self, timeout_s: float = 0.0) -> int:
        """Apply messages that have arrived, at most 1,024.

        Args:
            timeout_s: Maximum time to wait for the first message, in seconds. A replay may take an
                additional `replay_timeout_s`.

        Returns:
            The number of applied batches.
        """
        self._check_open()
        before = self._num_batches
        wait_ms = int(min(seconds(timeout_s, "timeout_s"), _LONGEST_SECONDS) * 1000)
        self._note_connections()
        self._try_to_catch_up()
        # The limit ensures that the loop ends even if batches arrive faster than they are read.
        for _ in range(_MOST_MESSAGES):
            if not self._socket.poll(wait_ms if self._num_batches == before else 0):
                break
            self._take(self._socket.recv_multipart())
            wait_ms = 0
        return self._num_batches - before

    def catch_up(self) -> bool:
        """Request all batches published so far.

        Returns:
            Whether the view is exact.

        Raises:
            ValueError: There is no replay endpoint.
        """
        if self._replay_endpoint is None:
            raise ValueError(
                "replay_endpoint is None: expected an endpoint, which catch_up requires"
            )
        self._check_open()
        self._note_connections()
        self._must_catch_up, self._retry_at = True, 0.0
        self._try_to_catch_up()
        return self.is_exact and not self._must_catch_up

    @property
    def counts(self) -> SubscriberCounts:
        """Cumulative counts."""
        return SubscriberCounts(
            self._num_batches, self._num_gaps, self._num_restarts, self._num_malformed
        )

    def close(self) -> None:
        """Close the connection. The view remains available."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._socket.close(linger=0)

    def _check_open(self) -> None:
        if self._socket.closed:
            raise RuntimeError("the subscriber is closed: expected one that is open")

    def __enter__(self) -> EventSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, frames: list[bytes]) -> None:
        if self._note_connections():
            self._try_to_catch_up()
            return  # the message is older than the replay, or is from the previous publisher
        try:
            if len(frames) != 3:
                raise WireError(f"message has {len(frames)} frames: expected 3")
            topic, sequence, payload = frames
            if self._topic and topic != self._topic:
                return  # only a prefix of the message's topic matches
            seq = decode_sequence(sequence)
        except WireError as error:
            self._note_malformed(error)
            return
        try:
            batch = decode_batch(payload)
        except WireError as error:
            self._note_malformed(error)
            self.is_exact = False
            return
        if seq <= self._last_live:
            self._begin_anew()
        self._last_live = seq
        if seq > self.next_seq:
            if _names_all(batch) and (self.next_seq == 0 or self._has_reconnected):
                self._num_restarts += self.next_seq > 0  # the first batch of another publisher
            else:
                self._num_gaps += 1
                self._must_catch_up = self._can_replay
        self._has_reconnected = False
        if self._must_catch_up:
            self._try_to_catch_up()
            return  # the batch has been or will be replayed
        if seq >= self.next_seq:
            self._apply(seq, batch, payload)

    def _note_connections(self) -> bool:
        """Return whether a new connection requires a replay, because it may belong to another
        publisher.
        """
        is_new = False
        while self._connections.poll(0):
            self._connections.recv_multipart()
            is_new |= self._is_connected
            self._is_connected = True
        if is_new and not self._can_replay:
            self.is_exact, self._has_reconnected = False, True
        elif is_new:
            self._drop_queued()
            self._must_catch_up = True
        return is_new and self._can_replay

    def _drop_queued(self) -> None:
        """Drop queued messages, because the requested replay supersedes them."""
        self._last_live = -1
        try:
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            pass

    def _note_malformed(self, error: WireError) -> None:
        self._num_malformed += 1
        _log.warning("a malformed message of cache events is ignored: %s", error)

    def _begin_anew(self) -> None:
        self._num_restarts += 1
        self._forget()
        self._must_catch_up = self._can_replay

    def _forget(self) -> None:
        self.view.clear()
        self.is_exact = False
        self.next_seq, self._last_payload = 0, None

    @property
    def _can_replay(self) -> bool:
        return self._replay_endpoint is not None

    def _apply(self, seq: int, batch: WireBatch, payload: bytes) -> None:
        is_jump = seq != self.next_seq
        names_all = _names_all(batch)
        self.is_exact = names_all or seq == 0 or (self.is_exact and not is_jump)
        self.view.apply(batch.events)
        self.next_seq = seq + 1
        # A snapshot is created for a single replay and differs from the batch with the same
        # sequence number.
        self._last_payload = None if is_jump and names_all else payload
        self._num_batches += 1

    def _try_to_catch_up(self) -> None:
        """Run a replay if one is needed. If it fails, it is retried later."""
        if self._replay_endpoint is None or not self._must_catch_up:
            return
        if time.monotonic() < self._retry_at:
            return
        deadline, before = time.monotonic() + self._replay_timeout_s, self._num_batches
        try:
            is_done = self._replay(self._replay_endpoint, deadline)
            if not is_done:
                self._begin_anew()
                self._drop_queued()
                # False means that the publisher has restarted again.
                is_done = self._replay(self._replay_endpoint, deadline)
            self._must_catch_up = not is_done
        except ReplayTimeout as error:
            _log.warning("cache events were not replayed: %s", error)
            if self._num_batches == before:
                self._retry_at = time.monotonic() + self._replay_timeout_s
        except WireError as error:
            self._note_malformed(error)
            self._retry_at = time.monotonic() + self._replay_timeout_s

    def _replay(self, endpoint: str, deadline: float) -> bool:
        """Apply the batches after the last applied batch.

        Return False if the publisher has a different batch under the same sequence number.
        """
        last = None if self._last_payload is None else self.next_seq - 1
        is_first = True
        left = deadline - time.monotonic()
        answers = replay(self._context, endpoint, last or 0, left, self._topic)
        with closing(answers):
            for seq, payload in answers:
                if is_first and seq == last:
                    is_first = False
                    if payload != self._last_payload:
                        return False
                    continue
                if is_first and last is None:
                    self._forget()
                is_empty = self._apply_replayed(seq, payload)
                # Another publisher starts by announcing an empty cache.
                self._num_restarts += is_first and last is not None and is_empty
                is_first = False
        if is_first:  # the publisher has published nothing, or fewer batches than before
            if self.next_seq > 0:
                return False
            self.is_exact = True
        return True

    def _apply_replayed(self, seq: int, payload: bytes) -> bool:
        """Apply a replayed batch. Return whether it only announces an empty cache."""
        if seq < self.next_seq:
            raise WireError(f"replay has batch {seq}: expected {self.next_seq} or later")
        try:
            batch = decode_batch(payload)
        except WireError as error:  # another replay would fail in the same way
            self._note_malformed(error)
            self.is_exact = False
            self.next_seq, self._last_payload = seq + 1, payload
            return False
        self._apply(seq, batch, payload)
        return batch.events == [WireCleared()]


def _names_all(batch: WireBatch) -> bool:
    """Return whether a batch describes the whole cache, because it first clears it."""
    return bool(batch.events) and isinstance(batch.events[0], WireCleared)
