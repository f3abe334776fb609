# SPDX-License-Identifier: Apache-2.0
"""Events over sockets: publishing, replay, access control, and readers."""

import contextlib
import itertools
import os
import random
import resource
import socket
import struct
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

import msgspec
import zmq

from kvcache import KVCacheManager, Request
from kvcache.events import AllBlocksCleared, BlockStored
from kvcache_exchange.router_events import (
    CacheView,
    EventPublisher,
    EventSubscriber,
    replay_server,
    subscriber,
)
from kvcache_exchange.router_events.replay_buffer import ReplayBuffer
from kvcache_exchange.router_events.translator import EventTranslator
from kvcache_exchange.router_events.wire import (
    EVENT_ENCODINGS,
    WireBatch,
    WireCleared,
    decode_batch,
    decode_sequence,
    encode_batch,
    encode_sequence,
)
from tests.machinery.shared import sampled

LOCAL = "tcp://127.0.0.1:0"
# Each test process uses a separate loopback address, so that no other process can take a port
# between two binds.
OWN = f"tcp://127.1.{os.getpid() >> 8 & 255}.{os.getpid() & 255}:0"
DEADLINE_S = 60


def wait_for(condition):
    until = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.005)


def follow(reader, condition):
    """Poll until the condition holds."""
    wait_for(lambda: reader.poll(0.01) < 0 or condition())


def tokens_event(first, num_blocks=1, group=0):
    """Return an event for blocks of 4 tokens whose hashes are consecutive numbers, starting with
    `first`.
    """
    hashes = np.array([[0] * 24 + [*struct.pack(">Q", first + i)] for i in range(num_blocks)])
    tokens = np.arange(4 * num_blocks, dtype=np.int32)
    return BlockStored(hashes.astype(np.uint8), bytes(32), tokens, 4, group)


@pytest.fixture
def context():
    with zmq.Context() as context:
        yield context
        context.destroy(linger=0)


@pytest.fixture
def publisher_of(context):
    """Create publishers, by default at local endpoints with replay, and close them after the test."""
    with contextlib.ExitStack() as stack:

        def make(endpoint=LOCAL, replay_endpoint=LOCAL, **options):
            made = EventPublisher(endpoint, replay_endpoint, context=context, **options)
            return stack.enter_context(made)

        yield make


@pytest.fixture
def publisher(publisher_of):
    return publisher_of(topic="kv@pod@model")


def first_of(publisher):
    """Return the number of the first batch after the one that announces an empty cache."""
    return publisher._buffer.stop - publisher.counts.batches


def numbers(publisher, answers):
    """Return the numbers of answers, counted from the first batch of events."""
    return [number - first_of(publisher) for _, number, _ in answers]


def publish(publisher, count, first=0):
    for i in range(first, first + count):
        publisher.publish([tokens_event(i)])
    wait_for(lambda: publisher.counts.batches >= first + count)


def subscribed(reader, publisher):
    """Publish until the reader receives a batch, because a subscription takes effect some time
    after `connect`.

    Afterwards, the reader's view is exact and empty. Return the number of the next batch.
    """
    num_published = publisher.counts.batches

    def hears():
        nonlocal num_published
        publisher.publish([AllBlocksCleared()])
        num_published += 1
        reader.poll(0.02)
        return reader._last_live >= 0

    wait_for(hears)
    last = first_of(publisher) + num_published - 1
    follow(reader, lambda: reader._last_live == last)
    assert reader.is_exact and len(reader.view) == 0 and reader.next_seq == last + 1
    return num_published


class Asker:
    """A client that uses the replay socket directly."""

    def __init__(self, context, publisher, kind=None):
        self.socket = context.socket(zmq.DEALER if kind is None else kind)
        self.socket.linger = 0
        self.socket.connect(publisher.replay_endpoint)

    def ask(self, *frames):
        self.socket.send_multipart(frames)

    def answers(self, num_delimiters=1):
        """Return (topic, sequence, payload) of every response up to the end marker."""
        found = []
        while True:
            assert self.socket.poll(DEADLINE_S * 1000), "no answer"
            frames = self.socket.recv_multipart()
            assert frames[:num_delimiters] == [b""] * num_delimiters
            assert len(frames) == num_delimiters + 3
            topic, sequence, payload = frames[num_delimiters:]
            if sequence == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                return found
            found.append((topic, decode_sequence(sequence), payload))


