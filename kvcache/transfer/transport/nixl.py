"""The transport over NIXL, the library of production systems: RDMA, shared memory or TCP, through UCX.

Fragments move directly between registered memory, where NIXL reaches that without the peer's help. Small
ones, and those over TCP, are packed by the side that has them, written into staging memory of the other
one, and scattered there.
"""

from __future__ import annotations

import threading
from typing import Literal

from kvcache.checks import byte_count
from kvcache.transfer.transport.base import Transfer
from kvcache.transfer.transport.channel import Channel
from kvcache.transfer.transport.connection import Connection
from kvcache.transfer.transport.lane import Lane
from kvcache.transfer.transport.nixl_agent import Agent, nixl_kind
from kvcache.transfer.transport.nixl_direct import DirectTransfer
from kvcache.transfer.transport.nixl_lane import NixlLane
from kvcache.transfer.transport.registered import Region, kind_within
from kvcache.transfer.transport.spans import Spans
from kvcache.transfer.transport.staged import StagedTransport

# Where NIXL reaches the peer's memory: smaller fragments are packed as fast or faster. Measured in host
# memory; on one machine cuda_ipc takes some 20 times as long for a descriptor (vllm-project/vllm#55434).
_DIRECT_BYTES, _DIRECT_BYTES_BESIDE = 8 << 10, 256 << 10
# UCX keeps up to seven sockets of a peer that NIXL has forgotten until the agent ends (NIXL 1.5.1, three
# threads), so an agent serves as many connections and then gives way. A new one takes 0.2 to 0.4 s.
_MOST_CONNECTIONS = 16


class NixlTransport(StagedTransport):
    """direct_bytes: fragments that have as many on average move directly, unless contents are digested.
    "auto": those of 8 KiB where NIXL reaches the peer's memory without its help (on the same machine, or
    by RDMA devices on both; of 256 KiB on the same machine from or to a CUDA device), and none over TCP,
    where packing is faster. None: none does, and pages are not registered with NIXL, so that peers reach
    staging memory alone. Each transfer's path is that of the regions that it touches.
    """

    name = "nixl"

    def __init__(
        self,
        agent: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        direct_bytes: int | Literal["auto"] | None = "auto",
        **options: object,
    ) -> None:
        if direct_bytes is not None and direct_bytes != "auto":
            direct_bytes = byte_count(direct_bytes, "direct_bytes", 0)
        self._direct_bytes = direct_bytes
        self._kept: list[object] = []
        self._regions: list[Region] = []  # that agents know
        self._agent_lock = threading.Lock()
        self._agent: Agent | None = None  # of the next connection
        self._host = host
        super().__init__(agent, host=host, port=port, **options)
        if not self.accepts_writes:
            self._direct_bytes = None
        try:
            self._agent = Agent(self.incarnation, host)
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether pages are registered with NIXL, so that peers reach them."""
        return self._direct_bytes is not None

    def close(self) -> None:
        super().close()
        with self._agent_lock:
            agent, self._agent = self._agent, None
        if agent is not None:
            agent.release()

    def agent_for_connection(self) -> Agent:
        """An agent that knows all registered memory, to be released. RuntimeError once it is closed."""
        with self._agent_lock:
            if self._agent is None:
                raise RuntimeError(f"the transport of agent {self.agent!r} is closed")
            if self._agent.num_shared >= _MOST_CONNECTIONS:
                following = Agent(self.incarnation, self._host)
                following.register(self._regions)
                self._agent.release()  # it ends with its last connection
                self._agent = following
            return self._agent.share()

    def keep(self, memory: object) -> None:
        """Keeps memory that a lost peer may still write to, until the transport is deleted."""
        self._kept.append(memory)

    def _on_registered(self, memory: list[Region]) -> None:
        if self.is_direct and memory:
            with self._agent_lock:
                self._agent.register(memory)
                self._regions += memory

    def _open_lane(self, connection: Connection, channel: Channel, *, timeout_s: float) -> Lane:
        lane = NixlLane(self, self.agent_for_connection(), connection, channel)
        connection.on_lane_frame(lane.on_frame)
        connection.attach(channel)
        try:
            lane.open(timeout_s)
        except BaseException:
            lane.close()
            raise
        return lane

    def _start(
        self,
        connection: Connection,
        kind: str,
        local: Spans,
        remote: Spans,
        notify: bytes,
        timeout_s: float,
    ) -> Transfer:
        kinds = self._direct_kinds(connection, local, remote)
        if kinds is None:
            return super()._start(connection, kind, local, remote, notify, timeout_s)
        transfer = DirectTransfer(connection, kind, local, remote, kinds, notify, timeout_s)
        connection.lane.direct.put(transfer)
        return transfer

    def _direct_kinds(
        self, connection: Connection, local: Spans, remote: Spans
    ) -> tuple[tuple[str, int], tuple[str, int]] | None:
        """NIXL's kinds of the memory of fragments, local and remote; None where they are packed."""
        lane, count, least = connection.lane, local.num_fragments, self._direct_bytes
        if not lane.is_direct or count == 0 or connection.has_digest:
            return None
        found = (
            self.memory.kind_of(local),
            kind_within(remote, connection.bounds[0], connection.kinds),
        )
        mine, theirs = map(nixl_kind, found)
        if mine is None or theirs is None:
            return None
        if least == "auto":
            if not lane.is_reached:
                return None
            on_device = "VRAM" in (mine[0], theirs[0])
            least = _DIRECT_BYTES_BESIDE if on_device and lane.is_beside else _DIRECT_BYTES
        return (mine, theirs) if local.num_bytes >= least * count else None
