# SPDX-License-Identifier: Apache-2.0
"""Transports between two processes: correct bytes, clear errors, and deadlines."""

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

from kvcache import Pages
from kvcache.transfer.transport.base import TransferError
from kvcache.transfer.transport.spans import Spans
from kvcache_exchange.transport import connection, lane, staged
from kvcache_exchange.transport.channel import ChannelError, receive_frame, send_frame
from kvcache_exchange.transport.factory import make_transport
from kvcache_exchange.transport.metadata import TRANSPORT_VERSION
from kvcache_exchange.transport.registered import RegisteredMemory
from tests.machinery.reconnects import curve
from tests.machinery.shared import sampled, seed_of_test
from tests.machinery.transport_peer import POOL_BYTES, Peer, pattern

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


numbers = itertools.count()


class Side:
    """The transport of the test process, with a name that no other test uses."""

    def __init__(self, name, agent=None, **options):
        agent = agent or f"test {next(numbers)}"
        self.pool = np.zeros(POOL_BYTES, np.uint8)
        self.transport = make_transport(agent, name, **{"timeout_s": 20, **options})
        self.address = self.pool.ctypes.data
        self.transport.register([(self.address, self.pool.nbytes)])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.transport.close()

    def read(self, peer, local, remote, length, name="peer", **options):
        local, remote, length = np.broadcast_arrays(*map(np.atleast_1d, (local, remote, length)))
        return self.transport.read(
            name, self.address + local, peer.address + remote, length, **options
        )


