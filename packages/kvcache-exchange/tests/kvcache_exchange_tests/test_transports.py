# SPDX-License-Identifier: Apache-2.0
"""Transports between two sides: correct bytes, clear errors, and deadlines."""

import contextlib
import errno
import importlib.util
import itertools
import json
import os
import random
import re
import signal
import socket
import struct
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvcache.transfer.transport.base import TransferError
from kvcache.transfer.transport.spans import Spans
from kvcache_exchange.transport import connection, lane, staged
from kvcache_exchange.transport.channel import ChannelError, receive_frame, send_frame
from kvcache_exchange.transport.factory import make_transport
from kvcache_exchange.transport.metadata import TRANSPORT_VERSION
from kvcache_exchange.transport.registered import RegisteredMemory
from tests.machinery.shared import sampled, seed_of_test
from tests.machinery.transport_peer import POOL_BYTES, Peer, Side, pattern

NAMES = [
    "tcp",
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"
        ),
    ),
]
SMALL = 512  # bytes; NIXL packs fragments of this size
LARGE = 64 << 10  # bytes; NIXL moves fragments of this size directly


def wait_until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def side_of():
    """Create sides in this process, and close them after the test."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Side(*args, **options))


@pytest.fixture
def side(side_of, name):
    return side_of(name)


@pytest.fixture
def peer(side_of, name):
    """A side with `pattern(1)`, to which `side` is not connected yet."""
    return side_of(name, seed=1)


def check_reads(side, peer, size=SMALL, seed=1):
    """Read the beginning of the peer's memory, and check the bytes."""
    side.pool[:size] = 0
    side.read(peer, 0, 0, size).wait(20)
    assert (side.pool[:size] == pattern(seed)[:size]).all()


def drawn(rng):
    """Draw (local, remote, length) of fragments that have at least 1 byte and are disjoint on each
    side.
    """
    sizes = [1, 7, 64, 512, 4096, 30_000, 70_000]
    length = np.array([rng.choice(sizes) for _ in range(rng.randint(1, 60))])
    length = length[np.cumsum(length) < POOL_BYTES]

    def placed():
        order = rng.sample(range(len(length)), len(length))
        spare = POOL_BYTES - int(length.sum())
        gaps = sorted(rng.randint(0, spare) for _ in order)
        at, found = 0, np.zeros(len(length), np.int64)
        for gap, i in zip(gaps, order):
            found[i] = gap + at
            at += int(length[i])
        return found

    return placed(), placed(), length


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({}, {}),
        ({"piece_bytes": 1 << 13}, {"digest": True}),  # chunked
        ({"digest": True}, {"piece_bytes": 1 << 14}),
    ],
)
def test_reads_write_exactly_the_requested_bytes(side_of, name, mine, theirs):
    seed = seed_of_test()
    print(f"seed {seed}")
    rng = random.Random(seed)
    side, peer = side_of(name, **mine), side_of(name, seed=1, **theirs)
    assert side.connect(peer) == peer.agent
    for _ in range(20):
        side.pool[:] = pattern(rng.randrange(1, 100))
        local, remote, length = drawn(rng)
        expected = side.pool.copy()
        for to, at, n in zip(local.tolist(), remote.tolist(), length.tolist()):
            expected[to : to + n] = peer.pool[at : at + n]
        read = side.read(peer, local, remote, length)
        read.wait(20)
        assert read.is_released and (side.pool == expected).all()


def test_accepting_side_can_read_at_once(side, peer, monkeypatch):
    """The side that accepted the connection can read from the connecting side as soon as `connect`
    has returned there, even if the thread that responds is slow.
    """
    opened = connection.Connection.open

    def slow(own, lane):
        if threading.current_thread().name == "kvcache greeting":
            time.sleep(0.5)
        opened(own, lane)

    monkeypatch.setattr(connection.Connection, "open", slow)
    side.connect(peer)
    peer.pool[:] = 0
    side.pool[:] = pattern(9)
    peer.read(side, 5, 100, 1000).wait(20)
    assert (peer.pool[5:1005] == pattern(9)[100:1100]).all()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_peer_responds_while_main_thread_is_busy(side, name, size):
    with Peer(name) as peer:
        side.connect(peer)
        peer.tell("busy")  # until the next command
        check_reads(side, peer, size)
        assert peer.ask("notifications", least=0) == {"found": []}


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_notification_arrives_once_after_the_bytes(side, name, size):
    with Peer(name) as peer:
        side.connect(peer)
        side.transport.send("peer", b"one")
        side.read(peer, 0, 0, size, notify=b"two").wait(20)
        nothing = np.empty(0, np.int64)  # an empty transfer completes and notifies
        assert side.read(peer, nothing, nothing, nothing, notify=b"three").poll()
        found = peer.ask("notifications", least=3)["found"]
        assert found == [[side.agent, each] for each in ("one", "two", "three")]