def test_messages_have_three_frames_and_increasing_numbers(context, publisher):
    reader = context.socket(zmq.SUB)
    reader.subscribe(b"kv@pod")
    reader.connect(publisher.endpoint)
    before = time.time()
    num_published, first = 0, first_of(publisher)
    # A subscription takes effect some time after `connect`.
    while num_published < 3 or not reader.poll(20):
        publisher.publish([tokens_event(num_published)])
        num_published += 1
    next_seq = None
    while next_seq != num_published:
        assert reader.poll(DEADLINE_S * 1000)
        topic, sequence, payload = reader.recv_multipart()
        batch = decode_batch(payload)
        if decode_sequence(sequence) < first:
            assert batch.events == [WireCleared()]
            continue
        (hash_,) = batch.events[-1].block_hashes
        assert topic == b"kv@pod@model" and sequence == encode_sequence(first + hash_)
        assert next_seq in (None, hash_) and len(batch.events) == 1 + (hash_ == 0)
        assert batch.data_parallel_rank == 0 and before <= batch.ts <= time.time()
        next_seq = hash_ + 1
    wait_for(lambda: publisher.counts[:2] == (num_published, publisher._buffer.num_bytes))


def test_pending_batches_are_sent_when_the_publisher_closes(context):
    publisher = EventPublisher(LOCAL, context=context)
    with EventSubscriber(publisher.endpoint, context=context) as reader:
        publisher.publish([tokens_event(0)])
        while not reader.poll(0.01):
            publisher.publish([tokens_event(1)])
        for i in range(2, 300):
            publisher.publish([tokens_event(i)])
        publisher.close(timeout_s=DEADLINE_S)
        follow(reader, lambda: 299 in reader.view.hashes())
        assert reader.view.hashes() >= {*range(2, 300)} and reader.counts.gaps <= 1


def test_closed_publisher_or_subscriber_raises(publisher):
    reader = EventSubscriber("inproc://nobody")
    for each in (publisher, publisher, reader):
        each.close()
    with pytest.raises(RuntimeError, match="the publisher is closed"):
        publisher.publish([AllBlocksCleared()])
    with pytest.raises(RuntimeError, match="the subscriber is closed"):
        reader.poll()


def test_close_accepts_any_finite_timeout_and_others_leave_the_publisher_open(publisher):
    invalid = [(each, ValueError) for each in (float("nan"), float("inf"), -5.0)]
    for timeout_s, error in (*invalid, (True, TypeError), (None, TypeError)):
        with pytest.raises(error, match="timeout_s is "):
            publisher.close(timeout_s)
    publisher.publish([])
    publish(publisher, 1)
    assert publisher.counts.batches == 1  # there is no batch without events
    publisher.close(1e300)
    assert not publisher._thread.is_alive()
    assert publisher._wake.fileno() == publisher._woken.fileno() == -1


def test_failed_thread_is_reported(publisher_of, monkeypatch):
    publisher = publisher_of(max_queue_size=1)
    monkeypatch.setattr(publisher._translator, "translate", lambda _: 1 / 0)
    with pytest.raises(RuntimeError, match="the publisher's thread failed") as told:
        wait_for(lambda: publisher.publish([AllBlocksCleared()]))
    assert isinstance(told.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    "endpoint",
    [
        *("tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://10.0.0.1:5557"),
        *("tcp://localhost:5557", "tcp://eth0:5557", "tcp://127.0.0.1.example:5557", "tcp://:5557"),
    ],
)
@pytest.mark.parametrize("name", ["endpoint", "replay_endpoint"])
def test_addresses_other_than_the_loopback_require_allow_remote(context, endpoint, name):
    with pytest.raises(ValueError, match=f"^{name} is .*expected a loopback address"):
        EventPublisher(**({"endpoint": LOCAL} | {name: endpoint}), context=context)


