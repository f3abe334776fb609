# SPDX-License-Identifier: Apache-2.0
"""Cache events for routers: a ZMQ publisher that supports replay, and a subscriber that mirrors the
cache.

Requires the packages `msgspec` and `pyzmq` (`pip install 'torch-kvcache[events]'`).
"""

try:
    import msgspec as _msgspec  # noqa: F401
    import zmq as _zmq  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("msgspec", "zmq"):
        raise
    raise ModuleNotFoundError(
        "kvcache_exchange.router_events needs the packages msgspec and pyzmq: "
        "pip install 'torch-kvcache[events]'",
        name=error.name,
    ) from None

from kvcache_exchange.router_events.publisher import EventPublisher, PublisherCounts
from kvcache_exchange.router_events.subscriber import EventSubscriber, SubscriberCounts
from kvcache_exchange.router_events.view import CachedBlock, CacheView

__all__ = [
    "CacheView",
    "CachedBlock",
    "EventPublisher",
    "EventSubscriber",
    "PublisherCounts",
    "SubscriberCounts",
]