@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("what", ["bytes", "another request", "another number"])
def test_bytes_changed_in_transit_raise(side_of, name, size, what, monkeypatch):
    side, peer = side_of(name, digest=True), side_of(name, seed=1)
    side.connect(peer)
    digest, of_answer = lane.digest_of, lane.digest_of_answer

    def is_sender():
        return threading.current_thread().name.startswith("kvcache bytes to")

    def then_changed(piece):  # the bytes change after their digest was computed
        found = digest(piece)
        piece[0] ^= is_sender()
        return found

    def of_another(request, number, *others):
        if is_sender():
            number += what == "another number"
            request = "another" if what == "another request" else request
        return of_answer(request, number, *others)

    if what == "bytes":
        monkeypatch.setattr(lane, "digest_of", then_changed)
    monkeypatch.setattr(lane, "digest_of_answer", of_another)
    with pytest.raises(TransferError, match="the received bytes differ from the sent bytes"):
        side.read(peer, 0, 0, size, notify=b"read").wait(20)
    assert not side.pool.any()


def test_request_changed_before_its_frame_is_sent_is_rejected(side_of, name, monkeypatch):
    side, other = side_of(name, digest=True), side_of(name, seed=1)
    side.connect(other)
    put = connection.Connection.put

    def changed(own, header, payload=b""):
        payload = bytearray(payload)
        if header["op"] == "pull":
            payload[random.randrange(len(payload))] ^= 1
        put(own, header, bytes(payload))

    monkeypatch.setattr(connection.Connection, "put", changed)
    for _ in range(20):
        with pytest.raises(TransferError, match="the request differs from what was sent"):
            side.read(other, np.arange(4) * 64, np.arange(4) * 192, 64).wait(20)
        assert not side.pool.any()


def test_flipped_frame_bits_are_rejected():
    """Flips each bit of a numbered frame, including those of its lengths and digest.

    A corrupted frame, or one with another number, must never be accepted.
    """
    sent, content = bytearray(), ({"op": "done", "id": 3}, b"payload")
    send_frame(SimpleNamespace(sendall=sent.extend), *content, number=5)

    def taken(data, number=5):
        one, other = socket.socketpair()
        with one, other:
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            return receive_frame(other, number=number)

    assert taken(sent) == content
    for bit in range(8 * len(sent)):
        changed = bytearray(sent)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChannelError):
            taken(changed)
    for number in (4, 6):  # as if a frame were lost or duplicated
        with pytest.raises(ChannelError, match=f"frame {number} differs from what was sent"):
            taken(sent, number)


@pytest.mark.parametrize("size", sampled([SMALL, LARGE]))
def test_killed_peer_raises_and_restarted_peer_reconnects(side, name, size):
    with Peer(name) as peer:
        side.connect(peer)
        check_reads(side, peer, size)
        peer.signal(signal.SIGKILL)
        deadline = time.monotonic() + 15
        with pytest.raises(TransferError, match="'peer'"):
            while time.monotonic() < deadline:
                side.read(peer, 0, 0, size, timeout_s=1).wait(15)
        with pytest.raises(ConnectionError, match="was not connected"):
            side.connect(peer, timeout_s=2)
    with Peer(name, seed=2) as again:
        assert side.connect(again) == "peer"
        check_reads(side, again, size, seed=2)


