# SPDX-License-Identifier: Apache-2.0
"""The NIXL transport, which is intended for production. It moves bytes over RDMA, shared memory or
TCP, through UCX.

Fragments move directly between registered memory if NIXL can access the peer's memory without the
peer's help. Small fragments, and all fragments over TCP, are packed: the sender writes them to the
receiver's staging memory, from which the receiver scatters them.
"""

from __future__ import annotations

import threading
from typing import Literal

from kvcache.checks import byte_count
from kvcache.transfer import Spans, Transfer
from kvcache_exchange.transport.channel import Channel
from kvcache_exchange.transport.connection import Connection
from kvcache_exchange.transport.lane import Lane
from kvcache_exchange.transport.nixl_agent import Agent, nixl_kind
from kvcache_exchange.transport.nixl_direct import DirectTransfer, least_direct_bytes
from kvcache_exchange.transport.nixl_lane import NixlLane
from kvcache_exchange.transport.registered import Region, kind_within
from kvcache_exchange.transport.staged import StagedTransport

# UCX keeps up to seven sockets of a removed peer open until the agent ends (NIXL 1.5.1, three
# threads). Therefore, an agent is replaced after a limited number of connections. Creating a new
# agent takes 0.2 to 0.4 s.
_MOST_CONNECTIONS = 16


class NixlTransport(StagedTransport):
    """The NIXL transport.

    Args:
        direct_bytes: Minimum mean fragment size, in bytes, at which a transfer moves its fragments
            directly. "auto": 8 KiB if NIXL can access the peer's memory without the peer's help (on
            the same machine, or with RDMA devices on both machines), and 256 KiB from or to a CUDA
            device on the same machine. Over TCP, where packing is faster, and with digests,
            fragments never move directly. None: fragments never move directly, and pages are not
            registered with NIXL, so peers can access only staging memory. The choice is made for
            each transfer, based on the regions that it accesses.
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
        self._regions: list[Region] = []  # regions registered with the agents
        self._agent_lock = threading.Lock()
        self._agent: Agent | None = None  # agent for new connections
        self._host = host
        super().__init__(agent, host=host, port=port, **options)
        try:
            self._agent = Agent(self.incarnation, host)
        except BaseException:
            self.close()
            raise

    @property
    def is_direct(self) -> bool:
        """Whether pages are registered with NIXL and thus accessible to peers."""
        return self._direct_bytes is not None

    def close(self) -> None:
        try:
            super().close()
        finally:
            with self._agent_lock:
                agent, self._agent = self._agent, None
            if agent is not None:
                agent.release()

    def agent_for_connection(self) -> Agent:
        """Return an agent with which all memory is registered.

        The caller must release it. Raises RuntimeError if the transport is closed.
        """
        with self._agent_lock:
            if self._agent is None:
                raise RuntimeError(f"the transport of agent {self.agent!r} is closed")
            if self._agent.num_shared >= _MOST_CONNECTIONS:
                following = Agent(self.incarnation, self._host)
                following.register(self._regions)
                self._agent.release()  # the agent ends with its last connection
                self._agent = following
            return self._agent.share()

    def _on_registered(self, memory: list[Region]) -> None:
        if self.is_direct and memory:
            with self._agent_lock:
                self._agent.register(memory)
                self._regions += memory

    def _on_unregistered(self, memory: list[Region]) -> None:
        """Replace the agent with one that has only the remaining regions, because peers have
        already loaded the old agent's metadata.
        """
        if not self.is_direct:
            return
        gone = {(each.begin, each.end) for each in memory}
        with self._agent_lock:
            self._regions = [each for each in self._regions if (each.begin, each.end) not in gone]
            following = Agent(self.incarnation, self._host)
            following.register(self._regions)
            agent, self._agent = self._agent, following
        agent.deregister_all()
        agent.release()

    def _open_lane(self, connection: Connection, channel: Channel, *, timeout_s: float) -> Lane:
        lane = NixlLane(
            self.agent_for_connection(),
            connection,
            channel,
            self.memory,
            pages_are_registered=self.is_direct,
            keep=self._kept.append,
        )
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
        local: Spans,
        remote: Spans,
        notify: bytes,
        timeout_s: float,
    ) -> Transfer:
        kinds = self._direct_kinds(connection, local, remote)
        if kinds is None:
            return super()._start(connection, local, remote, notify, timeout_s)
        transfer = DirectTransfer(connection, local, remote, kinds, notify, timeout_s)
        connection.lane.direct.put(transfer)
        return transfer

    def _direct_kinds(
        self, connection: Connection, local: Spans, remote: Spans
    ) -> tuple[tuple[str, int], tuple[str, int]] | None:
        """Return NIXL's memory kinds for the local and the remote fragments, or None if the
        fragments are packed.
        """
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
            least = least_direct_bytes(mine[0], theirs[0], is_beside=lane.is_beside)
        return (mine, theirs) if local.num_bytes >= least * count else None
