# SPDX-License-Identifier: Apache-2.0
"""A star-shaped network of namespaces. Its links can drop, delay, duplicate and corrupt packets,
and the network can be partitioned.

Each namespace has a TUN device, and a thread forwards packets between these devices. There is no
other connection between the namespaces. The namespaces are anonymous, so the kernel removes a
namespace and its device when the last process in it ends, even if the process is killed. The
network requires root, `ip` (iproute2) and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNS, _CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x00020000, 0x40000000, 1
_OWN = "/proc/thread-self/ns/net"
_MTU = 9000
DEVICE = "kvcache0"  # name of the TUN device in each namespace
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Faults:
    """Faults on a link.

    `loss`, `repeat` and `flip` are the fractions of packets that are lost, duplicated and
    corrupted. `delay_s` is the (minimum, maximum) delay per direction. Different delays can reorder
    packets.
    """

    loss: float = 0.0
    repeat: float = 0.0
    flip: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    is_cut: bool = False


class Network:
    """A network that exists during its `with` block.

    `faults` applies to all links that are not in `links`. `links` contains the faults of individual
    links, keyed by the set of the two names that a link connects. Both may be changed at any time.
    `addresses` and `namespaces` contain the IP address and the path of each namespace, by name.
    """

    def __init__(self, *names: str, seed: int = 0) -> None:
        self.faults = Faults()
        self.links: dict[frozenset[str], Faults] = {}
        self.num_packets = self.num_lost = 0
        self.addresses = {name: f"10.77.0.{i}" for i, name in enumerate(names, 1)}
        self.namespaces: dict[str, str] = {}
        self._names = names
        self._numbers = {bytes([10, 77, 0, i + 1]): i for i in range(len(names))}
        self._random = random.Random(seed)
        self._held: dict[str, int] = {}  # file descriptors of the namespaces
        self._ends: list[int] = []  # file descriptors of the devices
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="network", daemon=True)

    def __enter__(self) -> Network:
        try:
            with ThreadPoolExecutor(1) as other:  # the calling thread stays in its namespace
                for name in self._names:
                    other.submit(self._add, name).result()
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._wake[1], b"x")
        self._thread.join()
        self._remove()

    def cut(self, one: str, *others: str) -> None:
        """Drop all packets between one namespace and the given others."""
        for each in others:
            pair = frozenset((one, each))
            self.links[pair] = replace(self.links.get(pair, self.faults), is_cut=True)

    def heal(self) -> None:
        """Remove the faults of individual links, so that `faults` applies to all links."""
        self.links = {}

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Switch this thread to a namespace during the `with` block. Sockets that it opens, and
        threads and processes that it starts, belong to the namespace.
        """
        before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _call("setns", self._held[name], _CLONE_NEWNET)
            try:
                yield
            finally:
                _call("setns", before, _CLONE_NEWNET)
        finally:
            os.close(before)

    def set(self, name: str, setting: str, value: int) -> None:
        """Set a kernel parameter of a namespace, such as "net/ipv4/tcp_retries2"."""
        with self.inside(name):
            Path("/proc/sys", setting).write_text(str(value))

    def _add(self, name: str) -> None:
        _call("unshare", _CLONE_NEWNET)
        self._held[name] = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
        self.namespaces[name] = f"/proc/{os.getpid()}/fd/{self._held[name]}"
        self._ends.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC))
        request = struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI)
        fcntl.ioctl(self._ends[-1], _TUNSETIFF, request)
        _ip("addr", "add", f"{self.addresses[name]}/24", "dev", DEVICE)
        _ip("link", "set", DEVICE, "mtu", str(_MTU), "up")
        _ip("link", "set", "lo", "up")

    def _remove(self) -> None:
        for each in [*self._ends, *self._wake, *self._held.values()]:
            os.close(each)

    def _run(self) -> None:
        number = itertools.count()
        # Heap of (arrival time, sequence number, end, packet).
        under_way: list[tuple[float, int, int, bytes]] = []
        while True:
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, _, end, packet = heapq.heappop(under_way)
                # The packet is lost if the device's queue is full or the device is down.
                with contextlib.suppress(OSError):
                    os.write(self._ends[end], packet)
            left = max(under_way[0][0] - now, 0.0) if under_way else None
            ready, _, _ = select.select([*self._ends, self._wake[0]], [], [], left)
            if self._wake[0] in ready:
                return
            for end in ready:
                with contextlib.suppress(OSError):
                    packet = os.read(end, 1 << 16)
                    to = self._numbers.get(packet[16:20])  # the IPv4 destination address
                    if packet[0] >> 4 != 4 or to is None:
                        continue
                    for when, changed in self._fate(packet, self._ends.index(end), to):
                        heapq.heappush(under_way, (when, next(number), to, changed))

    def _fate(self, packet: bytes, end: int, to: int) -> Iterator[tuple[float, bytes]]:
        """Yield (arrival time, packet) for each delivery of a packet. A packet may be delivered
        once, several times, or not at all.
        """
        pair = frozenset((self._names[end], self._names[to]))
        faults, draw = self.links.get(pair, self.faults), self._random.random
        self.num_packets += 1
        if faults.is_cut or draw() < faults.loss:
            self.num_lost += 1
            return
        for _ in range(2 if draw() < faults.repeat else 1):
            if draw() < faults.flip:
                changed = bytearray(packet)
                changed[self._random.randrange(20, len(changed))] ^= 1 << self._random.randrange(8)
                packet = bytes(changed)
            yield time.monotonic() + self._random.uniform(*faults.delay_s), packet


def why_not() -> str | None:
    """Return the reason why this machine cannot create a network, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    try:
        with Network("a"):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"this machine does not support network namespaces with TUN devices: {said}"


def enter(namespace: str) -> None:
    """Move this process to a namespace. The process must have a single thread.

    The process also gets its own /sys, because UCX looks for network devices there, and /sys shows
    the devices of the namespace in which it was mounted.
    """
    with open(namespace) as file:
        _call("setns", file.fileno(), _CLONE_NEWNET)
    _call("unshare", _CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "sysfs", "sysfs", "/sys"], check=True)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent thread ends. For use as `preexec_fn`."""
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