@pytest.mark.parametrize("endpoint", ["", "5557", "udp://127.0.0.1:1", "tcp://", "tcp:127.0.0.1:1"])
def test_invalid_endpoint_is_rejected(context, endpoint):
    with pytest.raises(ValueError, match=r"endpoint is .*expected tcp://ADDRESS:PORT"):
        EventPublisher(endpoint, allow_remote=True, context=context)


def test_endpoints_other_than_ipv4_loopback_are_accepted_if_local_or_allowed(context, tmp_path):
    ipc, wildcard = f"ipc://{tmp_path}/events", "tcp://0.0.0.0:0"
    for endpoint in ("tcp://[::1]:0", ipc, "inproc://events", wildcard):
        if "::1" in endpoint and not _has_ipv6():
            continue
        options = {"allow_remote": True} if endpoint == wildcard else {}
        with (
            EventPublisher(endpoint, context=context, **options) as publisher,
            EventSubscriber(publisher.endpoint, context=context) as reader,
        ):
            publisher.publish([tokens_event(0)])
            wait_for(lambda p=publisher, r=reader: r.poll(0.01) or p.publish([tokens_event(1)]))


def _has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_failed_bind_releases_all_resources(context):
    with EventPublisher(LOCAL, context=context) as first:
        address = OWN.removeprefix("tcp://").partition(":")[0]
        with socket.create_server((address, 0)) as free:
            place = f"tcp://{address}:{free.getsockname()[1]}"
        with pytest.raises(
            OSError, match=r"replay_endpoint is .*[Aa]ddress already in use"
        ) as told:
            EventPublisher(place, first.endpoint, context=context)
        # The traceback keeps the failed publisher alive, so this shows that the constructor closed
        # it explicitly.
        assert told.traceback
        with at(place, None, context):
            pass
        with pytest.raises(OSError, match=r"^.*endpoint is .*[Aa]ddress already in use"):
            EventPublisher(first.endpoint, context=context)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"topic": 3}, TypeError, "topic is 3"),
        ({"data_parallel_rank": -1}, ValueError, "data_parallel_rank is -1"),
        ({"buffer_steps": 0}, ValueError, "buffer_steps is 0"),
        ({"buffer_bytes": 0}, ValueError, "buffer_bytes is 0"),
        ({"hwm": 0}, ValueError, "hwm is 0"),
        ({"event_encoding": "list"}, ValueError, "event_encoding is 'list': expected one of map, array"),
        ({"max_queue_size": 0}, ValueError, "max_queue_size is 0"),
        ({"hash_seed": 5}, TypeError, "hash_seed is 5"),
        ({"allow_remote": 1}, TypeError, "allow_remote is 1"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_rejected_by_name(publisher_of, options, error, message):
    with pytest.raises(error, match=message):
        publisher_of(**options)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("medium", each) for each in (np.zeros(2), "disk", None, ["gpu"])),
        *(("block_hashes", each) for each in (None, np.zeros(3, np.uint8), np.zeros((1, 32)))),
        *(("token_ids", each) for each in ([1, 2], np.zeros(3, np.int32), np.zeros(4))),
        *(("block_size", 0), ("group", -1), ("parent_hash", "a"), ("lora", "a"), ("session", 1)),
    ],
)
def test_malformed_event_does_not_end_the_publisher_thread(publisher, field, value):
    """Found by the fuzzer: the publisher's thread failed on such an event and published nothing
    afterwards.
    """
    with pytest.raises((TypeError, ValueError), match=rf"events\[1\]\.{field} "):
        publisher.publish([tokens_event(0), replace(tokens_event(1), **{field: value})])
    with pytest.raises(TypeError, match=r"events\[1\] is 'cleared': expected an event"):
        publisher.publish([AllBlocksCleared(), "cleared"])
    publish(publisher, 1)
    assert publisher.counts.batches == 1


def test_poll_accepts_any_finite_timeout(context, publisher):
    """Found by the fuzzer: ZMQ counts milliseconds in 32 bits."""
    with reader_of(publisher, context) as reader:
        subscribed(reader, publisher)
        for timeout_s in (2**40, 1e300):
            publisher.publish([tokens_event(1)])
            assert reader.poll(timeout_s) > 0