def test_stopped_peer_raises_within_the_deadline(side, name):
    with Peer(name) as peer:
        side.connect(peer)
        peer.signal(signal.SIGSTOP)
        read = side.read(peer, 0, 0, SMALL, timeout_s=60)
        other = side.read(peer, SMALL, 0, SMALL, timeout_s=60)
        unawaited = side.read(peer, 2 * SMALL, 0, SMALL, timeout_s=0.3)
        assert not read.poll() and not read.is_released
        begin = time.monotonic()
        with pytest.raises(TransferError, match=r"not finished within 0\.5 s"):
            read.wait(0.5)
        assert time.monotonic() - begin < 15
        for each in (read, unawaited):
            with pytest.raises(TransferError, match="not finished within"):
                each.poll()
        wait_until(lambda: read.is_released)
        side.pool[:SMALL] = 3  # the peer must no longer change these bytes
        peer.signal(signal.SIGCONT)
        other.wait(20)  # this transfer was in flight at the same time as the abandoned one
        assert (side.pool[SMALL : 2 * SMALL] == pattern(1)[:SMALL]).all()
        assert (side.pool[:SMALL] == 3).all()
        check_reads(side, peer)


@pytest.mark.slow
def test_peer_that_holds_a_transfer_is_disconnected(side_of, name):
    side = side_of(name, timeout_s=1)
    with Peer(name) as peer:
        side.connect(peer)
        peer.signal(signal.SIGSTOP)
        with pytest.raises(TransferError, match=r"not finished within 0\.2 s"):
            side.read(peer, 0, 0, SMALL).wait(0.2)
        time.sleep(1.1)
        message = "is not connected: the peer has not answered for 1 s"
        with pytest.raises(TransferError, match=message):
            side.read(peer, 0, 0, SMALL)
        peer.signal(signal.SIGCONT)

        def reads_again():
            """The peer may not have noticed yet that the connection has ended."""
            try:
                side.connect(peer)
                check_reads(side, peer)
            except (ConnectionError, TransferError):
                return False
            return True

        wait_until(reads_again)


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_cancelled_transfer_does_not_affect_others(side_of, name, size):
    """Reads with many pieces are cancelled at any point."""
    seed = seed_of_test()
    print(f"seed {seed}")
    rng = random.Random(seed)
    part = POOL_BYTES // 4
    side, peer = side_of(name, piece_bytes=1 << 14), side_of(name, seed=1)
    side.connect(peer)
    told, found, theirs = [], [], pattern(1).reshape(4, part)
    for number in range(15):
        side.pool[:] = pattern(100 + number)
        begun = []
        for i in range(4):
            at = i * part + np.arange(0, part, size)
            begun.append(side.read(peer, at, at, size, notify=b"%d %d" % (number, i)))
        cancelled = rng.randrange(4)
        time.sleep(rng.choice([0, 0, rng.random() * 0.005]))
        begun[cancelled].cancel("for a test")
        wait_until(lambda each=begun[cancelled]: each.is_released)
        parts = side.pool.reshape(4, part)
        left, is_done = parts[cancelled].copy(), False
        try:
            is_done = begun[cancelled].poll()
        except TransferError as error:
            assert "for a test" in str(error)
        for i, each in enumerate(begun):
            if i != cancelled:
                each.wait(20)
            if i != cancelled or is_done:
                told.append((side.agent, b"%d %d" % (number, i)))
                assert (parts[i] == theirs[i]).all()
        assert (parts[cancelled] == left).all()
    wait_until(lambda: found.extend(peer.transport.notifications()) or set(told) <= set(found))
    assert sorted(found) == sorted(told)
    assert side.transport.peers() == [peer.agent]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unregister", "close", "disconnect"])
