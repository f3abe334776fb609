# SPDX-License-Identifier: Apache-2.0
"""Compatibility with vLLM's own publisher and decoder: each side reads the messages of the other.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import random
import time

import pytest

pytest.importorskip("vllm")

from tests.machinery import vllm_schedulers  # noqa: F401, I001  sets environment variables

import msgspec
import zmq
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from kvcache import GroupSpec, KVCacheManager, Request, StepReport
from kvcache_vllm.events import MEDIUM
from kvcache_exchange.router_events import CacheView, EventPublisher, EventSubscriber
from kvcache_exchange.router_events.translator import EventTranslator
from kvcache_exchange.router_events.wire import GPU, WireBatch, decode_batch, encode_batch
from tests.machinery.cache_user import CacheUser, shown
from tests.machinery.ports import free_port

LOCAL = "tcp://127.0.0.1:0"
DEADLINE_S = 20
DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def wait_for(condition):
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.005)


class RouterView(dict):
    """A router that uses only vLLM's classes. Its view maps (medium, group) -> hash -> (parent,
    tokens).
    """

    def apply(self, batch):
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self.clear()
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    self[event.medium, event.group_idx].pop(each, None)
            else:
                assert isinstance(event, BlockStored)
                parent, size = event.parent_block_hash, event.block_size
                for i, each in enumerate(event.block_hashes):
                    tokens = tuple(event.token_ids[i * size : (i + 1) * size])
                    place = self.setdefault((event.medium, event.group_idx), {})
                    place[each] = (parent, tokens)
                    parent = each

    def hashes(self):
        return {(*place, each) for place, blocks in self.items() for each in blocks}


def check_payload(payload):
    """Decode a payload with vLLM's decoder, and check that encoding the result with vLLM gives the
    same values.
    """
    batch = DECODER.decode(payload)
    assert type(batch.ts) is float and batch.data_parallel_rank == 2
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch)) == msgspec.msgpack.decode(payload)
    return batch


def through_bytes(events):
    return decode_batch(encode_batch(WireBatch(0.0, events))).events


def test_media_and_kinds_have_the_same_names_as_in_vllm():
    assert MEDIUM == GPU


@pytest.mark.parametrize("seed", range(10))
def test_router_with_vllms_classes_reads_live_messages_and_replays(seed):
    """The router misses messages and requests a replay as vLLM's clients do. Its view must then
    equal the set of cached blocks.
    """
    rng = random.Random(seed)
    user, view = CacheUser(rng), RouterView()
    with (
        zmq.Context() as context,
        EventPublisher(
            LOCAL, LOCAL, topic="kv@pod@model", data_parallel_rank=2, context=context
        ) as publisher,
    ):
        live = context.socket(zmq.SUB)
        live.subscribe("kv@pod@model")
        live.connect(publisher.endpoint)
        asker = context.socket(zmq.DEALER)
        asker.connect(publisher.replay_endpoint)
        num_published = num_missed = 0
        first = next_seq = publisher._buffer.stop - 1  # the batch that announces an empty cache

        def work_and_publish():
            nonlocal num_published
            user.work()
            events = user.manager.cache.drain_events()
            publisher.publish(events)
            num_published += bool(events)
            return bool(events)

        # a subscription takes effect some time after `connect`
        wait_for(lambda: work_and_publish() and live.poll(20))

        def replay():
            nonlocal next_seq
            asker.send_multipart([b"", next_seq.to_bytes(8, "big")])
            while True:
                assert asker.poll(DEADLINE_S * 1000)
                _, _, sequence, payload = asker.recv_multipart()
                if sequence == ZmqEventPublisher.END_SEQ:
                    return
                assert int.from_bytes(sequence, "big") == next_seq
                view.apply(check_payload(payload))
                next_seq += 1

        for _ in range(200):
            published = work_and_publish()
            while live.poll(DEADLINE_S * 1000 if published else 0):
                published = False
                topic, sequence, payload = live.recv_multipart()
                assert topic == b"kv@pod@model" and len(sequence) == 8
                if rng.random() < 0.2:
                    num_missed += 1
                    continue
                if int.from_bytes(sequence, "big") < next_seq:
                    continue
                if int.from_bytes(sequence, "big") > next_seq:
                    replay()
                    continue
                view.apply(check_payload(payload))
                next_seq += 1
        wait_for(lambda: publisher.counts.batches == num_published)
        replay()
        assert next_seq == first + 1 + num_published and num_missed > 0
        assert view.hashes() == user.cached()
        ours = CacheView()
        ours.apply(through_bytes(publisher._translator.snapshot()))
        for place in ours.places:
            for each in ours.hashes(*place):
                block = ours.block(each, *place)
                assert view[place][each] == (block.parent, block.token_ids)
        live.close(linger=0)
        asker.close(linger=0)


def test_snapshot_is_decoded_by_vllms_classes():
    user = CacheUser(random.Random(1))
    with (
        zmq.Context() as context,
        EventPublisher(
            LOCAL, LOCAL, buffer_steps=2, data_parallel_rank=2, context=context
        ) as publisher,
    ):
        num_published = 0
        while num_published < 50:
            user.work()
            events = user.manager.cache.drain_events()
            publisher.publish(events)
            num_published += bool(events)
        wait_for(lambda: publisher.counts.batches == num_published)
        asker = context.socket(zmq.DEALER)
        asker.connect(publisher.replay_endpoint)
        asker.send_multipart([b"", bytes(8)])
        view = RouterView()
        assert asker.poll(DEADLINE_S * 1000)
        view.apply(check_payload(asker.recv_multipart()[3]))
        assert asker.recv_multipart()[2] == ZmqEventPublisher.END_SEQ
        assert view.hashes() == user.cached()
        asker.close(linger=0)


def test_optional_event_fields_equal_those_of_vllm():
    manager = KVCacheManager.for_groups(
        [GroupSpec("full_attention", 4), GroupSpec("sliding_window", 4, {"window": 6})],
        60,
        200,
        enable_events=True,
        num_host_blocks=30,
        host_write="through",
    )
    request = Request(
        "r", range(30), lora=("sql", "/a"), mm_items=[("cat", 6, 3)], cache_salt="t", session="s"
    )
    for new in ([request], []):
        plan = manager.step(new=new)
        manager.report(StepReport(plan.step_id, completed=True))
    events = EventTranslator("vllm-none-hash").translate(manager.cache.drain_events())
    batch = check_payload(encode_batch(WireBatch(1.0, events, 2)))
    first = batch.events[0]
    assert (first.lora_name, first.session_id, first.medium) == ("sql", "s", "GPU")
    assert first.extra_keys[:3] == [("sql", "t"), ("sql", ["cat", 2]), ("sql", ["cat", -2])]
    windows = {e.group_idx: e.kv_cache_spec_sliding_window for e in batch.events}
    assert windows == {0: None, 1: 6}
    assert {e.medium for e in batch.events} == {"GPU", "CPU"}


@pytest.mark.parametrize("seed", range(5))
def test_our_reader_follows_vllms_publisher(seed):
    """Events are published with vLLM's own classes and sockets, and some messages are lost."""
    rng = random.Random(seed)
    ports = [free_port() for _ in range(2)]
    # vLLM binds to an address that contains a star, and connects to any other address.
    theirs = ZmqEventPublisher(
        0,
        endpoint=f"tcp://*:{ports[0]}",
        replay_endpoint=f"tcp://127.0.0.1:{ports[1]}",
        topic="kv@a@b",
    )
    user = CacheUser(rng)
    translator = EventTranslator("vllm-none-hash")

    class Lossy(EventSubscriber):
        def _take(self, frames):
            if rng.random() < 0.7:
                super()._take(frames)

    places = [f"tcp://127.0.0.1:{port}" for port in ports]
    with Lossy(*places, topic="kv@a@b") as reader:
        num_published = 0
        for _ in range(100):
            user.work()
            events = translator.translate(user.manager.cache.drain_events())
            if events:
                payload = encode_batch(WireBatch(time.time(), events))
                theirs.publish(DECODER.decode(payload))
                num_published += 1
            if rng.random() < 0.3:
                reader.poll(0.01)
        wait_for(lambda: reader.catch_up() and reader.next_seq == num_published)
        assert shown(reader.view) == user.cached()
        user.check_content(reader.view)
        assert reader.counts.restarts == 0 and reader.counts.malformed == 0
    theirs.shutdown()


def test_events_written_by_vllm_are_read_unchanged():
    """Covers hashes that are digests, a storage medium, and host blocks without tokens."""
    stored = BlockStored(
        block_hashes=[b"a" * 32, b"b" * 32],
        parent_block_hash=None,
        token_ids=[],
        block_size=16,
        lora_id=3,
        medium="STORAGE",
        lora_name="sql",
        group_idx=1,
        locality="LOCAL",
        ownership="tier-2",
    )
    payload = msgspec.msgpack.encode(
        KVEventBatch(ts=1.0, events=[stored, AllBlocksCleared(), stored])
    )
    view = CacheView()
    view.apply(decode_batch(payload).events)
    assert view.hashes("STORAGE", 1) == {b"a" * 32, b"b" * 32}
    assert view.block(b"a" * 32, "STORAGE", 1) == (None, (), 16, "sql", None)
