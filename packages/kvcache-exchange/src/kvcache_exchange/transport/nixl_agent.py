# SPDX-License-Identifier: Apache-2.0
"""A wrapper around NIXL's agent, which handles registered memory, peers, and transfers of
descriptor lists.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from kvcache.checks import shown
from kvcache_exchange.transport.registered import Region

# Spin and poll times in seconds. In interleaved runs of 300 reads of 256 x 64 KiB on two overloaded
# cores, throughput was 0.72 GB/s with a spin time of 2 ms, 0.71 GB/s with 10 ms, and 0.58 GB/s with
# 0.2 ms.
_SPIN_S, _POLL_S = 2e-3, 50e-6
_NUM_THREADS = 3  # number of agent threads, which share lists of 1,024 or more descriptors
_PROGRESS_US = 1000  # sleep time of the agent's thread in microseconds, unless a UCX event wakes it
_making = threading.Lock()  # held while an agent is created, which changes process-wide settings


class Agent:
    """A NIXL agent with the UCX backend. All methods are thread-safe.

    The agent's creator and every caller of `share` own the agent. It ends when every owner has
    called `release`.

    Args:
        name: Name of the agent.
        host: Address on which the agent may listen. For a loopback address, UCX is restricted to
            the loopback device unless UCX_NET_DEVICES is set.

    Raises:
        ImportError: NIXL is not installed.
    """

    def __init__(self, name: str, host: str) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise ImportError(
                "the transport 'nixl' needs NIXL: pip install 'torch-kvcache[nixl]'"
            ) from error
        config = nixl_agent_config(
            backends=["UCX"],
            num_threads=_NUM_THREADS,
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        with _making, _network_devices(host), _sleeping_thread(sys.modules[nixl_agent.__module__]):
            self._agent = nixl_agent(name, config)
        self._changed = threading.Condition()
        self._num_users = 1
        self._peers: set[str] = set()
        self._kept: list[object] = []
        self._registered: list[object] = []  # NIXL's handles for registered memory
        self.num_shared = 0  # number of `share` calls

    def share(self) -> Agent:
        """Add an owner, and return this agent."""
        with self._changed:
            self._num_users += 1
            self.num_shared += 1
        return self

    def release(self) -> None:
        """Remove an owner.

        After the last owner is removed, the agent ends once transfers in flight have released it.
        """
        with self._changed:
            self._num_users -= 1
            if self._num_users == 0:
                self._agent = None
                self._kept.clear()

    def keep(self, memory: object) -> None:
        """Keep memory alive as long as the agent exists."""
        self._kept.append(memory)

    def register(self, regions: list[Region]) -> list:
        """Register memory. If this fails, none of it is registered.

        Returns the argument to pass to `deregister`. Raises RuntimeError if NIXL rejects the
        memory.
        """
        by_kind: dict[str, list[tuple[int, int, int, str]]] = {}
        for region in regions:
            if (found := nixl_kind(region.kind)) is None:
                continue
            kind, device = found
            row = (region.begin, region.end - region.begin, device, "")
            by_kind.setdefault(kind, []).append(row)
        registered = []
        for kind, rows in by_kind.items():
            try:
                registered.append(self._agent.register_memory(rows, kind))
            except Exception as error:  # raised by NIXL
                self.deregister(registered)
                raise RuntimeError(
                    f"NIXL cannot share memory of kind {kind} with other processes ({error}): "
                    "expected memory that it can share, or direct_bytes=None, which routes all bytes "
                    "through host memory"
                ) from error
        self._registered += registered
        return registered

    def deregister(self, registered: list) -> None:
        """Deregister the result of `register`."""
        for each in registered:
            with suppress(Exception):  # NIXL may have released the memory
                self._agent.deregister_memory(each)
        self._registered = [
            each for each in self._registered if not any(each is other for other in registered)
        ]

    def deregister_all(self) -> None:
        """Deregister all memory once the transfers with all peers have ended."""
        self.deregister(self._registered)

    def metadata(self) -> bytes:
        """Return the metadata with which a peer's agent can access the memory registered so far."""
        return self._agent.get_agent_metadata()

    def add(self, metadata: bytes, name: str, timeout_s: float) -> None:
        """Add a peer, after NIXL has forgotten any earlier peer of the same name.

        Raises:
            RuntimeError: Transfers with an earlier peer of the same name did not end in time, or
                the metadata belongs to another peer. Invalid metadata may raise other exceptions.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: name not in self._peers, timeout_s):
                raise RuntimeError(
                    "transfers with the earlier peer of this name have not ended in time"
                )
            self._peers.add(name)
        try:
            found = self._agent.add_remote_agent(metadata)
            found = found.decode() if isinstance(found, bytes) else found
            if found != name:
                self._forget(found)
                raise RuntimeError(
                    f"NIXL metadata belongs to agent {shown(found)}: expected {shown(name)}"
                )
        except BaseException:
            self._free_name(name)
            raise

    def remove(self, name: str) -> None:
        """Remove a peer that was added."""
        self._forget(name)
        self._free_name(name)

    def _forget(self, name: str) -> None:
        with suppress(Exception):  # the peer is usually unreachable by now
            self._agent.remove_remote_agent(name)

    def _free_name(self, name: str) -> None:
        with self._changed:
            self._peers.discard(name)
            self._changed.notify_all()

    def begin(
        self,
        operation: str,
        peer: str,
        sides: list[tuple[np.ndarray, str, int]],
        length: np.ndarray,
    ) -> Handle:
        """Start moving bytes.

        Args:
            operation: "READ" or "WRITE".
            peer: Name of the peer.
            sides: Local and remote side, each as a tuple of addresses (int64[n]), memory kind, and
                device.
            length: int64[n]. Length of each fragment in bytes.

        Raises:
            RuntimeError: NIXL rejects the transfer. NIXL may also raise other exceptions.
        """
        lists = []
        for (addresses, kind, device), name in zip(sides, ("NIXL_INIT_AGENT", peer)):
            rows = np.empty((len(length), 3), np.uint64)
            rows[:, 0], rows[:, 1], rows[:, 2] = addresses, length, device
            lists.append(self._agent.prep_xfer_dlist(name, rows, kind))
        numbers = np.arange(len(length), dtype=np.int32)
        request = self._agent.make_prepped_xfer(operation, lists[0], numbers, lists[1], numbers)
        return Handle(self._agent, request, lists)


class Handle:
    """A NIXL transfer."""

    def __init__(self, agent: object, request: object, lists: list) -> None:
        self._agent, self._request, self._lists = agent, request, lists
        self._state = agent.transfer(request)

    def is_done(self) -> bool:
        """Return whether all bytes have moved.

        Raises RuntimeError, or one of NIXL's exceptions, on failure.
        """
        if self._state == "PROC":
            self._state = self._agent.check_xfer_state(self._request)
        if self._state == "ERR":
            raise RuntimeError("NIXL reports an error")
        return self._state == "DONE"

    def wait(self, deadline: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait for the transfer.

        Raises TimeoutError after `deadline`, or when `is_over()` returns true.
        """
        begin = time.monotonic()
        while not self.is_done():
            now = time.monotonic()
            if now > deadline or is_over():
                raise TimeoutError("the peer did not answer in time")
            if now > begin + _SPIN_S:
                time.sleep(_POLL_S)

    def has_ended(self) -> bool:
        """Return whether NIXL no longer accesses memory for the transfer, whether it succeeded or
        failed.
        """
        try:
            return self.is_done()
        except Exception:
            return True

    def release(self) -> None:
        """Free NIXL's resources for a transfer that has ended."""
        with suppress(Exception):  # the peer may be unreachable
            self._agent.release_xfer_handle(self._request)
        for each in self._lists:
            self._agent.release_dlist_handle(each)
        self._lists = []