def test_hung_peer_does_not_delay_the_end_of_transfers(side_of, how, name):
    """Regression: `unregister` waited for a thread that did not copy, but waited for the peer."""
    side = side_of(name, piece_bytes=1 << 16)
    with Peer(name) as peer:
        side.connect(peer)
        check_reads(side, peer, POOL_BYTES)
        peer.signal(signal.SIGSTOP)
        known = side.transport._connections["peer"]
        # Send pieces for which the peer does not make room.
        known._flows[0].put(lane.Job(Spans.of([side.address], [POOL_BYTES], "local"), 2, 1 << 16))
        wait_until(lambda: known._flows[0]._num_begun % lane.PIECES_AHEAD == 0)
        read = side.read(peer, 0, 0, SMALL)
        time.sleep(0.1)
        begin = time.monotonic()
        if how == "unregister":
            side.transport.unregister([(side.address, side.pool.nbytes)])
        elif how == "close":
            side.transport.close()
        else:
            side.transport.disconnect("peer")
            with pytest.raises(TransferError, match="it was disconnected"):
                read.wait(20)
            assert side.transport.peers() == []
        assert time.monotonic() - begin < 10
        peer.signal(signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_closed_connections_leak_no_descriptors(side_of, name, kill):
    """UCX keeps the sockets of removed NIXL peers open, up to the number of sockets that 16
    connections use. Then, the agent is replaced, which closes its sockets.
    """
    count = {"tcp": (16, 8), "nixl": (36, 20)}[name][kill]
    most = {"tcp": 4, "nixl": 16 * 7 + 8}[name]
    options = {"timeout_s": 5.0, "piece_bytes": 8192}
    side, found, peer = side_of(name, **options), [], Peer(name, "peer 0", **options)
    first = len(os.listdir("/proc/self/fd"))
    for number in range(1, count + 1):

        def connects(peer=peer):  # until the peer has noticed that the earlier one has ended
            with contextlib.suppress(ConnectionError):
                return side.connect(peer)

        wait_until(connects)
        check_reads(side, peer)
        ended = peer
        if kill:
            peer.__exit__()
            peer = Peer(name, f"peer {number}", **options)
        with contextlib.suppress(ValueError):  # the connection may have ended
            side.transport.disconnect(ended.agent)
        side.transport.notifications()  # releases ended connections
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= first + most)
        found.append(len(os.listdir("/proc/self/fd")))
    peer.__exit__()
    if name == "nixl":
        assert any(later < earlier for earlier, later in itertools.pairwise(found)), found


def test_request_larger_than_memory_is_rejected(side_of):
    side, other = side_of("tcp"), side_of("tcp")
    peer = side.connect(other)
    wide = Spans(np.full(5, other.address), np.zeros(1, np.int64), np.array([POOL_BYTES]))
    known = side.transport._connections[peer]
    transfer = connection.StagedTransfer(known, 0, 5.0)
    known.put({"op": "pull", "id": known.track(transfer, wide, b"")}, wide.to_bytes())
    with pytest.raises(TransferError, match=f"expected at most {4 * POOL_BYTES}, 4 times"):
        transfer.wait(20)
    assert side.transport.peers() == [peer]


def test_excess_reads_are_rejected_individually(side_of, monkeypatch):
    monkeypatch.setattr(connection, "_MOST_WAITING", 4)
    side, other = side_of("tcp", piece_bytes=1 << 12), side_of("tcp")
    peer = side.connect(other)
    # Ignore frames, as if they had never arrived.
    monkeypatch.setattr(other.transport._connections[side.agent], "_on_done", lambda *_: None)
    reads = [side.read(other, 0, 0, 8) for _ in range(6)]
    for each in reads[4:]:
        with pytest.raises(TransferError, match="the peer refused: 4 reads are waiting"):
            each.wait(20)
    assert side.transport.peers() == [peer]


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_unregistered_memory_is_unreachable_until_it_is_registered_again(side_of, name, size):
    reader, source = side_of(name), side_of(name, seed=1)
    memory, metadata = [(source.address, source.pool.nbytes)], source.metadata

    def read():
        reader.transport.connect(metadata)
        reader.read(source, 0, 0, size, timeout_s=5).wait(5)

    read()
    source.transport.unregister(memory)
    assert not source.transport.peers() and not source.transport.memory.regions
    with pytest.raises(TransferError):
        read()
    source.connect(reader)
    with pytest.raises(ValueError, match=r"local has .* expected bytes of one registered"):
        source.read(reader, 0, 0, size)
    source.transport.unregister(memory)  # registering it again has no effect
    source.transport.register(memory)
    for each in source.transport.peers():
        source.transport.disconnect(each)
    assert source.metadata == metadata
    reader.pool[:] = 0
    wait_until(lambda: not reader.transport.peers())
    read()
    assert (reader.pool[:size] == pattern(1)[:size]).all() and not reader.pool[size:].any()


class HeldCopies:
    """Copies into staging memory that do not end before `may_end` is set, in all transports."""

    def __init__(self, monkeypatch):
        self.begun, self.may_end, self.log = threading.Event(), threading.Event(), []
        gather = RegisteredMemory.gather

        def held(memory, *arguments):
            self.begun.set()
            self.may_end.wait(20)
            gather(memory, *arguments)
            self.log.append("copied")

        monkeypatch.setattr(RegisteredMemory, "gather", held)
        monkeypatch.setattr(staged, "_LINGER_S", 0.05)


