"""The transport over NIXL, the library of production systems: RDMA, shared memory or TCP, through UCX.

Large fragments move directly between registered memory. Small ones are packed by the side that has them,
written into staging memory of the other one, and scattered there.
"""

from __future__ import annotations

import torch

from kvcache.checks import byte_count
from kvcache.transfer.transport.base import Transfer
from kvcache.transfer.transport.channel import Channel
from kvcache.transfer.transport.connection import Connection
from kvcache.transfer.transport.lane import Lane
from kvcache.transfer.transport.nixl_agent import Agent, kind_of
from kvcache.transfer.transport.nixl_direct import DirectTransfer
from kvcache.transfer.transport.nixl_lane import NixlLane
from kvcache.transfer.transport.registered import Region
from kvcache.transfer.transport.spans import Spans
from kvcache.transfer.transport.staged import StagedTransport

_DIRECT_BYTES = 48 << 10  # a first choice: measured on two busy cores only


class NixlTransport(StagedTransport):
    """direct_bytes: fragments that have as many on average move directly, unless contents are digested;
    None: none does, and pages are not registered with NIXL, so that peers reach staging memory alone.
    """

    name = "nixl"

    def __init__(
        self,
        agent: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        direct_bytes: int | None = _DIRECT_BYTES,
        **options: object,
    ) -> None:
        if direct_bytes is not None:
            direct_bytes = byte_count(direct_bytes, "direct_bytes", 0)
        self._direct_bytes = direct_bytes
        self._kept: list[torch.Tensor] = []
        super().__init__(agent, host=host, port=port, **options)
        if not self.accepts_writes:
            self._direct_bytes = None
        try:
            self.nixl = Agent(self.incarnation, host)
        except BaseException:
            self.close()
            raise

    @property
    def pages_kind(self) -> tuple[str, int] | None:
        """The kind of memory in which all registered pages lie; None where peers do not reach it."""
        kinds = {kind_of(region) for region in self.memory.regions}
        return kinds.pop() if self._direct_bytes is not None and len(kinds) == 1 else None

    def close(self) -> None:
        super().close()
        if (nixl := getattr(self, "nixl", None)) is not None:
            nixl.close()

    def keep(self, memory: torch.Tensor) -> None:
        """Keeps staging memory that a lost peer may still write to, until the transport is deleted."""
        self._kept.append(memory)

    def _on_registered(self, memory: list[Region]) -> None:
        if self._direct_bytes is not None and memory:
            self.nixl.register(memory)

    def _open_lane(self, connection: Connection, channel: Channel, *, timeout_s: float) -> Lane:
        lane = NixlLane(self, connection, channel)
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
        lane, kinds = connection.lane, (self.pages_kind, connection.lane.peer_kind)
        count = local.num_fragments
        is_direct = None not in kinds and count > 0 and not connection.has_digest
        if not is_direct or local.num_bytes < self._direct_bytes * count:
            return super()._start(connection, kind, local, remote, notify, timeout_s)
        transfer = DirectTransfer(connection, kind, local, remote, kinds, notify, timeout_s)
        lane.direct.put(transfer)
        return transfer
