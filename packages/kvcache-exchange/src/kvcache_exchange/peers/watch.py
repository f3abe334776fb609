# SPDX-License-Identifier: Apache-2.0
"""Follows a peer: checks that this engine can use the peer's KV, and keeps the peer's view up to
date.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvcache.checks import check_name, instance, shown
from kvcache_exchange.disaggregation.offer_calls import OfferServer
from kvcache_exchange.router_events.subscriber import EventSubscriber
from kvcache_exchange.router_events.view import EventView

_log = logging.getLogger("kvcache.exchange")
PEER_PATH = "/peer"
_POLL_S = 0.1  # maximum time by which a poll delays the thread's end
_REPLAY_S = 1.0
_ANY_HOSTS = ("0.0.0.0", "*", "[::]")


class PeerWatch:
    """Follows a peer in a thread until `stop`.

    The thread requests the peer's description every `recheck_s` seconds. While the description is
    compatible, the thread subscribes to the peer's events and updates the view. If the peer is
    unreachable or incompatible, the view is empty.

    Args:
        server: The peer.
        view: The view to update with the peer's events.
        check: Function that is called with the peer's description and raises ValueError if the peer
            is incompatible.
        recheck_s: Interval between checks in seconds.
    """

    def __init__(
        self,
        server: OfferServer,
        view: EventView,
        check: Callable[[Mapping[str, Any]], None],
        recheck_s: float,
    ) -> None:
        self.server = server
        self.error: str | None = "it was not checked yet"  # why the peer is not used
        self._view, self._check, self._recheck_s = view, check, recheck_s
        self._subscriber: EventSubscriber | None = None
        self._followed: tuple[Any, ...] | None = None  # process and endpoints of the subscription
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"kvcache peer {server.address}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop following the peer. The thread ends soon afterwards."""
        self._closing.set()

    def join(self) -> None:
        """Wait until the thread has ended. If the peer does not respond, the wait is limited."""
        self._thread.join(_POLL_S + _REPLAY_S + self.server.timeout_s)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._refresh()
                self._follow()
            except Exception as error:  # the thread must survive anything that a peer sends
                self._lose(f"{error}" or type(error).__name__)
                self._closing.wait(self._recheck_s)
        self._unsubscribe()

    def _refresh(self) -> None:
        """Check the peer, and subscribe to its events if the peer is new or has restarted."""
        described = self.server.fetch(PEER_PATH)
        instance(described, Mapping, "the description")
        self._check(described)
        followed = (described["peer"]["engine_id"], *self._endpoints(described.get("events")))
        if followed != self._followed:
            self._unsubscribe()
            self._subscriber = EventSubscriber(
                *followed[1:], view=self._view, replay_timeout_s=_REPLAY_S
            )
            self._followed = followed
        if followed[2] is not None:
            self._subscriber.catch_up()
        if self.error is not None:
            _log.info("peer %s is used", self.server.address)
        self.error = None

    def _follow(self) -> None:
        until = time.monotonic() + self._recheck_s
        while time.monotonic() < until and not self._closing.is_set():
            self._subscriber.poll(_POLL_S)

    def _endpoints(self, events: Any) -> tuple[str, str | None, str]:
        """Return the endpoint, the replay endpoint and the topic of the peer's events."""
        if not isinstance(events, Mapping):
            raise ValueError(f"events of the peer are {shown(events)}: expected its endpoints")
        endpoint, replay = events.get("endpoint"), events.get("replay_endpoint")
        check_name(endpoint, "endpoint of the peer's events")
        if replay is not None:
            check_name(replay, "replay_endpoint of the peer's events")
            replay = self._reachable(replay)
        topic = events.get("topic", "")
        instance(topic, str, "topic of the peer's events")
        return self._reachable(endpoint), replay, topic

    def _reachable(self, endpoint: str) -> str:
        """Replace a wildcard address with the peer's own address."""
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        if not endpoint.startswith("tcp://") or host not in _ANY_HOSTS:
            return endpoint
        own = self.server.host
        return f"tcp://[{own}]:{port}" if ":" in own else f"tcp://{own}:{port}"

    def _lose(self, reason: str) -> None:
        self._unsubscribe()
        if reason != self.error:
            _log.warning("peer %s is not used: %s", self.server.address, reason)
        self.error = reason

    def _unsubscribe(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()
        self._subscriber = self._followed = None
        self._view.clear()