def test_invalid_queries_of_a_view_are_reported():
    """Found by the fuzzer: some of these calls never returned."""
    view = CacheView()
    for ask, name in (
        (lambda: view.num_leading([1], mediums=itertools.repeat("GPU")), "mediums"),
        (lambda: view.num_leading(itertools.count()), "block_hashes"),
        (lambda: view.num_leading([[1]]), r"block_hashes\[0\]"),
        (lambda: view.num_leading([1], group=[]), "group"),
        (lambda: view.block(1.5), "block_hash"),
        (lambda: view.hashes(medium=[]), "medium"),
        (lambda: view.apply([None]), r"events\[0\]"),
    ):
        with pytest.raises(TypeError, match=f"^{name} is "):
            ask()


@pytest.mark.parametrize("num_delimiters", [1, 0])
def test_batches_are_replayed_from_a_number_on(context, publisher, num_delimiters):
    publish(publisher, 100)
    asker = Asker(context, publisher)
    for first in (0, 37, 99, 100, 5000, 2**62):
        asker.ask(*[b""] * num_delimiters, encode_sequence(first_of(publisher) + first))
        answers = asker.answers(num_delimiters)
        assert numbers(publisher, answers) == [*range(first, 100)]
        for number, (topic, _, payload) in zip(range(first, 100), answers):
            assert topic == b"kv@pod@model"
            assert decode_batch(payload).events[-1].block_hashes == [number]
    assert publisher.counts.replays == 6 and publisher.counts.snapshots == 0


MALFORMED = [
    [b""],
    [b"", b""],
    [b"", b"\0" * 7],
    [b"", b"\0" * 9],
    [b"", b"\xff" * 8],
    [b"", struct.pack(">q", -2)],
    [b"", struct.pack(">Q", 2**63)],
    [b"x", encode_sequence(0)],
    [b"", b"", encode_sequence(0)],
    [b"", encode_sequence(0), encode_sequence(0)],
    [b"", encode_sequence(0), b""],
    [b"cos\nsystem\n(S'true'\ntR."],
    [b""] * 200,
]


def test_malformed_requests_are_only_counted(context, publisher):
    publish(publisher, 2)
    asker = Asker(context, publisher)
    for i, frames in enumerate(MALFORMED):
        asker.ask(*frames)
        wait_for(lambda i=i: publisher.counts.refused_requests == i + 1)
    assert not asker.socket.poll(50) and publisher.counts.replays == 0
    asker.ask(b"", encode_sequence(0))
    assert numbers(publisher, asker.answers()) == [-1, 0, 1]


def test_oversized_requests_and_bytes_that_are_not_zmq_do_not_affect_other_readers(
    context, publisher
):
    rng = random.Random(7)
    for frame in (bytes(257), bytes(2**20)):
        Asker(context, publisher).ask(b"", frame)
    other = Asker(context, publisher)
    other.ask(b"", encode_sequence(0))
    assert numbers(publisher, other.answers()) == [-1]
    # ZMQ discarded the oversized requests before they reached the publisher.
    assert publisher.counts.refused_requests == 0
    for endpoint in (publisher.endpoint, publisher.replay_endpoint):
        host, port = endpoint.removeprefix("tcp://").split(":")
        for size in (1, 64, 5000):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(rng.randbytes(size))
    publish(publisher, 2)
    asker = Asker(context, publisher)
    asker.ask(b"", encode_sequence(0))
    assert numbers(publisher, asker.answers()) == [-1, 0, 1]


@pytest.mark.slow
def test_stalled_reader_does_not_block_others_and_is_dropped_once_it_disconnects(
    context, publisher
):
    for i in range(3000):
        publisher.publish([tokens_event(i, num_blocks=200)])
    wait_for(lambda: publisher.counts.batches == 3000)
    idle, gone = Asker(context, publisher), Asker(context, publisher)
    for each in (idle, gone):
        each.socket.rcvhwm = 1
        each.ask(b"", encode_sequence(0))
    wait_for(lambda: publisher.counts.replays == 2)
    asker = Asker(context, publisher)
    asker.ask(b"", encode_sequence(0))
    assert numbers(publisher, asker.answers()) == [*range(-1, 3000)]
    gone.socket.close()
    wait_for(lambda: publisher.counts.given_up_replays == 1)
    publish(publisher, 1, first=3000)
    # The replay is late but complete.
    assert numbers(publisher, idle.answers()) == [*range(-1, 3000)]