@pytest.mark.parametrize("how", ["unregister", "close"])
@pytest.mark.parametrize("before", ["connected", "disconnected", "messages taken"])
def test_memory_may_be_unmapped_after_copies_in_progress(side_of, how, before, monkeypatch):
    """Callers may unmap the memory as soon as `unregister` or `close` returns.

    Regression: `close` did not wait for the copies of disconnected peers, and waited for other
    copies for only a second. Neither did `unregister`, if `notifications` was called in between.
    """
    copies, reader, source = HeldCopies(monkeypatch), side_of("tcp"), side_of("tcp")
    reader.connect(source)
    transfer = reader.read(source, 0, 0, LARGE)
    assert copies.begun.wait(10)
    if before != "connected":
        source.transport.disconnect(reader.agent)
    if before == "messages taken":
        source.transport.notifications()
    threading.Timer(0.3, copies.may_end.set).start()
    if how == "unregister":
        source.transport.unregister([(source.address, source.pool.nbytes)])
    else:
        source.transport.close()
    copies.log.append(how)
    with pytest.raises(TransferError):
        transfer.wait(10)
    assert copies.log[:2] == ["copied", how]


def test_close_raises_while_a_copy_runs(side_of, name, monkeypatch):
    """Regression: `close` returned without an error."""
    options = {"direct_bytes": None} if name == "nixl" else {}
    copies = HeldCopies(monkeypatch)
    source, reader = side_of(name, **options), side_of(name, **options)
    port = json.loads(source.metadata)["port"]
    reader.connect(source)
    transfer = reader.read(source, 0, 0, LARGE)
    assert copies.begun.wait(10)
    source.transport.timeout_s = 0.3
    said = f"bytes to {reader.agent} still accesses registered memory after 0.3 s"
    for _ in range(2):  # a later call does not conceal the copy
        with pytest.raises(TimeoutError, match=said):
            source.transport.close()
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    assert getattr(source.transport, "_agent", None) is None
    copies.may_end.set()
    source.transport.close()
    assert copies.log == ["copied"]
    with pytest.raises(TransferError):
        transfer.wait(10)


def test_close_ends_threads_and_stops_listening(name, peer):
    before = set(threading.enumerate())
    side = Side(name)
    port = json.loads(side.metadata)["port"]
    side.connect(peer)
    before |= {each for each in threading.enumerate() if each.name.endswith(side.agent)}
    side.read(peer, 0, 0, SMALL, notify=b"last").wait(20)
    side.transport.close()
    side.transport.close()
    found = []
    wait_until(lambda: found.extend(peer.transport.notifications()) or found)
    assert found == [(side.agent, b"last")]
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    with pytest.raises(RuntimeError, match="is closed"):
        side.transport.metadata()
    assert not torch.distributed.is_initialized()  # torch's default group is unaffected


def test_connect_does_not_outlive_a_close_in_another_thread(side_of, monkeypatch):
    """Regression: `connect` checked whether the transport was closed only at its beginning."""
    one, other = side_of("tcp", "a"), side_of("tcp", "b")
    parse = staged.parse_metadata

    def parse_and_close(*args):
        one.transport.close()
        return parse(*args)

    monkeypatch.setattr(staged, "parse_metadata", parse_and_close)
    with pytest.raises(RuntimeError, match="the transport of agent 'a' is closed"):
        one.connect(other)
    assert one.transport.peers() == other.transport.peers() == []


LIES = {
    "size": "start announces 513 bytes: expected 512",
    "piece": "a piece announces 513 bytes: expected 512",
    "taken": "expected a piece in flight",
    "id": "expected the id of a new transfer",
    "twice": "expected the id of a",
    "op": "expected an op of this version",
}


@pytest.mark.parametrize("how", LIES)
def test_invalid_read_response_is_rejected(side, peer, how):
    side.connect(peer)
    channel = peer.transport._connections[side.agent].channel
    put = channel.put

    def lie(header, *parts, **body):
        if header["op"] == ("piece" if how == "piece" else "start"):
            if how in ("taken", "twice"):
                put({"op": "taken"} if how == "taken" else header, *parts, **body)
            changes = {"size": {"bytes": 513}, "piece": {"bytes": 513}, "op": {"op": "begin"}}
            changes["id"] = {"id": header.get("id", 0) + 1}
            header = header | changes.get(how, {})
        put(header, *parts, **body)

    channel.put = lie
    read = side.read(peer, 0, 0, SMALL)
    if how == "twice":  # the read itself may already have completed
        wait_until(lambda: not side.transport.peers())
    else:
        with pytest.raises(TransferError, match=re.escape(LIES[how])):
            read.wait(20)
        assert read.is_released and not side.pool.any()
    with pytest.raises(TransferError, match="is not connected"):
        side.read(peer, 0, 0, SMALL)


