# SPDX-License-Identifier: Apache-2.0
"""Sends random and mutated bytes to a transport, which must reject them and continue to serve other
peers.
"""

import json
import random
import secrets
import socket
import struct
import time
from contextlib import suppress

import numpy as np
import pytest

from kvcache.transfer.transport.base import TransferError
from kvcache.transfer.transport.spans import Spans
from kvcache_exchange.transport import handshake
from kvcache_exchange.transport.channel import receive_frame
from kvcache_exchange.transport.metadata import parse_metadata
from kvcache_exchange_tests.test_transports import NAMES
from tests.machinery.shared import seed_of_test
from tests.machinery.transport_peer import Side

NUM_BYTES = 1 << 16
GUARD = 4096  # number of unregistered bytes on either side of the pool
JUNK = (
    [None, True, -1, 0, 1, 2, 3, 2**31, 2**63, 10**400, 1.5, float("nan"), "", "x", "x" * 300, "\0"]
    + ["\u2028", [], [[]], [1, 2], {}, {"op": "hello"}, "0.0.0.0", "::1", "a" * 70 + ".invalid"]
)  # fmt: skip


class Guarded(Side):
    """A side whose registered pool lies between two guard areas."""

    def __init__(self, name, agent):
        options = {"seed": 3, "num_bytes": NUM_BYTES + 2 * GUARD, "timeout_s": 2}
        super().__init__(name, agent, piece_bytes=1 << 13, **options)
        self.transport.unregister([(self.address, len(self.pool))])
        self.address += GUARD
        self.transport.register([(self.address, NUM_BYTES)])
        self.told = json.loads(self.metadata)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def rng():
    seed = seed_of_test()
    print(f"seed {seed}")
    return random.Random(seed)


def check_alive(side, name, before):
    """Check that this side still serves another peer and that none of its bytes has changed."""
    with Guarded(name, f"honest {secrets.token_hex(4)}") as honest:
        honest.connect(side, timeout_s=20)
        honest.pool[:] = 0
        at = np.arange(0, NUM_BYTES, 64)
        honest.read(side, at, at[::-1], 64, timeout_s=20).wait(20)
        wanted = before[GUARD:-GUARD].reshape(-1, 64)[::-1].ravel()
        assert (honest.pool[GUARD:-GUARD] == wanted).all()
    assert (side.pool == before).all()