def wait_until(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def side(name):
    with Side(name) as side:
        yield side


@pytest.fixture(scope="module")
def calm():
    """Return a shared peer by name. Tests must neither write to its memory nor stop it."""
    found = {}
    with ExitStack() as stack:

        def peer(name):
            if name not in found:
                found[name] = stack.enter_context(Peer(name))
            return found[name]

        yield peer


@pytest.fixture
def peer(calm, name):
    return calm(name)


def drawn(rng):
    """Draw (local, remote, length) of fragments that have at least 1 byte and are disjoint on each
    side.
    """
    length = np.array(
        [rng.choice([1, 7, 64, 512, 4096, 30_000]) for _ in range(rng.randint(1, 60))]
    )

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


def copied(destination, source, to, at, length):
    """The reference: copy one fragment after another."""
    result = destination.copy()
    for t, a, n in zip(to.tolist(), at.tolist(), length.tolist()):
        result[t : t + n] = source[a : a + n]
    return result


@pytest.mark.slow
def test_reads_write_exactly_the_requested_bytes(side, peer):
    seed = seed_of_test()
    print(f"seed {seed}")
    rng = random.Random(seed)
    assert side.transport.connect(peer.metadata) == "peer"
    for _ in range(40):
        side.pool[:] = pattern(rng.randrange(100))
        local, remote, length = drawn(rng)
        expected = copied(side.pool, pattern(1), local, remote, length)
        read = side.read(peer, local, remote, length)
        read.wait(20)
        assert read.is_released and (side.pool == expected).all()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_large_transfers_are_chunked(name, size, peer):
    with Side(name, piece_bytes=1 << 13) as side:
        side.transport.connect(peer.metadata)
        count = POOL_BYTES // size
        order = np.random.default_rng(0).permutation(count) * size
        side.read(peer, order, order[::-1], size).wait(20)
        got = side.pool.reshape(count, size)[order // size]
        assert np.array_equal(got, pattern(1).reshape(count, size)[order[::-1] // size])


@pytest.mark.parametrize("delay", ["", "open"])
def test_accepting_side_can_read(side, name, delay):
    """The side that accepted the connection can read from the connecting side as soon as `connect`
    has returned there, even if the thread that responds is slow.
    """
    side.pool[:] = pattern(9)
    with Peer(name, delay=delay) as peer:
        side.transport.connect(peer.metadata)
        peer.ask(
            "read", peer=side.transport.agent, local=[5], remote=[side.address + 100], length=[1000]
        )
        got = bytes.fromhex(peer.ask("pool", first=5, last=1005)["hex"])
        assert got == pattern(9)[100:1100].tobytes()


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_peer_responds_while_main_thread_is_busy(side, size, peer):
    side.transport.connect(peer.metadata)
    peer.ask("busy")  # until the next command
    side.read(peer, 0, 0, size).wait(20)
    peer.ask("notifications", least=0)
    assert (side.pool[:size] == pattern(1)[:size]).all()


@pytest.mark.parametrize("size", sampled([SMALL, LARGE]))
def test_notification_arrives_once_after_the_bytes(side, name, size):
    with Peer(name) as peer:
        side.transport.connect(peer.metadata)
        side.transport.send("peer", b"one")
        side.read(peer, 0, 0, size, notify=b"two").wait(20)
        found = peer.ask("notifications", least=2)["found"]
        assert found == [[side.transport.agent, "one"], [side.transport.agent, "two"]]


@pytest.mark.slow
@pytest.mark.parametrize("wanted_here", [True, False])
def test_digests_do_not_change_the_bytes(name, wanted_here):
    with (
        Side(name, digest=wanted_here, piece_bytes=1 << 14) as side,
        Peer(name, digest=not wanted_here) as peer,
    ):
        side.transport.connect(peer.metadata)
        for size in SMALL, LARGE:
            order = np.random.default_rng(0).permutation(POOL_BYTES // size) * size
            side.read(peer, order, order, size).wait(20)
            assert (side.pool == pattern(1)).all()
            side.pool[:] = 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_bytes_changed_in_transit_raise(name, size):
    with Side(name, digest=True) as side, Peer(name, lie="corrupt") as peer:
        side.transport.connect(peer.metadata)
        with pytest.raises(TransferError, match="the received bytes differ from the sent bytes"):
            side.read(peer, 0, 0, size, notify=b"read").wait(20)
        assert not side.pool.any()


class Flips:
    """Two sides with digests in this process. Bit number `bit` of each request's payload is flipped."""

    def __init__(self, name, monkeypatch):
        self.bit, self.num_bits = None, 0
        self.sides = [make_transport(each, name, digest=True, timeout_s=20) for each in "ab"]
        self.mine, self.theirs = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
        for side, memory in zip(self.sides, (self.mine, self.theirs)):
            side.register([(memory.ctypes.data, memory.nbytes)])
        self.peer = self.sides[0].connect(self.sides[1].metadata())
        self.local = self.mine.ctypes.data + np.arange(4) * 64
        self.remote = self.theirs.ctypes.data + np.array([0, 3, 7, 20]) * 64
        put = connection.Connection.put

        def flipped(own, header, payload=b""):
            if header["op"] == "pull":
                self.num_bits = len(payload) * 8
                if self.bit is not None:
                    changed = bytearray(payload)
                    changed[self.bit // 8] ^= 1 << self.bit % 8
                    payload = bytes(changed)
            put(own, header, payload)

        monkeypatch.setattr(connection.Connection, "put", flipped)

    def run(self):
        """Run a read of memory with content, and return the local memory."""
        self.theirs[:], self.mine[:] = np.arange(4096) // 64, 0
        lengths = np.full(4, 64)
        self.sides[0].read(self.peer, self.local, self.remote, lengths, notify=b"hello").wait(20)
        return self.mine.copy()


@pytest.mark.slow
def test_flipped_request_bits_never_give_wrong_bytes(name, monkeypatch):
    """The bits are flipped before the digest of the request's frame is computed."""
    flips = Flips(name, monkeypatch)
    right = flips.run()
    assert len(np.unique(right)) == 4
    for bit in range(flips.num_bits):
        flips.bit = bit
        with pytest.raises(TransferError, match="the request differs from what was sent"):
            flips.run()
        assert not flips.mine.any(), bit
    flips.bit = None
    assert (flips.run() == right).all()
    for side in flips.sides:
        side.close()


def test_piece_of_another_request_or_number_is_rejected(monkeypatch):
    with Side("tcp", digest=True) as side, Peer("tcp") as peer:
        side.transport.connect(peer.metadata)
        real = lane.digest_of_answer
        for wrong in (lambda r, n, p: real("another", n, p), lambda r, n, p: real(r, n + 1, p)):
            monkeypatch.setattr(lane, "digest_of_answer", wrong)
            with pytest.raises(
                TransferError, match="the received bytes differ from the sent bytes"
            ):
                side.read(peer, 0, 0, SMALL).wait(20)
        assert not side.pool.any()


def test_flipped_frame_bits_are_rejected():
    """Flips each bit of a numbered frame, including those of its lengths and digest.

    A corrupted frame, or one with another number, must never be accepted.
    """
    frame = ({"op": "done", "id": 3}, b"payload")
    sent = bytearray()
    sink = SimpleNamespace(sendall=sent.extend)
    send_frame(sink, *frame, number=5)

    def taken(data, number=5):
        one, other = socket.socketpair()
        with one, other:
            one.sendall(data)
            one.shutdown(socket.SHUT_WR)
            return receive_frame(other, number=number)

    assert taken(sent) == frame
    for bit in range(8 * len(sent)):
        changed = bytearray(sent)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChannelError):
            taken(changed)
    for number in (4, 6):  # as if a frame were lost or duplicated
        with pytest.raises(ChannelError, match=f"frame {number} differs from what was sent"):
            taken(sent, number)


def test_empty_transfer_completes_and_notifies(side, peer):
    side.transport.connect(peer.metadata)
    nothing = np.empty(0, np.int64)
    assert side.read(peer, nothing, nothing, nothing, notify=b"none").poll()
    assert peer.ask("notifications", least=1)["found"] == [[side.transport.agent, "none"]]


# Peers that are stopped, killed and restarted.


def reads_until_error(side, peer, size, within_s):
    """Read until a read fails, and return the error. A read must fail before the deadline."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            read = side.read(peer, 0, 0, size, timeout_s=1)
            read.wait(within_s)
        except TransferError as error:
            return error
    raise AssertionError(f"no error within {within_s} s")


@pytest.mark.parametrize("size", sampled([SMALL, LARGE]))
def test_killed_peer_raises_and_restarted_peer_reconnects(side, name, size):
    with Peer(name) as peer:
        side.transport.connect(peer.metadata)
        side.read(peer, 0, 0, size).wait(20)
        peer.signal(signal.SIGKILL)
        error = reads_until_error(side, peer, size, 15)
        assert "'peer'" in str(error)
        with pytest.raises(ConnectionError, match="was not connected"):
            side.transport.connect(peer.metadata, timeout_s=2)
    with Peer(name, seed=2) as again:
        assert side.transport.connect(again.metadata) == "peer"
        side.read(again, 0, 0, size).wait(20)
        assert (side.pool[:size] == pattern(2)[:size]).all()


def test_stopped_peer_raises_within_the_deadline(side, name):
    with Peer(name) as peer:
        side.transport.connect(peer.metadata)
        peer.signal(signal.SIGSTOP)
        read = side.read(peer, 0, 0, SMALL, timeout_s=60)
        other = side.read(peer, SMALL, 0, SMALL, timeout_s=60)
        assert not read.poll() and not read.is_released
        begin = time.monotonic()
        with pytest.raises(TransferError, match=r"not finished within 0\.5 s"):
            read.wait(0.5)
        assert time.monotonic() - begin < 15
        with pytest.raises(TransferError, match="not finished within"):
            read.poll()
        wait_until(lambda: read.is_released)
        # The peer must no longer change these bytes.
        side.pool[:SMALL] = 3
        peer.signal(signal.SIGCONT)
        other.wait(20)  # this transfer was in flight at the same time as the abandoned one
        assert (side.pool[SMALL : 2 * SMALL] == pattern(1)[:SMALL]).all()
        assert (side.pool[:SMALL] == 3).all()
        side.read(peer, 0, 0, SMALL).wait(20)
        assert (side.pool[:SMALL] == pattern(1)[:SMALL]).all()


@pytest.mark.slow
def test_peer_that_holds_a_transfer_is_disconnected(name):
    with Side(name, timeout_s=1) as side, Peer(name) as peer:
        side.transport.connect(peer.metadata)
        peer.signal(signal.SIGSTOP)
        with pytest.raises(TransferError, match=r"not finished within 0\.2 s"):
            side.read(peer, 0, 0, SMALL).wait(0.2)
        time.sleep(1.1)
        with pytest.raises(
            TransferError, match="is not connected: the peer has not answered for 1 s"
        ):
            side.read(peer, 0, 0, SMALL)
        peer.signal(signal.SIGCONT)
        deadline = time.monotonic() + 30
        # The peer may not have noticed yet that the connection has ended. On a busy machine, a read
        # may also exceed this side's timeout of one second.
        while True:
            try:
                side.transport.connect(peer.metadata)
                side.read(peer, 0, 0, SMALL).wait(20)
                break
            except (ConnectionError, TransferError):
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert (side.pool[:SMALL] == pattern(1)[:SMALL]).all()


@pytest.mark.slow
@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_cancelled_transfer_does_not_affect_others(name, size):
    """Reads with many pieces are cancelled at any point."""
    seed = seed_of_test()
    print(f"seed {seed}")
    rng = random.Random(seed)
    part = POOL_BYTES // 4
    with Side(name, piece_bytes=1 << 14) as side, Peer(name) as peer:
        side.transport.connect(peer.metadata)
        told, theirs = [], pattern(1).reshape(4, part)
        for number in range(15):
            side.pool[:] = pattern(number)
            begun = []
            for i in range(4):
                at = i * part + np.arange(0, part, size)
                begun.append(side.read(peer, at, at, size, notify=b"%d %d" % (number, i)))
            victim = rng.randrange(4)
            time.sleep(rng.choice([0, 0, rng.random() * 0.005]))
            begun[victim].cancel("for a test")
            wait_until(lambda: begun[victim].is_released)  # noqa: B023
            parts = side.pool.reshape(4, part)
            left, is_done = parts[victim].copy(), False
            try:
                is_done = begun[victim].poll()
            except TransferError as error:
                assert "for a test" in str(error)
            for i, each in enumerate(begun):
                if i != victim:
                    each.wait(20)
                if i != victim or is_done:
                    told.append(f"{number} {i}")
                    assert (parts[i] == theirs[i]).all()
            assert (parts[victim] == left).all()
        found = []

        def are_told():
            found.extend(each[1] for each in peer.ask("notifications", least=0)["found"])
            return set(told) <= set(found)

        wait_until(are_told)
        assert sorted(found) == sorted(told)
        assert side.transport.peers() == ["peer"]


def test_failed_transfer_is_released_after_its_job_stops(monkeypatch):
    seen = []
    with Side("tcp") as side, Side("tcp") as other:
        peer = side.transport.connect(other.transport.metadata())
        known = side.transport._connections[peer]
        transfer = connection.StagedTransfer(known, 8, 5.0)
        transfer.job = lane.Job(Spans.of([side.address], [8], "local"), 0, 1 << 20)
        real = transfer.job.stop
        monkeypatch.setattr(
            transfer.job, "stop", lambda: (seen.append(transfer.is_released), real())
        )
        transfer.fail("lost")
        assert seen == [False] and transfer.is_released


def test_request_larger_than_memory_is_rejected():
    with Side("tcp") as side, Side("tcp") as other:
        peer = side.transport.connect(other.transport.metadata())
        bases = np.full(5, other.address)
        wide = Spans(bases, np.zeros(1, np.int64), np.array([POOL_BYTES]))
        known = side.transport._connections[peer]
        transfer = connection.StagedTransfer(known, 0, 5.0)
        number = known.track(transfer, wide, b"")
        known.put({"op": "pull", "id": number}, wide.to_bytes())
        with pytest.raises(TransferError, match=f"expected at most {4 * POOL_BYTES}, 4 times"):
            transfer.wait(20)
        assert side.transport.peers() == [peer]


def test_excess_reads_are_rejected_individually(monkeypatch):
    monkeypatch.setattr(connection, "_MOST_WAITING", 4)
    with Side("tcp", piece_bytes=1 << 12) as side, Side("tcp") as other:
        peer = side.transport.connect(other.transport.metadata())
        monkeypatch.setattr(other.transport._connections[side.transport.agent], "_on_done", waits)
        at = (np.array([side.address]), np.array([other.address]), np.array([8]))
        reads = [side.transport.read(peer, *at) for _ in range(6)]
        for each in reads[4:]:
            with pytest.raises(TransferError, match="the peer refused: 4 reads are waiting"):
                each.wait(20)
        assert side.transport.peers() == [peer]


def waits(number, header, payload):
    """Ignore a frame, as if it had never arrived."""


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, -0.001])
def test_timeout_must_be_finite_and_not_negative(timeout_s):
    with Side("tcp") as side, Side("tcp") as other:
        metadata = other.transport.metadata()
        peer = side.transport.connect(metadata)
        at = (np.array([side.address]), np.array([other.address]), np.array([8]))
        read = side.transport.read(peer, *at)
        for call in (
            lambda: side.transport.connect(metadata, timeout_s=timeout_s),
            lambda: side.transport.read(peer, *at, timeout_s=timeout_s),
            lambda: read.wait(timeout_s),
            lambda: make_transport("x", "tcp", timeout_s=timeout_s),
        ):
            with pytest.raises(ValueError, match=f"timeout_s is {timeout_s}: expected finite sec"):
                call()
        read.wait(20)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_unregistered_memory_is_unreachable_until_it_is_registered_again(name, size):
    with Side(name) as reader, Side(name) as source:
        memory, metadata = [(source.address, source.pool.nbytes)], source.transport.metadata()
        source.pool[:] = 7

        def read():
            peer = reader.transport.connect(metadata)
            reader.read(source, 0, 0, size, name=peer, timeout_s=5).wait(5)

        read()
        source.transport.unregister(memory)
        assert not source.transport.peers() and not source.transport.memory.regions
        with pytest.raises(TransferError):
            read()
        with pytest.raises(ValueError, match=r"local has .* expected bytes of one registered"):
            source.read(
                reader, 0, 0, size, name=source.transport.connect(reader.transport.metadata())
            )
        source.transport.unregister(memory)  # registering it again has no effect
        source.transport.register(memory)
        for peer in source.transport.peers():
            source.transport.disconnect(peer)
        assert source.transport.metadata() == metadata
        reader.pool[:] = 0
        wait_until(lambda: not reader.transport.peers())
        read()
        assert (reader.pool[:size] == 7).all() and not reader.pool[size:].any()


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


@pytest.mark.parametrize("how", ["unregister", "close"])
@pytest.mark.parametrize("before", ["connected", "disconnected", "messages taken"])
def test_memory_may_be_unmapped_after_copies_in_progress(how, before, monkeypatch):
    """Callers may unmap the memory as soon as `unregister` or `close` returns.

    Regression: `close` did not wait for the copies of disconnected peers, and waited for other
    copies for only a second. Neither did `unregister`, if `notifications` was called in between.
    """
    monkeypatch.setattr(staged, "_LINGER_S", 0.05)
    copies = HeldCopies(monkeypatch)
    with Side("tcp") as reader, Side("tcp") as source:
        peer = reader.transport.connect(source.transport.metadata())
        transfer = reader.read(source, 0, 0, LARGE, name=peer)
        assert copies.begun.wait(10)
        if before != "connected":
            source.transport.disconnect(reader.transport.agent)
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


def test_close_raises_while_a_copy_runs(name, monkeypatch):
    """Regression: `close` returned without an error."""
    monkeypatch.setattr(staged, "_LINGER_S", 0.05)
    options = {"direct_bytes": None} if name == "nixl" else {}
    copies = HeldCopies(monkeypatch)
    with Side(name, **options) as source, Side(name, **options) as reader:
        port = json.loads(source.transport.metadata())["port"]
        peer = reader.transport.connect(source.transport.metadata())
        transfer = reader.read(source, 0, 0, LARGE, name=peer)
        assert copies.begun.wait(10)
        source.transport.timeout_s = 0.3
        said = f"bytes to {reader.transport.agent} still accesses registered memory after 0.3 s"
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


def test_exit_closes_all_transports_while_a_copy_runs(monkeypatch, caplog):
    with Side("tcp") as one, Side("tcp") as other:
        transports = [one.transport, other.transport]
        close = staged.StagedTransport.close

        def late(transport):
            close(transport)
            raise TimeoutError("a thread still copies")

        monkeypatch.setattr(staged.StagedTransport, "close", late)
        monkeypatch.setattr(staged, "_open", transports)
        staged._close_all()
        monkeypatch.undo()
        assert all(each._is_closed for each in transports)
    for each in transports:
        said = f"the transport of agent {each.agent!r} was not closed: a thread still copies"
        assert said in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("how", ["unregister", "close"])
def test_hung_peer_does_not_delay_the_end_of_transfers(how, name):
    """Regression: `unregister` waited for a thread that did not copy, but waited for the peer."""
    with Side(name, piece_bytes=1 << 16) as side, Peer(name) as peer:
        side.transport.connect(peer.metadata)
        side.read(peer, 0, 0, POOL_BYTES).wait(20)
        peer.signal(signal.SIGSTOP)
        known = side.transport._connections["peer"]
        # Send pieces for which the peer does not make room.
        known._flows[0].put(lane.Job(Spans.of([side.address], [POOL_BYTES], "local"), 2, 1 << 16))
        wait_until(lambda: known._flows[0]._num_begun % lane.PIECES_AHEAD == 0)
        time.sleep(0.1)
        begin = time.monotonic()
        if how == "unregister":
            side.transport.unregister([(side.address, side.pool.nbytes)])
        else:
            side.transport.close()
        assert time.monotonic() - begin < 10
        peer.signal(signal.SIGCONT)


def test_fragments_are_not_merged_across_regions(name):
    halves = [0, POOL_BYTES // 2]
    with ExitStack() as stack:
        side, other = make_transport("a", name), make_transport("b", name)
        stack.callback(side.close)
        stack.callback(other.close)
        mine, theirs = np.zeros(POOL_BYTES, np.uint8), pattern(3)
        for begin in halves:
            side.register([(mine.ctypes.data + begin, POOL_BYTES // 2)])
            other.register([(theirs.ctypes.data + begin, POOL_BYTES // 2)])
        at = np.arange(0, POOL_BYTES, POOL_BYTES // 4)
        peer = side.connect(other.metadata())
        to, source = mine.ctypes.data + at, theirs.ctypes.data + at
        side.read(peer, to, source, np.full(4, POOL_BYTES // 4)).wait(20)
        assert (mine == theirs).all()


@pytest.mark.parametrize(
    "bases, offsets, length, is_right",
    [
        ([0, 0], [0], [64], False),
        ([0, 63], [0], [64], False),
        ([64, 0], [0], [64], True),
        ([0, 64], [0, 128], [64, 64], True),  # interleaved fragments
        ([0, 64], [0, 128], [64, 65], False),
        ([0, 64], [128, 0], [64, 64], True),
        ([0, 100], [0, 10], [10, 11], True),
        ([0, 100], [0, 9], [10, 11], False),
        ([0, 64, 192], [0, 64], [32, 64], False),
        ([0, 32], [0, 128, 64], [32, 8, 16], True),
    ],
)
def test_factored_local_bytes_are_written_once(bases, offsets, length, is_right):
    with Side("tcp") as side, Side("tcp") as other:
        local = Spans(side.address + np.array(bases), np.array(offsets), np.array(length))
        remote = Spans(np.full(len(bases), other.address), local.offsets, local.length)
        peer = side.transport.connect(other.transport.metadata())
        if is_right:
            side.transport.read_spans(peer, local, remote).wait(20)
        else:
            with pytest.raises(ValueError, match=r"local has byte 0x[0-9a-f]+ twice"):
                side.transport.read_spans(peer, local, remote)


def test_unawaited_transfer_completes(side, name):
    with Peer(name) as peer:
        side.transport.connect(peer.metadata)
        peer.signal(signal.SIGSTOP)
        read = side.read(peer, 0, 0, SMALL, timeout_s=0.3)
        time.sleep(0.5)
        with pytest.raises(TransferError, match=r"not finished within 0\.3 s"):
            read.poll()
        peer.signal(signal.SIGCONT)


@pytest.mark.exhaustive
def test_connecting_to_stopped_peer_fails_within_deadline(side, name):
    with Peer(name) as peer:
        peer.signal(signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(ConnectionError, match="'peer'"):
            side.transport.connect(peer.metadata, timeout_s=0.5)
        assert time.monotonic() - begin < 8  # the default timeout is 10 s
        peer.signal(signal.SIGCONT)


def test_disconnecting_fails_transfers_in_flight(side, name):
    with Peer(name) as peer:
        side.transport.connect(peer.metadata)
        peer.signal(signal.SIGSTOP)
        read = side.read(peer, 0, 0, SMALL)
        side.transport.disconnect("peer")
        with pytest.raises(TransferError, match="it was disconnected"):
            read.wait(20)
        assert side.transport.peers() == []
        with pytest.raises(ValueError, match="peer is 'peer': expected one of"):
            side.transport.send("peer", b"")
        peer.signal(signal.SIGCONT)


# Peers that violate the protocol, and unknown peers.


@pytest.mark.parametrize(
    "how, said",
    sampled(
        [
            ("size", "start announces 513 bytes: expected 512"),
            ("piece", "a piece announces 513 bytes: expected 512"),
            ("taken", "expected a piece in flight"),
            ("id", "expected the id of a new transfer"),
            ("twice", "expected the id of a"),
            ("op", "expected an op of this version"),
        ]
    ),
)
def test_invalid_read_response_is_rejected(side, name, how, said):
    with Peer(name, lie=how) as peer:
        side.transport.connect(peer.metadata)
        read = side.read(peer, 0, 0, SMALL)
        if how == "twice":  # the read itself may already have completed
            wait_until(lambda: not side.transport.peers())
        else:
            with pytest.raises(TransferError, match=re.escape(said)):
                read.wait(20)
            assert read.is_released and not side.pool.any()
        with pytest.raises(TransferError, match="is not connected"):
            side.read(peer, 0, 0, SMALL)


def test_peer_with_another_version_is_rejected(side, name):
    with Peer(name, lie="version") as peer:
        version, other = TRANSPORT_VERSION, TRANSPORT_VERSION + 1
        with pytest.raises(ValueError, match=f"metadata is {other}: expected {version}"):
            side.transport.connect(peer.metadata)
        answer = peer.ask("connect", metadata=side.transport.metadata().decode())
        assert f"version is {other}: expected {version}" in answer["error"]
        older = {**json.loads(peer.metadata), "version": version}
        with pytest.raises(ConnectionError, match=f"version is {version}: expected {other}"):
            side.transport.connect(json.dumps(older).encode())
        assert side.transport.peers() == []


def test_peer_rejects_unregistered_memory(side, peer):
    """The metadata misstates the peer's memory, so that the local check against it passes."""
    told = json.loads(peer.metadata)
    told["regions"] = [[peer.address - 4096, POOL_BYTES + 8192, "cpu"]]
    side.transport.connect(json.dumps(told).encode())
    transfer = side.read(peer, 0, np.array([0, POOL_BYTES - 100])[1:], SMALL)
    with pytest.raises(TransferError, match="the peer refused: the request has bytes"):
        transfer.wait(20)
    assert transfer.is_released and not side.pool.any()
    side.read(peer, 0, 0, SMALL).wait(10)  # the connection still works


def frame(header, payload=b"", lengths=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<II", *(lengths or (len(text), len(payload)))) + text + payload


HELLO = {"op": "hello", "version": TRANSPORT_VERSION, "from": "0" * 32, "nonce": "00"}


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        random.Random(0).randbytes(4096),
        frame({"op": "hello"}, lengths=(2**32 - 1, 2**32 - 1)),
        frame({"op": "hello"}, b"\0" * 10),
        frame(b"[" * 60_000),
        frame([]),
        frame({"op": 5}),
        frame({"op": "pull", "id": 0}, bytes(32)),
        frame(HELLO),
        frame({**HELLO, "nonce": None}),
        frame({**HELLO, "version": 10**400}),
    ],
    ids=lambda sent: repr(sent[:30]),
)
def test_unauthenticated_client_is_dropped(side, sent, peer):
    told = json.loads(side.transport.metadata())
    with socket.create_connection(("127.0.0.1", told["port"])) as stranger:
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
    assert peer.ask("connect", metadata=side.transport.metadata().decode()) == {
        "peer": side.transport.agent
    }


@pytest.mark.exhaustive
def test_silent_clients_do_not_block_others(side, peer):
    told = json.loads(side.transport.metadata())
    silent = [socket.create_connection(("127.0.0.1", told["port"])) for _ in range(100)]
    deadline, answer = time.monotonic() + 20, {}
    while "peer" not in answer:
        assert time.monotonic() < deadline
        answer = peer.ask("connect", metadata=side.transport.metadata().decode())
    for each in silent:
        each.close()


def test_listener_survives_failed_accept(side, name, monkeypatch):
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
    with Side(name) as other:
        other.transport.connect(side.transport.metadata(), timeout_s=20)


@pytest.mark.parametrize("mine, theirs", sampled([(b"a", b"b"), (b"", b"b"), (b"a", b"")]))
def test_wrong_secret_is_rejected_on_both_sides(name, mine, theirs):
    with Side(name, secret=mine) as side, Peer(name, secret=theirs) as peer:
        with pytest.raises(ConnectionError, match="has a different secret"):
            side.transport.connect(peer.metadata)
        answer = peer.ask("connect", metadata=side.transport.metadata().decode())
        assert "has a different secret" in answer["error"]
        assert side.transport.peers() == []


def test_own_metadata_is_rejected(name):
    with Side(name, secret=b"a") as side:
        own = {**json.loads(side.transport.metadata()), "agent": "lure", "regions": []}
        with pytest.raises(ValueError, match="incarnation of the metadata is this side's own"):
            side.transport.connect(json.dumps(own).encode(), timeout_s=5)


@pytest.mark.parametrize("own", [False, True])
def test_relayed_proof_is_rejected(name, own):
    """A relay has redirected a side to the relay's own address, but does not know the secret."""
    with Side(name, secret=b"a") as caller, Side(name, secret=b"a") as victim:
        told = json.loads(victim.transport.metadata())
        with socket.create_server(("127.0.0.1", 0)) as lure:
            lured = json.dumps({**told, "port": lure.getsockname()[1]}).encode()
            errors = []

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
def test_wildcard_host_requires_advertise(name, host, peer):
    with pytest.raises(ValueError, match=f"host is '{host}'.*set advertise"):
        Side(name, host=host)
    with pytest.raises(ValueError, match=r"advertise is '0\.0\.0\.0'.*set advertise"):
        Side(name, host=host, advertise="0.0.0.0")
    if host != "0.0.0.0":
        return
    with Side(name, host=host, advertise="127.0.0.1") as side:
        assert json.loads(side.transport.metadata())["host"] == "127.0.0.1"
        answer = peer.ask("connect", metadata=side.transport.metadata().decode())
        assert answer == {"peer": side.transport.agent}
        side.read(peer, 0, 0, SMALL).wait(20)
        assert (side.pool[:SMALL] == pattern(1)[:SMALL]).all()


def test_sides_with_the_same_secret_connect(name):
    with Side(name, secret=b"a") as side, Peer(name, secret=b"a") as peer:
        assert side.transport.connect(peer.metadata) == "peer"


def test_transports_listen_only_on_the_loopback(side, name):
    """Return all listening TCP sockets of this process, as listed by the kernel."""
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


# Invalid arguments, with which nothing is transferred.


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"version": 1}, f"version of the metadata is 1: expected {TRANSPORT_VERSION}"),
        ({"version": True}, "version of the metadata is True"),
        ({"transport": "other"}, "transport of the metadata is 'other'"),
        ({"agent": ""}, "agent is ''"),
        ({"agent": "a\nb"}, "agent is"),
        ({"agent": 5}, "agent of the metadata is 5: expected str"),
        ({"host": ""}, "host of the metadata is ''"),
        ({"incarnation": "1"}, "incarnation of the metadata is '1'"),
        ({"port": 0}, "port of the metadata is 0"),
        ({"port": 2**16}, "port of the metadata is 65536"),
        ({"regions": [[1, 8]]}, "regions of the metadata holds"),
        ({"regions": [[1, 0, "cpu"]]}, "regions of the metadata holds"),
        (
            {"regions": [[1, 8, "hbm:0"]]},
            "expected [address, bytes, kind], of memory of kind cpu, cuda:",
        ),
        ({"regions": [[1, 2**63]]}, "regions of the metadata holds"),
        ({"piece_bytes": 1}, "piece_bytes of the metadata is 1"),
        ({"digest": 1}, "digest of the metadata is 1: expected bool"),
        ({"more": 1}, "metadata has fields"),
    ],
)
def test_invalid_metadata_is_rejected(side, changes, said):
    good = {**json.loads(side.transport.metadata()), "agent": "peer"}
    with pytest.raises(ValueError, match=re.escape(said)):
        side.transport.connect(json.dumps({**good, **changes}).encode())
    assert side.transport.peers() == []