def test_peer_with_another_version_is_rejected(side, peer):
    other = {**json.loads(peer.metadata), "version": TRANSPORT_VERSION + 1}
    expected = f"is {TRANSPORT_VERSION + 1}: expected {TRANSPORT_VERSION}"
    with pytest.raises(ValueError, match=f"metadata {expected}"):
        side.transport.connect(json.dumps(other).encode())
    with socket.create_connection(("127.0.0.1", peer.transport.port)) as stranger:
        stranger.sendall(frame({**HELLO, "version": TRANSPORT_VERSION + 1}))
        stranger.settimeout(20)
        answer, _ = receive_frame(stranger)
        assert answer["op"] == "refused" and f"version {expected}" in answer["reason"]
    assert side.transport.peers() == peer.transport.peers() == []


def test_peer_rejects_unregistered_memory(side, peer):
    """The metadata misstates the peer's memory, so that the local check against it passes."""
    told = json.loads(peer.metadata)
    told["regions"] = [[peer.address - 4096, POOL_BYTES + 8192, "cpu"]]
    side.transport.connect(json.dumps(told).encode())
    transfer = side.read(peer, 0, POOL_BYTES - 100, SMALL)
    with pytest.raises(TransferError, match="the peer refused: the request has bytes"):
        transfer.wait(20)
    assert transfer.is_released and not side.pool.any()
    check_reads(side, peer)  # the connection still works


def frame(header, payload=b"", lengths=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<II", *(lengths or (len(text), len(payload)))) + text + payload


HELLO = {"op": "hello", "version": TRANSPORT_VERSION, "from": "0" * 32, "nonce": "00"}


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n", bytes(64), random.Random(0).randbytes(4096),
        frame({"op": "hello"}, lengths=(2**32 - 1, 2**32 - 1)), frame({"op": "hello"}, b"\0" * 10),
        frame(b"[" * 60_000), frame([]), frame({"op": 5}), frame({"op": "pull", "id": 0}, bytes(32)),
        frame(HELLO), frame({**HELLO, "nonce": None}), frame({**HELLO, "version": 10**400}),
    ],
    ids=lambda sent: repr(sent[:30]),
)  # fmt: skip
def test_unauthenticated_client_is_dropped(side, sent, peer):
    with socket.create_connection(("127.0.0.1", side.transport.port)) as stranger:
        stranger.sendall(sent)
        stranger.settimeout(30)
        answer = b""
        try:
            while part := stranger.recv(4096):
                answer += part
        except ConnectionResetError:
            pass
        assert b"ready" not in answer
    assert side.transport.peers() == [] and side.transport.notifications() == []
    assert peer.connect(side, timeout_s=20) == side.agent


def test_listener_survives_failed_accept(side, peer, monkeypatch):
    class Poor:
        """A listener in a process that temporarily lacks resources such as file descriptors and
        threads.
        """

        def __init__(self, listener):
            self.listener, self.num_left = listener, 2

        def __getattr__(self, attribute):
            return getattr(self.listener, attribute)

        def accept(self):
            sock = self.listener.accept()
            self.num_left -= 1
            if self.num_left == 1:
                sock[0].close()
                raise OSError(errno.EMFILE, "Too many open files")
            return sock

    def no_thread(thread):
        if thread.name == "kvcache greeting" and poor.num_left == 0:
            poor.num_left -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    start, poor = threading.Thread.start, Poor(side.transport._listener)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    side.transport._listener = poor
    for _ in range(3):  # the listener is already waiting for the first connection
        socket.create_connection(("127.0.0.1", side.transport.port)).close()
    wait_until(lambda: poor.num_left < 0)
    peer.connect(side, timeout_s=20)


@pytest.mark.parametrize(("mine", "theirs"), [(b"a", b"b"), (b"", b"b"), (b"a", b""), (b"a", b"a")])
def test_only_sides_with_the_same_secret_connect(side_of, name, mine, theirs):
    sides = side_of(name, secret=mine), side_of(name, secret=theirs)
    if mine == theirs:
        assert sides[0].connect(sides[1]) == sides[1].agent
        return
    for one, other in (sides, sides[::-1]):
        with pytest.raises(ConnectionError, match="has a different secret"):
            one.connect(other)
        assert one.transport.peers() == other.transport.peers() == []


