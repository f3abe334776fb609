# SPDX-License-Identifier: Apache-2.0
"""Two network namespaces, connected by a wire that can drop, delay, repeat and corrupt packets, and
that can be cut.

Each namespace has a TUN device, and a thread forwards packets between the two devices. The
namespaces have no other connection. The wire requires root, `ip` (iproute2) and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 9000
_numbers = itertools.count()


@dataclass(frozen=True)
class Faults:
    """Faults of the wire.

    `loss`, `repeat` and `flip` are fractions of packets. `delay_s` is (minimum, maximum). Packets
    with different delays are reordered.
    """

    loss: float = 0.0
    repeat: float = 0.0
    flip: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    is_cut: bool = False


class Wire:
    """The wire. `addresses` are those of the two ends. `faults` may be changed at any time."""

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, seed: int = 0) -> None:
        self.faults = Faults()
        self.num_packets = self.num_lost = 0
        self._random = random.Random(seed)
        number = f"{os.getpid()}-{next(_numbers)}"
        self.namespaces = (f"kvcache-a-{number}", f"kvcache-b-{number}")
        self.devices = ("kvwire0", "kvwire1")
        self._ends: list[int] = []
        self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    def __enter__(self) -> Wire:
        try:
            for each in self.namespaces:
                _ip("netns", "add", each)
            for i, (name, device) in enumerate(zip(self.namespaces, self.devices)):
                end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                self._ends.append(end)
                # Temporary name of the device in this namespace.
                passing = f"{device}p{os.getpid()}"[:15]
                request = struct.pack("16sH22x", passing.encode(), _IFF_TUN | _IFF_NO_PI)
                fcntl.ioctl(end, _TUNSETIFF, request)
                _ip("link", "set", passing, "netns", name, "name", device)
                _ip("-n", name, "addr", "add", f"{self.addresses[i]}/24", "dev", device)
                _ip("-n", name, "link", "set", device, "mtu", str(_MTU), "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self._remove()
            raise
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._wake[1], b"x")
        self._thread.join()
        self._remove()

    def _remove(self) -> None:
        for end in [*self._ends, *self._wake]:
            os.close(end)
        for each in self.namespaces:
            subprocess.run(["ip", "netns", "del", each], capture_output=True)

    def _run(self) -> None:
        number = itertools.count()
        # Heap of (arrival time, sequence number, end, packet).
        under_way: list[tuple[float, int, int, bytes]] = []
        while True:
            now = time.monotonic()
            while under_way and under_way[0][0] <= now:
                _, _, end, packet = heapq.heappop(under_way)
                # The device's queue is full, or the device is down.
                with contextlib.suppress(OSError):
                    os.write(self._ends[end], packet)
            left = max(under_way[0][0] - now, 0.0) if under_way else None
            ready, _, _ = select.select([*self._ends, self._wake[0]], [], [], left)
            if self._wake[0] in ready:
                return
            for end in ready:
                with contextlib.suppress(OSError):
                    packet = os.read(end, 1 << 16)
                    for when, changed in self._fate(packet):
                        heapq.heappush(
                            under_way, (when, next(number), 1 - self._ends.index(end), changed)
                        )

    def _fate(self, packet: bytes) -> Iterator[tuple[float, bytes]]:
        """Yield (arrival time, packet) for each delivery of a packet, which is delivered any number
        of times.
        """
        faults, draw = self.faults, self._random.random
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
    """Return the reason why this machine cannot create a wire, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need `ip` (iproute2)"
    try:
        with Wire():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"this machine gives no network namespaces with TUN devices: {said}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