@pytest.mark.parametrize(
    ("data", "said"),
    [
        *((data, "metadata") for data in (b"", b"\x80\x04N.", b"[]", b"{", b"[" * 100_000)),
        # None stands for the side's own metadata.
        *(("{}", "expected bytes"), (None, "expected the metadata of another agent")),
    ],
)
def test_malformed_metadata_is_rejected(side, data, said):
    with pytest.raises((TypeError, ValueError), match=said):
        side.transport.connect(side.transport.metadata() if data is None else data)


def test_unused_address_raises(side):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told = {
        **json.loads(side.transport.metadata()),
        "agent": "peer",
        "incarnation": "0" * 32,
        "port": port,
    }
    with pytest.raises(ConnectionError, match=f"'peer' at 127.0.0.1:{port} was not connected"):
        side.transport.connect(json.dumps(told).encode(), timeout_s=2)


def test_unresponsive_address_raises_within_deadline(side):
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = {**json.loads(side.transport.metadata()), "agent": "peer", "incarnation": "0" * 32}
        told["port"] = server.getsockname()[1]
        begin = time.monotonic()
        with pytest.raises(ConnectionError, match="was not connected"):
            side.transport.connect(json.dumps(told).encode(), timeout_s=0.5)
        assert time.monotonic() - begin < 8  # the default timeout is 10 s