@pytest.mark.parametrize("own", [False, True])
def test_relayed_proof_is_rejected(side_of, name, own):
    """A relay has redirected a side to the relay's own address, but does not know the secret."""
    caller, victim = side_of(name, secret=b"a"), side_of(name, secret=b"a")
    told, errors = json.loads(victim.metadata), []
    with socket.create_server(("127.0.0.1", 0)) as lure:
        lured = json.dumps({**told, "port": lure.getsockname()[1]}).encode()

        def call():
            try:
                caller.transport.connect(lured, timeout_s=20)
            except ConnectionError as error:
                errors.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        back, _ = lure.accept()
        with back, socket.create_connection(("127.0.0.1", told["port"])) as there:
            there.settimeout(20)
            hello, _ = receive_frame(back)
            if own:  # the relay claims the address that the victim expects
                hello["address"] = f"127.0.0.1:{told['port']}"
            send_frame(there, hello)
            answer, _ = receive_frame(there)
            send_frame(back, answer)
            thread.join(40)
    assert answer["op"] == ("hello" if own else "refused")
    assert re.search("a different secret" if own else "address is '127", errors[0])
    assert caller.transport.peers() == victim.transport.peers() == []


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_wildcard_host_requires_advertise(side_of, name, host, peer):
    with pytest.raises(ValueError, match=f"host is '{host}'.*set advertise"):
        Side(name, host=host)
    with pytest.raises(ValueError, match=r"advertise is '0\.0\.0\.0'.*set advertise"):
        Side(name, host=host, advertise="0.0.0.0")
    if host == "0.0.0.0":
        side = side_of(name, host=host, advertise="127.0.0.1")
        assert json.loads(side.metadata)["host"] == "127.0.0.1"
        assert peer.connect(side) == side.agent
        check_reads(side, peer)