def mutated(rng, value):
    """Return the JSON value with a part replaced, omitted or added."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        changed, key = dict(value), rng.choice(list(value))
        how = rng.random()
        if how < 0.15:
            del changed[key]
        elif how < 0.25:
            changed[rng.choice(["more", "op", "id", "bytes"])] = rng.choice(JUNK)
        else:
            changed[key] = mutated(rng, changed[key])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        changed = list(value)
        changed[rng.randrange(len(changed))] = mutated(rng, rng.choice(changed))
        return changed
    if type(value) is int and rng.random() < 0.5:
        return value + rng.choice([-4096, -8, -1, 1, 8, 4096, 2**40])
    return rng.choice(JUNK)


def encoded(rng, header, payload, how_often):
    """Encode a frame, occasionally with wrong lengths or flipped bits, or truncated."""
    text = json.dumps(header).encode()
    lengths = [len(text), len(payload)]
    if rng.random() < how_often:
        lengths[rng.randrange(2)] = rng.choice([0, 1, 7, 2**16, 2**26 + 1, 2**32 - 1])
    data = bytearray(struct.pack("<II", *lengths) + text + payload)
    if rng.random() < how_often:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < how_often:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


@pytest.mark.slow
def test_mutated_handshakes_are_rejected(name, rng, monkeypatch):
    with Guarded(name, "side") as side:
        before = side.pool.copy()
        with monkeypatch.context() as patch:
            # The side waits for the rest of truncated frames, so the timeout is short. The honest
            # peer below uses the full timeout.
            patch.setattr(handshake, "_HANDSHAKE_S", 1.0)
            for number in range(40):
                mine = dict(
                    side.told, agent=f"stranger {number}", incarnation=secrets.token_hex(16)
                )
                at = rng.randrange(3)  # index of the mutated frame
                with socket.create_connection(("127.0.0.1", side.told["port"])) as sock:
                    sock.settimeout(20)
                    try:
                        shake_hands(sock, side.told, mine, rng, at)
                        while True:  # either the mutation is harmless or the side sends an error
                            header, _ = receive_frame(sock, deadline=time.monotonic() + 20)
                            assert header["op"] in ("refused", "ready", "lane", "metadata")
                            if header["op"] != "metadata":
                                break
                    except (OSError, KeyError):
                        pass  # the side has disconnected, or its response has no nonce
        for connected in side.transport.peers():
            assert not connected.startswith("stranger")
        check_alive(side, name, before)


def shake_hands(sock, told, mine, rng, wrong):
    """Connect like a peer, but mutate one of the frames."""
    nonce = secrets.token_hex(32)
    between = (mine["incarnation"], told["incarnation"], f"{told['host']}:{told['port']}")
    hello = {"op": "hello", "version": mine["version"], "nonce": nonce}
    hello |= {"transport": mine["transport"], "address": between[2]}
    hello |= {"from": between[0], "to": between[1]}

    def send(number, header, payload=b""):
        if number == wrong and not payload:
            header = mutated(rng, header)
        sock.sendall(encoded(rng, header, payload, 0.2 if number == wrong else 0.0))

    send(0, hello)
    answer, _ = receive_frame(sock, deadline=time.monotonic() + 20)
    proof = handshake._proof(b"", "from", (nonce, answer["nonce"]), between)
    send(1, {"op": "proof", "proof": proof})
    receive_frame(sock, deadline=time.monotonic() + 20)
    send(2, {"op": "metadata"}, json.dumps(mutated(rng, mine)).encode())
    sock.shutdown(socket.SHUT_WR)


def test_mutated_metadata_are_rejected(name, rng):
    with Guarded(name, "side") as side, Guarded(name, "other") as other:
        before = side.pool.copy()
        for _ in range(100):
            told = mutated(rng, other.told)
            data = bytearray(json.dumps(told).encode())
            if rng.random() < 0.2:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            try:
                parse_metadata(bytes(data), name)
            except ValueError:
                with pytest.raises(ValueError):
                    side.transport.connect(bytes(data))
                continue
            # The metadata may remain valid if only the name or a memory address was mutated.
            with suppress(ConnectionError, ValueError):
                side.transport.disconnect(side.transport.connect(bytes(data), timeout_s=0.5))
        check_alive(side, name, before)


def drawn_spans(rng, address):
    """Draw encoded spans as a peer would send them, valid or invalid."""
    count = rng.choice([0, 1, 2, 50])
    length = np.array([rng.choice([1, 8, 512]) for _ in range(count)], np.int64)
    at = np.array([rng.randrange(0, NUM_BYTES - 512) for _ in range(count)], np.int64)
    if rng.random() < 0.5 and count:
        wrong = rng.choice([-GUARD, NUM_BYTES, 2**61, -(2**61), -address])
        at[rng.randrange(count)] = wrong
    data = bytearray(Spans(np.array([address]), at, length).to_bytes())
    if rng.random() < 0.3:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    if rng.random() < 0.2:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


OPS = {
    **{"pull": ["id"], "start": ["id", "bytes"], "piece": ["id", "bytes", "digest"], "end": ["id"]},
    **{"done": ["id"], "refused": ["id", "reason"], "cancel": ["id"], "taken": [], "message": []},
    **{"ready": [], "lane": ["slots", "direct", "reach"], "begin": ["id"]},
}


def drawn_frame(rng, address):
    """Draw (header, payload) of a frame that, except for one value, is often valid."""
    op = rng.choice(list(OPS))
    header = {"op": op}
    for key in OPS[op]:
        header[key] = rng.choice([0, 1, 2, 3, 8, rng.choice(JUNK)])
    payload = b""
    if op == "pull":
        payload = drawn_spans(rng, address)
    elif rng.random() < 0.3:
        payload = rng.randbytes(rng.choice([1, 16, 4096]))
    return header, payload


@pytest.mark.slow
def test_malicious_frames_of_connected_peer_are_rejected(name, rng):
    with Guarded(name, "side") as side:
        before = side.pool.copy()
        for number in range(12):
            with Guarded(name, f"liar {number}") as liar:
                peer = liar.connect(side, timeout_s=20)
                channel = liar.transport._connections[peer].channel
                channel._on_frame = lambda header, payload: None  # the liar ignores all frames
                try:
                    for _ in range(25):
                        frame = drawn_frame(rng, side.address)
                        channel._sock.sendall(encoded(rng, *frame, 0.02))
                except OSError:
                    pass  # disconnected
                # Requests that this side sends to the liar must end, with or without an error.
                try:
                    side.read(liar, 0, 0, 8, timeout_s=0.2).wait(1)
                    before[GUARD : GUARD + 8] = side.pool[GUARD : GUARD + 8]
                except TransferError:
                    pass
        check_alive(side, name, before)
