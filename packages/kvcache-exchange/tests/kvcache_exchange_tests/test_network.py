# SPDX-License-Identifier: Apache-2.0
"""The network of namespaces that other tests use: its links fail separately, and it leaves no
namespace and no process behind.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.machinery.forked import Forked, received, send
from tests.machinery.network import Network, die_with_parent, why_not

WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def namespaces():
    """Return the numbers of all network namespaces that a process uses or holds."""
    listed = subprocess.run(["lsns", "-t", "net", "-n", "-o", "NS"], capture_output=True, text=True)
    return set(listed.stdout.split())


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


def can_connect(network, source, target):
    address = network.addresses[target], 4000
    with network.inside(target):
        server = socket.create_server(address)
    with server, network.inside(source):
        try:
            socket.create_connection(address, 0.5).close()
        except TimeoutError:
            return False
        return True


def test_partition_separates_two_namespaces_only():
    own = os.readlink("/proc/thread-self/ns/net")
    with Network("a", "b", "c") as network:
        pairs = [("a", "b"), ("b", "c"), ("c", "a")]
        assert all(can_connect(network, *pair) for pair in pairs)
        network.cut("a", "b")
        assert [can_connect(network, *pair) for pair in pairs] == [False, True, True]
        network.heal()
        assert can_connect(network, "b", "a")
    assert os.readlink("/proc/thread-self/ns/net") == own


def hold(commands):
    """Run a process in a network until this process is killed."""
    with Network("a") as network, network.inside("a"):
        inside = subprocess.Popen(["sleep", "60"], preexec_fn=die_with_parent)
        send(commands, pid=inside.pid, namespace=os.readlink(f"/proc/{inside.pid}/ns/net"))
        received(commands)


def test_killed_owner_leaves_no_namespace_and_no_process():
    with Forked(hold) as owner:
        number = owner.greeting["namespace"].strip("net:[]")
        assert number in namespaces()
        owner.signal(signal.SIGKILL)
        until = time.monotonic() + 10
        while number in namespaces():
            assert time.monotonic() < until
            time.sleep(0.05)
        assert not is_running(owner.greeting["pid"])
