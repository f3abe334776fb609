# SPDX-License-Identifier: Apache-2.0
"""NVIDIA Dynamo's KV indexer, an index of several routers, follows the events of several caches.

The indexer is a separate process from PyPI (`ai-dynamo-runtime`), with its own reader of the wire format
and its own replay client. At the end, its index must equal the caches.
"""

import contextlib
import random
import threading
import time

import pytest

pytest.importorskip("zmq")

import zmq

from kvcache import KVCacheManager, Request, StepReport
from kvcache_exchange.router_events import EventPublisher
from tests.machinery.cache_user import cached
from tests.machinery.dynamo_indexer import BLOCK, Indexer, needs_dynamo, wait_for

LOCAL = "tcp://127.0.0.1:0"


class Worker:
    """A cache with its publisher. Messages pass through a relay that loses some of them."""

    def __init__(self, number, encoding, buffer_steps):
        self.number, self.rng, self.loss = number, random.Random(number), 0.3
        self.num_sent = self.num_lost = 0
        self.manager = KVCacheManager(
            BLOCK,
            **{"num_gpu_blocks": 60, "max_model_len": 2048, "num_host_blocks": 40},
            **{"num_preallocate_tokens": 0, "enable_events": True},
        )
        self.publisher = EventPublisher(
            *(LOCAL, LOCAL), event_encoding=encoding, buffer_steps=buffer_steps
        )
        self._in, self._out = (
            zmq.Context.instance().socket(zmq.SUB),
            zmq.Context.instance().socket(zmq.PUB),
        )
        self._in.subscribe(b"")
        self._in.connect(self.publisher.endpoint)
        self.endpoint = f"tcp://127.0.0.1:{self._out.bind_to_random_port('tcp://127.0.0.1')}"
        self._is_closing = False
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()
        self.requests = []

    def _relay(self):
        rng = random.Random(self.number)
        while not self._is_closing:
            if self._in.poll(20):
                frames = self._in.recv_multipart()
                if rng.random() < self.loss:
                    self.num_lost += 1
                else:
                    self._out.send_multipart(frames)
                self.num_sent += 1

    def step(self, is_new=False):
        """Serve a request that shares a prefix with others unless it is new. Return its tokens."""
        prefix, rng = self.rng.randrange(4), self.rng
        tokens = [prefix * 1000 + i for i in range(rng.randrange(40, 200))]
        tokens += [rng.randrange(5000, 6000) for _ in range(rng.randrange(60))]
        if is_new:
            tokens = [10_000 + token for token in tokens]
        request = Request(f"r{rng.random()}", tokens)
        while len(self.requests) >= 3:
            self.manager.free(self.requests.pop(0))
        plan = self.manager.step(new=[request])
        if plan.status[0] == 0:
            self.requests.append(request)
        self.manager.report(StepReport(plan.step_id, completed=True))
        if self.loss and rng.random() < 0.02:
            for each in self.requests:
                self.manager.free(each)
            self.requests.clear()
            self.manager.cache.reset()
        self.publisher.publish(self.manager.cache.drain_events())
        return tokens

    def blocks(self):
        return {(medium, each) for medium, _, each in cached(self.manager)}

    def close(self):
        self._is_closing = True
        self._thread.join()
        self.publisher.close()
        for each in (self._in, self._out):
            each.close(linger=0)


@needs_dynamo
@pytest.mark.parametrize(
    ("encoding", "buffer_steps"), [("map", 10_000), ("array", 10_000), ("map", 20)]
)
def test_dynamos_index_equals_the_caches_after_loss_replay_and_restart(
    encoding, buffer_steps, tmp_path
):
    """With few buffered batches, the second indexer receives snapshots."""
    with contextlib.ExitStack() as stack:
        workers = [Worker(number, encoding, buffer_steps) for number in (1, 2, 3)]
        for each in workers:
            stack.callback(each.close)
        for restarts in range(2):  # the second indexer starts with an empty index
            indexer = Indexer(tmp_path)
            stack.callback(indexer.close)
            for each in workers:
                each.loss = 0.3
                indexer.register(each.number, each.endpoint, each.publisher.replay_endpoint)
            time.sleep(0.5)
            for i in range(300):
                for each in workers:
                    each.step()
                if i % 10 == 0:
                    time.sleep(0.01)
            prompts = {}
            for each in workers:  # a last message, which reveals the loss of those before it
                wait_for(lambda each=each: each.num_sent == each.publisher.counts.batches)
                each.loss = 0.0
                prompts[each.number] = each.step(is_new=True)
            for each in workers:
                expect_equal(indexer, each)
                tokens = prompts[each.number]
                assert indexer.scores(tokens)[each.number] == len(tokens) // BLOCK * BLOCK
            assert {medium for each in workers for medium, _ in each.blocks()} == {"GPU", "CPU"}
            if restarts == 0:
                indexer.close()
        assert all(each.num_lost > 50 for each in workers)
        assert all(each.publisher.counts.replays > 5 for each in workers)
        num_snapshots = sum(each.publisher.counts.snapshots for each in workers)
        assert (num_snapshots > 0) == (buffer_steps == 20)


def expect_equal(indexer, worker):
    """Wait until the index has exactly the blocks of a cache."""
    with contextlib.suppress(AssertionError):
        wait_for(lambda: indexer.blocks(worker.number) == worker.blocks())
    found, expected = indexer.blocks(worker.number), worker.blocks()
    assert (found - expected, expected - found) == (set(), set())