def large_batches(publisher, count):
    """Publish batches of about 200 KB each."""
    for i in range(count):
        publisher.publish([tokens_event(5000 * i, num_blocks=5000)])
    wait_for(lambda: publisher.counts.batches == count)


def idle_readers(context, publisher, count):
    """Open readers that request a replay of everything but never read."""
    readers = [Asker(context, publisher) for _ in range(count)]
    for each in readers:
        each.socket.rcvhwm, each.socket.rcvbuf = 1, 4096
        each.socket.disconnect(publisher.replay_endpoint)
        each.socket.connect(publisher.replay_endpoint)  # reconnect with these options
        each.ask(b"", encode_sequence(0))
    wait_for(lambda: publisher.counts.replays == count)
    return readers


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() >> 20


@pytest.mark.slow
@pytest.mark.parametrize("most", [replay_server.MOST_BYTES, 2**21])
def test_bytes_queued_for_readers_are_bounded(context, publisher, monkeypatch, most):
    monkeypatch.setattr(replay_server, "MOST_BYTES", most)
    large_batches(publisher, 60)
    size, before = publisher.counts.payload_bytes // 60, resident_mib()
    readers = idle_readers(context, publisher, 30)

    def is_filled():
        held = publisher._server.held_bytes
        if most == 2**21:
            return sum(held.values()) > 2**20
        return len(held) == 30 and all(size <= each for each in held.values())

    wait_for(is_filled)
    time.sleep(0.5)  # the queue does not grow further
    held = publisher._server.held_bytes
    assert resident_mib() - before < 64 < 30 * 60 * size >> 20
    assert max(held.values()) <= replay_server.MOST_BYTES_OF_A_READER + size
    assert sum(held.values()) <= most or most != 2**21
    assert len(readers) == 30
    if most == 2**21:
        return  # some readers wait for their first byte
    # Readers that stall for long are dropped.
    monkeypatch.setattr(replay_server, "SLOW_SECONDS", 1.0)
    wait_for(lambda: publisher.counts.given_up_replays == 30)
    assert not publisher._server.is_busy
    monkeypatch.setattr(replay_server, "SLOW_SECONDS", DEADLINE_S)
    asker = Asker(context, publisher)
    asker.ask(b"", encode_sequence(0))
    assert len(asker.answers()) == 61
    wait_for(lambda: not any(publisher._server.held_bytes.values()))


def test_batch_larger_than_the_bounds_is_replayed(context, publisher, monkeypatch):
    monkeypatch.setattr(replay_server, "MOST_BYTES", 1000)
    monkeypatch.setattr(replay_server, "MOST_BYTES_OF_A_READER", 100)
    large_batches(publisher, 5)
    asker = Asker(context, publisher)
    asker.ask(b"", encode_sequence(0))
    assert numbers(publisher, asker.answers()) == [*range(-1, 5)]


def test_the_buffer_is_bounded_in_batches_and_bytes():
    buffer = ReplayBuffer(max_batches=3, max_bytes=100)
    for i in range(5):
        buffer.append(bytes([i] * 10))
    assert (buffer.first, buffer.stop, buffer.num_bytes) == (2, 5, 30)
    assert [buffer[i][0] for i in range(2, 5)] == [2, 3, 4]
    for number in (1, 5, -1):
        with pytest.raises(IndexError):
            buffer[number]
    buffer.append(bytes(85))
    assert (buffer.first, buffer.stop, buffer.num_bytes) == (4, 6, 95)
    buffer.append(bytes(500))
    assert (buffer.first, buffer.stop, buffer.num_bytes) == (6, 7, 500)


