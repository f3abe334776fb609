# SPDX-License-Identifier: Apache-2.0
"""Transports over a network that drops, delays, reorders, repeats and corrupts packets, and that is
cut at times.

A transfer must deliver correct bytes or raise an error. The network is a thread of this process
that connects network namespaces (`tests/machinery/network.py`).
"""

from __future__ import annotations

import threading
import time

import pytest

from kvcache_exchange_tests.test_transports import NAMES
from tests.machinery.network import DEVICE, Faults, Network, why_not
from tests.machinery.transport_peer import Peer

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

AGENTS = ("reader", "server")
TIMEOUT_S, GRACE_S = 3.0, 10.0
RELIABLE_S = 20.0  # the timeout in tests where every transfer must succeed
SIZE = 256 << 10
FAULTS = {
    "none": Faults(),
    "loss": Faults(loss=0.02),
    "delay and reordering": Faults(delay_s=(0.001, 0.02)),
    "repetition": Faults(repeat=0.2, delay_s=(0.0, 0.002)),
    "flipped bits": Faults(flip=0.02),
    "all": Faults(loss=0.02, repeat=0.05, flip=0.01, delay_s=(0.0, 0.01)),
}


class Two:
    """Two transports, one per namespace. The first one reads from the second."""

    def __init__(self, network, name, digest=False, timeout_s=TIMEOUT_S):
        self.timeout_s = timeout_s
        self.sides = []
        for end, agent in enumerate(AGENTS):
            environment = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE}
            options = {"host": network.addresses[agent], "timeout_s": timeout_s, "seed": 1 + end}
            options |= {"namespace": network.namespaces[agent], "environment": environment}
            self.sides.append(Peer(name, agent, digest=digest, **options))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for each in self.sides:
            each.__exit__()

    def attempt(self):
        """Attempt a read, and return whether its bytes arrived.

        Bytes that arrive must be correct, and a failed transfer must raise an error. The transfer
        must complete or fail in time.
        """
        reader, server = self.sides
        said = reader.ask(
            "attempt", metadata=server.metadata.decode(), address=server.address,
            size=SIZE, source=2, timeout_s=90,
        )  # fmt: skip
        assert said["seconds"] < 2 * self.timeout_s + GRACE_S, said
        if said["error"] is not None:
            assert said["is_right"] is None
            return False
        assert said["is_right"], said
        return True


def come(two, within_s=60.0):
    """Retry until a read succeeds."""
    deadline = time.monotonic() + within_s
    while not two.attempt():
        assert time.monotonic() < deadline, "no read succeeds any more"


@pytest.mark.slow
@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize("name", NAMES)
def test_faulty_network_gives_correct_bytes_or_an_error(name, faults):
    are_all_right = faults in ("none", "delay and reordering", "repetition")
    timeout_s = RELIABLE_S if are_all_right else TIMEOUT_S
    with Network(*AGENTS) as network, Two(network, name, timeout_s=timeout_s) as two:
        come(two)
        before = network.num_packets
        network.faults = FAULTS[faults]
        found = [two.attempt() for _ in range(3)]
        # Shows that the bytes passed through this network.
        assert network.num_packets - before > SIZE // 9000
        assert all(found) or not are_all_right
        network.faults = Faults()
        come(two)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_partition_during_transfer_gives_no_wrong_bytes(name):
    with Network(*AGENTS) as network, Two(network, name) as two:
        come(two)
        for seconds in (0.01, 0.05, 0.2):
            network.faults = Faults(delay_s=(0.01, 0.03))
            cut = threading.Timer(seconds, lambda: setattr(network, "faults", Faults(is_cut=True)))

            def healed(cut=cut):
                cut.join()  # otherwise, a late timer could cut the network permanently
                network.faults = Faults()

            heal = threading.Timer(1.0, healed)
            cut.start()
            heal.start()
            two.attempt()
            two.attempt()
            cut.join()
            heal.join()
        come(two)