# UCX transports that access another process's memory without that process's help.
_WITHIN_A_MACHINE = {"all", "sm", "shm", "cma", "knem", "xpmem", "cuda_ipc"}
_RDMA = {"all", "ib", "rc", "dc", "ud"}


class Reach(NamedTuple):
    """Describes how a process can access other processes' memory without their help.

    Attributes:
        machine: Machine identifier. It is equal for processes that can access each other's memory
            within one machine.
        has_rdma: Whether this machine has RDMA devices.
    """

    machine: str | None
    has_rdma: bool

    @classmethod
    def of_this(cls) -> Reach:
        """Return this process's reach, as permitted by UCX_TLS.

        UCX_TLS is a list of transports, or "^" followed by a list of excluded transports. Unknown
        names are treated as TCP.
        """
        text = os.environ.get("UCX_TLS", "all").strip()
        listed = {each.strip() for each in text.removeprefix("^").split(",")}
        kinds = {each.split("_")[0] for each in listed}  # for example, "rc" from "rc_mlx5"

        def allows(names: set[str], family: set[str]) -> bool:
            return not names & family if text.startswith("^") else bool(names & family)

        machine = None
        if allows(listed, _WITHIN_A_MACHINE):
            with suppress(OSError):  # the system is not Linux
                boot = Path("/proc/sys/kernel/random/boot_id").read_text()
                names = "".join(os.readlink(f"/proc/self/ns/{each}") for each in ("pid", "user"))
                machine = hashlib.sha256((boot + names).encode()).hexdigest()
        has_device = any(Path("/sys/class/infiniband").glob("*"))
        return cls(machine, has_device and allows(kinds, _RDMA))

    def is_beside(self, other: Reach) -> bool:
        """Return whether both processes are on the same machine and can access each other's memory."""
        return self.machine is not None and self.machine == other.machine

    def reaches(self, other: Reach) -> bool:
        """Return whether both processes can access each other's memory, on one machine or by RDMA."""
        return self.is_beside(other) or (self.has_rdma and other.has_rdma)


def nixl_kind(kind: str | None) -> tuple[str, int] | None:
    """Return NIXL's memory kind and the device number for a `Region.kind`.

    Returns None for memory that no other process can access; its bytes are copied through host
    memory.
    """
    if kind == "cpu":
        return "DRAM", 0
    if kind is not None and kind.startswith("cuda:"):
        return "VRAM", int(kind.removeprefix("cuda:"))
    return None


@contextmanager
def _network_devices(host: str) -> Iterator[None]:
    """Restrict UCX to the loopback device if `host` is a loopback address.

    By default, UCX listens on every device.
    """
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback or "UCX_NET_DEVICES" in os.environ:
        yield
        return
    os.environ["UCX_NET_DEVICES"] = "lo"
    try:
        yield
    finally:
        del os.environ["UCX_NET_DEVICES"]


@contextmanager
def _sleeping_thread(api: ModuleType) -> Iterator[None]:
    """Make the threads of new agents sleep between events.

    NIXL's Python API does not expose this option and always passes 0, with which the thread never
    sleeps and occupies a core that the engine and the transfers need.
    """
    bindings = api.nixlBind
    make = bindings.nixlAgent

    def make_sleeping(name: str, config: object) -> object:
        config.pthrDelay = _PROGRESS_US
        return make(name, config)

    bindings.nixlAgent = make_sleeping
    try:
        yield
    finally:
        bindings.nixlAgent = make