@pytest.mark.parametrize("encoding", EVENT_ENCODINGS)
def test_replay_beyond_the_buffer_sends_the_whole_cache_content(context, publisher_of, encoding):
    publisher = publisher_of(buffer_steps=3, event_encoding=encoding)
    publish(publisher, 10)
    asker = Asker(context, publisher)
    asker.ask(b"", encode_sequence(first_of(publisher) + 2))
    ((_, number, payload),) = asker.answers()
    first = msgspec.msgpack.decode(payload)[1][0]
    assert isinstance(first, dict if encoding == "map" else list)
    events = decode_batch(payload).events
    assert number == publisher._buffer.stop - 1 and isinstance(events[0], WireCleared)
    assert sorted(h for e in events[1:] for h in e.block_hashes) == [*range(10)]
    asker.ask(b"", encode_sequence(0))
    asker.answers()
    assert publisher.counts.snapshots == 1  # one snapshot serves all pending requests
    asker.ask(b"", encode_sequence(first_of(publisher) + 7))
    assert numbers(publisher, asker.answers()) == [7, 8, 9]
    with reader_of(publisher, context) as reader:  # does not assume a restart
        for _ in range(3):
            assert reader.catch_up() and reader.view.hashes() == {*range(10)}
        assert publisher.counts.snapshots == 1 and reader.counts.restarts == 0


class Lossy(EventSubscriber):
    """A subscriber that drops some of the messages it receives."""

    loss = 0.0
    rng = random.Random(0)
    num_lost = 0

    def _take(self, frames):
        if self.rng.random() >= self.loss:
            super()._take(frames)
        else:
            self.num_lost += 1


def reader_of(publisher, context, kind=EventSubscriber, **options):
    return kind(publisher.endpoint, publisher.replay_endpoint, context=context, **options)


def test_without_replay_a_gap_stays_and_is_reported(context, publisher_of):
    publisher = publisher_of(LOCAL, None)
    with Lossy(publisher.endpoint, context=context) as reader:
        first = subscribed(reader, publisher)
        publish(publisher, 1, first)
        follow(reader, lambda: reader.next_seq == first_of(publisher) + first + 1)
        assert reader.is_exact
        reader.loss = 1.0
        publish(publisher, 1, first + 1)
        follow(reader, lambda: reader.num_lost == 1)
        reader.loss = 0.0
        publish(publisher, 1, first + 2)
        follow(reader, lambda: reader.next_seq == first_of(publisher) + first + 3)
        assert reader.view.hashes() == {first, first + 2} and not reader.is_exact
        with pytest.raises(ValueError, match="replay_endpoint is None"):
            reader.catch_up()
        publisher.publish([AllBlocksCleared()])
        follow(reader, lambda: reader.is_exact)
        assert len(reader.view) == 0


@pytest.fixture
def stranger(context):
    """Connect a reader of topic "kv@a" to a socket whose messages the test writes."""
    socket = context.socket(zmq.PUB)
    socket.bind("inproc://stranger")
    with EventSubscriber("inproc://stranger", topic="kv@a", context=context) as reader:
        time.sleep(0.1)
        yield reader, lambda *frames: socket.send_multipart(frames)
    socket.close()


GOOD = b"\x93\xcb\0\0\0\0\0\0\0\0\x90\0"  # a batch without events


def test_without_replay_decreasing_numbers_indicate_a_new_publisher(stranger):
    reader, say = stranger
    translator = EventTranslator("")
    for number, first in ((0, 10), (1, 11), (2, 12), (0, 20), (1, 21), (4, 24), (3, 33)):
        events = translator.translate([tokens_event(first)])
        say(b"kv@a", encode_sequence(number), encode_batch(WireBatch(0.0, events, 0)))
        follow(reader, lambda f=first: f in reader.view.hashes())
        if number == 1:
            assert reader.view.hashes() == {first - 1, first} and reader.is_exact
    assert reader.view.hashes() == {33} and not reader.is_exact
    assert reader.counts == (7, 2, 2, 0)


def test_other_topics_and_malformed_messages_are_ignored(stranger):
    reader, say = stranger
    for frames in (
        [b"kv@ab", encode_sequence(0), GOOD],
        [b"kv@a", encode_sequence(0)],
        [b"kv@a", b"\0", GOOD],
        [b"kv@a", encode_sequence(0), b"cos\nsystem\n."],
        [b"kv@a", encode_sequence(0), GOOD],
    ):
        say(*frames)
    follow(reader, lambda: reader.next_seq == 1)
    assert reader.counts == (1, 0, 0, 3) and reader.is_exact
    say(b"kv@a", encode_sequence(1), b"\xff\xff")
    follow(reader, lambda: reader.counts.malformed == 4)
    assert not reader.is_exact