def test_transports_listen_only_on_the_loopback(side, name):
    """The kernel lists all listening TCP sockets of this process."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.update(re.findall(r"socket:\[(\d+)\]", os.readlink(entry)))
        except OSError:
            continue
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.append(columns[1].split(":")[0])
    assert len(found) >= {"tcp": 1, "nixl": 2}[name] and set(found) == {"0100007F"}, found


@pytest.mark.parametrize("listens", [False, True])
def test_unused_or_unresponsive_address_raises_within_the_deadline(side, listens):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        told = json.loads(side.metadata) | {"agent": "peer", "incarnation": "0" * 32, "port": port}
        begin = time.monotonic()
        message = f"'peer' at 127.0.0.1:{port} was not connected"
        with pytest.raises(ConnectionError, match=message):
            side.transport.connect(json.dumps(told).encode(), timeout_s=0.5)
        assert time.monotonic() - begin < 8  # the default timeout is 10 s


@pytest.mark.exhaustive
def test_duplicate_peer_name_is_rejected_in_both_directions(side_of, side, name):
    peer, other = side_of(name, "peer", seed=1), side_of(name, "peer", seed=2)
    side.connect(peer)
    with pytest.raises(ValueError, match="agent 'peer' is connected from"):
        side.connect(other)
    with pytest.raises(ConnectionError, match="agent 'peer' is already connected"):
        other.connect(side)
    check_reads(side, peer)


def test_both_sides_connect_at_the_same_time(side_of, name):
    for _ in range(5):
        one, two = side_of(name), side_of(name)
        start, found = threading.Barrier(2), {}

        def connect(mine, theirs, start=start, found=found):
            told = theirs.metadata
            start.wait()
            found[mine.agent] = mine.transport.connect(told, timeout_s=20)

        pairs = ((one, two), (two, one))
        threads = [threading.Thread(target=connect, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for mine, theirs in pairs:
            assert found[mine.agent] == theirs.agent
            assert mine.connect(theirs) == theirs.agent  # the connection is used again
            assert mine.transport.peers() == [theirs.agent]
            theirs.pool[:] = pattern(4)
            check_reads(mine, theirs, seed=4)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": 1}, f"version of the metadata is 1: expected {TRANSPORT_VERSION}"),
        ({"transport": "other"}, "transport of the metadata is 'other'"),
        ({"agent": ""}, "agent is ''"),
        ({"agent": "a\nb"}, "agent is"),
        ({"incarnation": "1"}, "incarnation of the metadata is '1'"),
        ({"port": 2**16}, "port of the metadata is 65536"),
        ({"regions": [[1, 0, "cpu"]]}, "regions of the metadata holds"),
        ({"regions": [[1, 8, "hbm:0"]]}, "expected [address, bytes, kind], of memory of kind cpu, cuda:"),
        ({"regions": []}, "incarnation of the metadata is this side's own"),
        ({"digest": 1}, "digest of the metadata is 1: expected bool"),
        ({"more": 1}, "metadata has fields"),
        *((data, "metadata") for data in (b"", b"\x80\x04N.", b"[]", b"{", b"[" * 100_000)),
        ("{}", "expected bytes"),
        (None, "expected the metadata of another agent"),  # the side's own metadata
    ],
)  # fmt: skip
def test_invalid_metadata_is_rejected(side, changes, said):
    data = side.metadata if changes is None else changes
    if isinstance(changes, dict):
        data = json.dumps({**json.loads(side.metadata), "agent": "peer", **changes}).encode()
    with pytest.raises((TypeError, ValueError), match=re.escape(said)):
        side.transport.connect(data)
    assert side.transport.peers() == []


@pytest.mark.parametrize(
    ("local", "remote", "length", "said"),
    [
        ([-1], [0], [8], "local has bytes"),
        ([POOL_BYTES - 4], [0], [8], "local has bytes"),
        ([0], [-8], [8], "remote has bytes"),
        ([0], [POOL_BYTES - 4], [8], "remote has bytes"),
        ([0], [0], [0], "length of local holds 0"),
        ([0], [2**62], [8], "above 2^62"),
        ([0, 4], [0, 8], [8, 8], "local has byte"),
        ([0, 4], [0], [8], "entries"),
    ],
)
def test_invalid_fragments_move_nothing(side, peer, local, remote, length, said):
    ends = np.array(local) + side.address, np.array(remote) + peer.address
    name = side.connect(peer)
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        side.transport.read(name, *ends, np.array(length))
    side.read(peer, 100, 0, 8).wait(20)
    assert not side.pool[:100].any()


def test_wrong_arguments_are_rejected_by_name(side_of):
    side, other = side_of("tcp"), side_of("tcp")
    side.connect(other)
    read, before = side.read(other, 0, 0, 8), side.metadata
    wrong = [
        ("peer is 'nobody'", lambda: side.transport.send("nobody", b"")),
        ("peer is 'nobody'", lambda: side.transport.disconnect("nobody")),
        ("memory[0][0] is 0", lambda: side.transport.register([(0, 8)])),
        ("memory[0] has 1 entries", lambda: side.transport.register([(8,)])),
    ]
    for seconds in (float("nan"), float("inf"), -0.001):
        said = f"timeout_s is {seconds}: expected finite sec"
        wrong += [
            (said, lambda t=seconds: side.connect(other, timeout_s=t)),
            (said, lambda t=seconds: side.read(other, 0, 0, 8, timeout_s=t)),
            (said, lambda t=seconds: read.wait(t)),
        ]
    options = (("name", "udp"), ("secret", "text"), ("timeout_s", 0), ("piece_bytes", 10))
    for name, value in (*options, ("host", None), ("advertise", 5), ("port", -1), ("digest", 1)):
        options = {"agent": "a", "name": "tcp", name: value}
        said = f"{name} is a str" if name == "secret" else f"{name} is {value!r}"
        wrong.append((said, lambda options=options: make_transport(**options)))
    for said, call in wrong:
        with pytest.raises((TypeError, ValueError), match=re.escape(said)):
            call()
    assert side.metadata == before
    read.wait(20)


def test_exit_closes_all_transports_while_a_copy_runs(side_of, monkeypatch, caplog):
    transports = [side_of("tcp").transport for _ in range(2)]
    close = staged.StagedTransport.close

    def late(transport):
        close(transport)
        raise TimeoutError("a thread still copies")

    monkeypatch.setattr(staged.StagedTransport, "close", late)
    monkeypatch.setattr(staged, "_open", transports)
    staged._close_all()
    monkeypatch.undo()
    for each in transports:
        said = f"the transport of agent {each.agent!r} was not closed: a thread still copies"
        assert each._is_closed and said in caplog.text
