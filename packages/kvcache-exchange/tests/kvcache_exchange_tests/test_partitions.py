# SPDX-License-Identifier: Apache-2.0
"""A subscriber reconnects after a network partition that ended the connection on the publisher's
side.
"""

from __future__ import annotations

import contextlib
import time

import pytest

pytest.importorskip("zmq")

import zmq

from kvcache.events import AllBlocksCleared
from kvcache_exchange.router_events import EventPublisher, EventSubscriber, subscriber
from tests.machinery.network import Network, why_not

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def context_in(network, name):
    """Return a context whose connections are made in a namespace."""
    with network.inside(name):
        context = zmq.Context()
        context.socket(zmq.SUB).close()  # starts the thread that connects
    return context


@pytest.mark.slow
def test_subscriber_connects_again_after_the_publishers_connection_was_lost(monkeypatch):
    monkeypatch.setattr(subscriber, "_PROBE_SECONDS", 1)
    with Network("engine", "router") as network, contextlib.ExitStack() as stack:
        contexts = {name: context_in(network, name) for name in ("engine", "router")}
        for each in contexts.values():
            stack.callback(each.destroy, linger=0)
        places = [f"tcp://{network.addresses['engine']}:{port}" for port in (5557, 5558)]
        with network.inside("engine"):
            publisher = EventPublisher(*places, allow_remote=True, context=contexts["engine"])
        stack.callback(publisher.close)
        reader = EventSubscriber(*places, replay_timeout_s=1, context=contexts["router"])
        stack.callback(reader.close)

        def publish():
            publisher.publish([AllBlocksCleared()])
            time.sleep(0.1)
            reader.poll()

        def publish_until(condition):
            until = time.monotonic() + 30
            while not condition():
                assert time.monotonic() < until
                publish()

        publish_until(lambda: reader.next_seq > 2)
        network.set("engine", "net/ipv4/tcp_retries2", 1)  # connections are lost within a second
        network.cut("engine", "router")
        for _ in range(30):
            publish()
        seen = reader.next_seq
        network.heal()
        publish_until(lambda: reader.next_seq == publisher._buffer.stop)
        assert reader.is_exact and reader.next_seq > seen + 30