def test_endless_messages_do_not_block_a_poll(stranger, monkeypatch):
    """Each poll processes a bounded number of messages, and the next poll continues after them."""
    monkeypatch.setattr(subscriber, "_MOST_MESSAGES", 4)
    reader, say = stranger
    for i in range(10):
        say(b"kv@a", encode_sequence(i), GOOD)
    wait_for(lambda: reader.poll(0.01) > 0)
    assert reader.next_seq <= 4
    polls = [reader.poll(0) for _ in range(4)]
    assert max(polls) <= 4 and reader.next_seq == 10


@pytest.mark.parametrize("topic", ["", "kv@a", "kv@a@m", "kv@a@m2", "kv@b@m"])
def test_only_batches_of_the_topic_are_replayed(context, publisher_of, topic):
    publisher = publisher_of(topic="kv@a@m")
    publish(publisher, 3)
    with reader_of(publisher, context, topic=topic) as reader:
        assert reader.catch_up()
        is_own = topic in ("", "kv@a@m")
        assert reader.view.hashes() == ({0, 1, 2} if is_own else set())
        assert reader.next_seq == (publisher._buffer.stop if is_own else 0)


def test_numbers_of_a_restarted_publisher_are_above_all_earlier_numbers(context):
    numbers = []
    for _ in range(3):
        with EventPublisher(LOCAL, LOCAL, context=context) as publisher:
            publish(publisher, 2)
            asker = Asker(context, publisher)
            asker.ask(b"", encode_sequence(numbers[-1] + 1 if numbers else 0))
            answers = asker.answers()
            assert publisher.counts.snapshots == 0
        numbers += [number for _, number, _ in answers]
        events = [decode_batch(payload).events for _, _, payload in answers]
        # The first batch announces an empty cache. So does the second one, for readers without
        # replay, which have not reconnected before.
        assert [WireCleared() in each for each in events] == [True, True, False]
        assert events[0] == [WireCleared()] and events[1][0] == WireCleared()
    assert numbers == sorted(set(numbers)) and len(numbers) == 9


@pytest.mark.slow
def test_slow_replay_does_not_block_a_poll(context):
    publisher, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
    publisher.bind("inproc://dripping")
    port = router.bind_to_random_port("tcp://127.0.0.1")
    is_over = threading.Event()

    def drip():
        caller, first = None, 0
        while not is_over.wait(0.05):
            if router.poll(0):
                caller, _, number = router.recv_multipart()
                first = decode_sequence(number)
            if caller is not None:
                router.send_multipart([caller, b"", b"", encode_sequence(first), GOOD])
                first += 1

    thread = threading.Thread(target=drip)
    thread.start()
    replay_endpoint = f"tcp://127.0.0.1:{port}"
    with EventSubscriber(
        "inproc://dripping", replay_endpoint, replay_timeout_s=0.5, context=context
    ) as reader:
        for _ in range(2):  # the second poll continues where the first one stopped
            before = reader.next_seq

            def has_more(before=before):
                start = time.monotonic()
                reader.poll()
                assert time.monotonic() - start < 15
                return reader.next_seq > before

            # A poll returns nothing if no message arrives within its half second.
            wait_for(has_more)
    is_over.set()
    thread.join()
    publisher.close()
    router.close()


def test_request_to_a_silent_publisher_is_retried(context, monkeypatch):
    asked, now, replay = [], time.monotonic(), subscriber.replay
    monkeypatch.setattr(subscriber, "replay", lambda *args: asked.append(args) or replay(*args))
    mute = context.socket(zmq.ROUTER)
    port = mute.bind_to_random_port("tcp://127.0.0.1")
    with (
        EventPublisher(LOCAL, LOCAL, context=context) as publisher,
        EventSubscriber(
            publisher.endpoint, f"tcp://127.0.0.1:{port}", replay_timeout_s=0.2, context=context
        ) as reader,
    ):
        publish(publisher, 3)
        with monkeypatch.context() as patch:
            patch.setattr(subscriber, "time", SimpleNamespace(monotonic=lambda: now))
            assert not reader.catch_up() and not reader.is_exact and len(reader.view) == 0
            reader.poll()  # must not send another request immediately
            assert len(asked) == 1
        reader._replay_endpoint = publisher.replay_endpoint
        follow(reader, lambda: reader.is_exact)
        assert reader.view.hashes() == {*range(3)}
    mute.close()