@pytest.mark.exhaustive
def test_duplicate_peer_name_is_rejected_in_both_directions(side, name):
    with Peer(name) as peer, Peer(name, seed=2) as other:
        side.transport.connect(peer.metadata)
        with pytest.raises(ValueError, match="agent 'peer' is connected from"):
            side.transport.connect(other.metadata)
        answer = other.ask("connect", metadata=side.transport.metadata().decode())
        assert "agent 'peer' is already connected" in answer["error"]
        side.read(peer, 0, 0, SMALL).wait(20)
        assert (side.pool[:SMALL] == pattern(1)[:SMALL]).all()


def test_connecting_twice_reuses_the_connection(side, peer):
    side.transport.connect(peer.metadata)
    assert side.transport.connect(peer.metadata) == "peer"
    assert peer.ask("connect", metadata=side.transport.metadata().decode()) == {
        "peer": side.transport.agent
    }
    assert side.transport.peers() == ["peer"]


def test_both_sides_connect_at_the_same_time(name):
    for _ in range(5):
        with Side(name) as one, Side(name) as two:
            start, found = threading.Barrier(2), {}

            def connect(mine, theirs, start=start, found=found):
                told = theirs.transport.metadata()
                start.wait()
                found[mine.transport.agent] = mine.transport.connect(told, timeout_s=20)

            threads = [
                threading.Thread(target=connect, args=pair) for pair in ((one, two), (two, one))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for mine, theirs in ((one, two), (two, one)):
                assert found[mine.transport.agent] == theirs.transport.agent
                assert mine.transport.peers() == [theirs.transport.agent]
                theirs.pool[:] = pattern(4)
                mine.pool[:] = 0
                mine.read(theirs, 0, 0, SMALL, name=theirs.transport.agent).wait(20)
                assert (mine.pool[:SMALL] == pattern(4)[:SMALL]).all()


@pytest.mark.parametrize(
    "local, remote, length, said",
    [
        ([-1], [0], [8], "local has bytes"),
        ([POOL_BYTES - 4], [0], [8], "local has bytes"),
        ([0], [-8], [8], "remote has bytes"),
        ([0], [POOL_BYTES - 4], [8], "remote has bytes"),
        ([0], [0], [0], "length of local holds 0"),
        ([0], [0], [-5], "length of local holds -5"),
        ([0], [2**62], [8], "above 2^62"),
        ([0, 4], [0, 8], [8, 8], "local has byte"),
        ([0, 4], [0], [8], "entries"),
        ([0.5], [0], [8], "expected integers"),
        ([[0]], [0], [8], "expected [n]"),
    ],
)
def test_invalid_fragments_move_nothing(side, local, remote, length, said, peer):
    side.transport.connect(peer.metadata)
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        side.transport.read(
            "peer",
            np.array(local) + side.address,
            np.array(remote) + peer.address,
            np.array(length),
        )
    side.read(peer, 100, 0, 8).wait(20)
    assert not side.pool[:100].any()


def test_unknown_peers_and_invalid_messages_are_rejected(side):
    with pytest.raises(ValueError, match="peer is 'nobody'"):
        side.transport.send("nobody", b"")
    with pytest.raises(ValueError, match="peer is 'nobody'"):
        side.transport.disconnect("nobody")


def test_reads_stay_within_registered_pages(side, peer):
    memory = [torch.zeros(9, 64, dtype=torch.uint8) for _ in range(2)]
    pages = Pages.over(memory)
    side.transport.register(pages)
    begins = np.array([tensor.data_ptr() for tensor in memory])
    side.transport.connect(peer.metadata)
    remote = peer.address + np.array([0, 64])
    side.transport.read("peer", begins + 8 * 64, remote, np.array([64, 64])).wait(20)
    for layer, tensor in enumerate(memory):
        assert (tensor[8].numpy() == pattern(1)[64 * layer :][:64]).all()
        assert not tensor[:8].any()
    with pytest.raises(ValueError, match="local has bytes"):
        side.transport.read("peer", begins[1:] + 9 * 64, remote[1:], np.array([64]))


@pytest.mark.parametrize(
    "memory, said",
    [
        ([(0, 8)], "memory[0][0] is 0"),
        ([(8, 0)], "memory[0][1] is 0"),
        ([(8,)], "memory[0] has 1 entries"),
        (["no"], "memory[0][0] is 'n'"),
    ],
)
def test_invalid_memory_is_not_registered(side, memory, said):
    before = side.transport.metadata()
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        side.transport.register(memory)
    assert side.transport.metadata() == before


@pytest.mark.parametrize(
    "options, said",
    [
        ({"name": "udp"}, "name is 'udp': expected one of nixl, tcp"),
        ({"agent": ""}, "agent is ''"),
        ({"secret": "text"}, "secret is a str"),
        ({"timeout_s": 0}, "timeout_s is 0"),
        ({"piece_bytes": 10}, "piece_bytes is 10"),
        ({"digest": 1}, "digest is 1"),
        ({"host": None}, "host is None"),
        ({"advertise": 5}, "advertise is 5"),
        ({"port": -1}, "port is -1"),
    ],
)
def test_invalid_options_are_rejected(options, said):
    with pytest.raises((ValueError, TypeError), match=re.escape(said)):
        make_transport(**{"agent": "a", "name": "tcp", **options})


def test_close_ends_threads_and_stops_listening(name, peer):
    before = set(threading.enumerate())
    side = Side(name)
    port = json.loads(side.transport.metadata())["port"]
    side.transport.connect(peer.metadata)
    side.read(peer, 0, 0, SMALL, notify=b"last").wait(20)
    side.transport.close()
    side.transport.close()
    assert peer.ask("notifications", least=1)["found"] == [[side.transport.agent, "last"]]
    assert set(threading.enumerate()) <= before
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    with pytest.raises(RuntimeError, match="is closed"):
        side.transport.metadata()


def test_torch_default_group_is_unaffected(name, peer):
    with Side(name) as side:
        side.transport.connect(peer.metadata)
        side.read(peer, 0, 0, SMALL).wait(20)
        assert not torch.distributed.is_initialized()


def test_connect_does_not_outlive_a_close_in_another_thread(monkeypatch):
    """Regression: `connect` checked whether the transport was closed only at its beginning."""
    with Side("tcp", "a") as one, Side("tcp", "b") as other:
        parse = staged.parse_metadata

        def parse_and_close(*args):
            one.transport.close()
            return parse(*args)

        monkeypatch.setattr(staged, "parse_metadata", parse_and_close)
        with pytest.raises(RuntimeError, match="the transport of agent 'a' is closed"):
            one.transport.connect(other.transport.metadata())
        assert one.transport.peers() == other.transport.peers() == []


@pytest.mark.slow
@pytest.mark.parametrize("kill", [False, True])
def test_closed_connections_leak_no_descriptors(name, kill):
    """UCX keeps the sockets of removed NIXL peers open, up to the number of sockets that 16
    connections use.
    """
    count = {"tcp": (16, 8), "nixl": (36, 20)}[name][kill]
    most = {"tcp": 4, "nixl": 16 * 7 + 8}[name]
    first, *marks = curve(name, count, kill=kill, every=2, most_more=most)
    assert max(each.descriptors for each in marks) <= first.descriptors + most, marks
    if name == "nixl":  # shows that an agent was replaced, which closed its sockets
        counts = [each.descriptors for each in marks]
        assert any(later < earlier for earlier, later in itertools.pairwise(counts)), marks
