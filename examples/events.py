# SPDX-License-Identifier: Apache-2.0
"""A router's view of a cache: events are published, and a subscriber requests those that it
missed.
"""

from kvcache import KVCacheManager, Request, StepReport
from kvcache_exchange.router_events import EventPublisher, EventSubscriber

manager = KVCacheManager(
    16, 9, 256, enable_events=True, num_host_blocks=30, num_preallocate_tokens=0
)
publisher = EventPublisher("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", topic="kv@pod-1@tiny")


def serve(name: str, tokens: range) -> Request:
    """Run one request from admission to completion."""
    request = Request(name, tokens)
    plan = manager.step(new=[request])
    manager.report(StepReport(plan.step_id, completed=True))
    manager.free(request)
    publisher.publish(manager.cache.drain_events())
    return request


with publisher:
    # There is no subscriber yet. It will request a replay of these events later.
    first = serve("first", range(70))
    with EventSubscriber(publisher.endpoint, publisher.replay_endpoint) as reader:
        # The second request evicts the first request's device blocks, which are offloaded to the host.
        second = serve("second", range(1000, 1120))
        while reader.counts.batches < 3:  # the first one announces an empty cache
            reader.poll(timeout_s=0.1)
            reader.catch_up()
        print(f"exact: {reader.is_exact}, {reader.counts}")
        for request in (first, second):
            digests = manager.cache.hashes(request)
            hashes = [int.from_bytes(each[-8:].tobytes(), "big") for each in digests]
            for medium in ("GPU", "CPU"):
                found = [reader.view.block(each, medium) for each in hashes]
                starts = [block.token_ids[0] for block in found if block is not None]
                print(f"{request.request_id} on {medium}: blocks that begin with tokens {starts}")
            assert reader.view.num_leading(hashes) == len(hashes)