def restarted(publisher, context, **options):
    """Close a publisher and start another one at the same endpoints."""
    publisher.close()
    return at(publisher.endpoint, publisher.replay_endpoint, context, **options)


def at(endpoint, replay_endpoint, context, **options):
    """Start a publisher at endpoints that have just been closed.

    Retries until ZMQ's thread has released them.
    """
    until = time.monotonic() + DEADLINE_S
    while True:
        try:
            return EventPublisher(endpoint, replay_endpoint, context=context, **options)
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.01)


def test_messages_of_an_earlier_publisher_are_not_attributed_to_the_next(context):
    first = EventPublisher(OWN, OWN, context=context)
    with reader_of(first, context) as reader:
        publish(first, 6, subscribed(reader, first))
        wait_for(lambda: reader._socket.poll(10))  # the messages are queued but have not been read
        time.sleep(0.1)
        with restarted(first, context) as second:
            for i in range(8):
                second.publish([tokens_event(100 + i)])
            wait_for(lambda: second.counts.batches == 8)
            assert reader._connections.poll(DEADLINE_S * 1000)
            while reader.poll(0.2):
                pass
            assert reader.view.hashes() == {*range(100, 108)}
            assert reader.next_seq == second._buffer.stop


@pytest.mark.parametrize("num_before", sampled([5, 7, 8]))
@pytest.mark.parametrize("num_after", sampled([0, 3, 7, 8, 20], 2))
@pytest.mark.parametrize("polls", [False, True])
def test_restarted_publisher_is_followed(context, num_before, num_after, polls):
    """The new publisher sends fewer batches than the old one, as many, or more, so sequence numbers
    alone do not always reveal the restart.
    """
    first = EventPublisher(OWN, OWN, context=context)
    with reader_of(first, context) as reader:
        publish(first, num_before)
        assert reader.catch_up() and reader.view.hashes() == {*range(num_before)}
        with restarted(first, context) as second:
            for i in range(num_after):
                second.publish([tokens_event(100 + i)])
            wait_for(lambda: second.counts.batches == num_after)
            expected = {*range(100, 100 + num_after)}
            if polls:  # otherwise, only the new connection reveals the restart
                follow(reader, lambda: reader.view.hashes() == expected)
            assert reader.catch_up() and reader.view.hashes() == expected
            assert reader.next_seq == second._buffer.stop and reader.counts.restarts >= 1
            publish(second, 1, first=num_after)
            assert reader.catch_up() and num_after in reader.view.hashes()


def test_prompt_lookup_returns_the_cached_prefix(context, publisher):
    manager = KVCacheManager(4, 30, 200, enable_events=True, num_preallocate_tokens=0)
    request = Request("a", range(13))
    manager.step(new=[request])
    publisher.publish(manager.cache.drain_events())
    hashes = [int.from_bytes(each[-8:].tobytes(), "big") for each in manager.cache.hashes(request)]
    with reader_of(publisher, context) as reader:
        wait_for(lambda: reader.catch_up() and reader.next_seq == first_of(publisher) + 1)
        view = reader.view
        assert view.num_leading(hashes) == 3 and view.num_leading([*hashes, 5]) == 3
        assert view.num_leading([5, *hashes]) == 0
        assert view.num_leading(hashes, mediums=["CPU"]) == 0
        assert view.num_leading(hashes, group=1) == 0


def test_without_replay_a_restarted_publisher_is_followed(context):
    first = EventPublisher(OWN, context=context)
    with EventSubscriber(first.endpoint, context=context) as reader:
        before = subscribed(reader, first)
        num_before = before + 100
        publish(first, 100, before)
        follow(reader, lambda: reader.next_seq == first_of(first) + num_before)
        first.close()
        with restarted(first, context) as second:
            follow(reader, lambda: not reader.is_exact)  # the reader has reconnected
            publish(second, 1, 0)
            follow(reader, lambda: reader.view.hashes() == {0})
            assert reader.is_exact
    assert reader.counts.restarts == 1
