# SPDX-License-Identifier: Apache-2.0
"""The TCP transport, which needs no extra packages. It sends bytes through host memory."""

from __future__ import annotations

from kvcache_exchange.transport.channel import Channel
from kvcache_exchange.transport.connection import Connection
from kvcache_exchange.transport.lane import Announce, Lane, nothing_to_wait_for
from kvcache_exchange.transport.registered import RegisteredMemory
from kvcache_exchange.transport.staged import StagedTransport


class TcpTransport(StagedTransport):
    """A transport whose pieces follow their frames on the channel."""

    name = "tcp"

    def _open_lane(self, connection: Connection, channel: Channel, *, timeout_s: float) -> Lane:
        lane = _TcpLane(channel, connection.piece_bytes, self.memory)
        connection.attach(channel)
        return lane


class _TcpLane(Lane):
    def __init__(self, channel: Channel, piece_bytes: int, memory: RegisteredMemory) -> None:
        super().__init__(piece_bytes, memory)
        self._channel = channel

    def send(self, slot: int, header: dict) -> Announce:
        self._channel.put(header, body=self.outgoing[slot, : header["bytes"]].numpy())
        return nothing_to_wait_for

    def receive(self, slot: int, num_bytes: int) -> None:
        self._channel.receive_into(self.incoming[slot, :num_bytes].numpy())

    def close(self) -> None:
        """Do nothing: the connection closes the channel."""
