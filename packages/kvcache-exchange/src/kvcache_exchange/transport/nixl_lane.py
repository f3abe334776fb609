# SPDX-License-Identifier: Apache-2.0
"""A lane that sends packed pieces over NIXL. The sender writes them into the receiver's staging
memory.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvcache.checks import shown
from kvcache_exchange.transport.channel import Channel
from kvcache_exchange.transport.connection import Connection
from kvcache_exchange.transport.lane import PIECES_AHEAD, Announce, Lane
from kvcache_exchange.transport.nixl_agent import Agent, Reach
from kvcache_exchange.transport.nixl_direct import DirectFlow
from kvcache_exchange.transport.registered import Region

if TYPE_CHECKING:
    from kvcache_exchange.transport.registered import RegisteredMemory

_MOST_NAME = 128
_HOST = ("DRAM", 0)


class NixlLane(Lane):
    """A lane over NIXL. While it opens, it exchanges one frame with the peer: the addresses of the
    slots, and NIXL's metadata.
    """

    def __init__(
        self,
        agent: Agent,
        connection: Connection,
        channel: Channel,
        memory: RegisteredMemory,
        *,
        pages_are_registered: bool,
        keep: Callable[[object], None],
    ) -> None:
        super().__init__(connection.piece_bytes, memory)
        self._agent, self._registered_memory = agent, memory
        # Whether peers can access pages without this side's help, and a callback that keeps memory
        # alive because a lost peer may still write to it.
        self._pages_are_registered, self._keep = pages_are_registered, keep
        self._connection, self._channel = connection, channel
        self._mapped, pieces = self.staging.mapped, self.staging.pieces
        region = Region(pieces.data_ptr(), pieces.data_ptr() + pieces.nbytes, pieces)
        try:
            self._registered = agent.register([region])
        except BaseException:
            agent.release()
            raise
        self._changed = threading.Condition()
        self._hello: tuple[dict, bytes] | None = None
        self._is_closed = False
        self._peer_slots: list[int] = []
        self.is_direct = False  # whether both sides' pages are registered with NIXL
        self.is_reached = False  # whether NIXL can access the peer's memory without the peer's help
        self.is_beside = False  # whether the peer is on the same machine
        self.direct: DirectFlow | None = None

    def open(self, timeout_s: float) -> None:
        """Exchange NIXL's metadata.

        Raises RuntimeError if the peer does not send valid metadata.
        """
        nixl, deadline = self._agent, time.monotonic() + timeout_s
        slots = [slot.data_ptr() for slot in self.incoming]
        reach = Reach.of_this()
        is_direct = self._pages_are_registered
        header = {"op": "lane", "slots": slots, "direct": is_direct, "reach": list(reach)}
        self._channel.put(header, nixl.metadata())
        with self._changed:
            if not self._changed.wait_for(lambda: self._hello or self._is_closed, timeout_s):
                raise RuntimeError("the peer did not send NIXL's metadata in time")
            if self._hello is None:
                raise RuntimeError("the connection has ended")
        told, metadata = self._hello
        name = self._connection.peer.incarnation
        try:
            nixl.add(metadata, name, max(deadline - time.monotonic(), 0.0))
        except Exception as error:
            raise RuntimeError(f"NIXL refuses the peer's metadata: {error}") from error
        self._peer_slots = told["slots"]
        self.is_direct = is_direct and told["direct"]
        peer_reach = Reach(*told["reach"])
        self.is_reached, self.is_beside = reach.reaches(peer_reach), reach.is_beside(peer_reach)
        with self._changed:
            if not self._is_closed:
                self.direct = DirectFlow(
                    nixl, self._connection, self._registered_memory.enter_device, self._let_go
                )
                self.threads = [self.direct.thread]
                return
        nixl.remove(name)
        raise RuntimeError("the connection has ended")

    def on_frame(self, header: dict, payload: bytes) -> None:
        """Handle a frame from the peer. Raises ValueError if the frame violates the protocol."""
        _check_hello(header)
        with self._changed:
            if self._hello is not None:
                raise ValueError("unexpected frame of the lane: expected one")
            self._hello = (header, payload)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._changed.notify_all()
        if self.direct is not None:
            self.direct.close()
        else:
            self._let_go()

    def _let_go(self) -> None:
        """Release the lane's resources after it has ended.

        A lost peer that can access this side's memory without its help may still write to the
        lane's staging memory. Therefore, the address range stays reserved, without backing memory.
        """
        self._agent.deregister(self._registered)
        self.staging = None  # unpinned once no copy is running
        self._mapped.madvise(mmap.MADV_DONTNEED)
        (self._keep if self.is_reached else self._agent.keep)(self._mapped)
        self._agent.release()

    def send(self, slot: int, header: dict) -> Announce:
        sides = [
            (np.array([self.outgoing[slot].data_ptr()]), *_HOST),
            (np.array([self._peer_slots[slot]]), *_HOST),
        ]
        peer, length = self._connection.peer.incarnation, np.array([header["bytes"]])
        handle = self._agent.begin("WRITE", peer, sides, length)

        def announce(timeout_s: float) -> None:
            handle.wait(time.monotonic() + timeout_s, lambda: self._is_closed)
            handle.release()
            self._channel.put(header)

        return announce

    def receive(self, slot: int, num_bytes: int) -> None:
        """Do nothing: the peer has written the piece into the slot."""


def _check_hello(header: dict) -> None:
    slots, direct, reach = (header.get(name) for name in ("slots", "direct", "reach"))
    if (
        not isinstance(slots, list)
        or len(slots) != PIECES_AHEAD
        or not all(type(each) is int and 0 < each < 2**62 for each in slots)
    ):
        raise ValueError(f"slots are {shown(slots)}: expected {PIECES_AHEAD} addresses")
    if type(direct) is not bool:
        raise ValueError(f"direct is {shown(direct)}: expected true or false")
    if (
        not isinstance(reach, list)
        or [type(each) for each in reach] not in ([str, bool], [type(None), bool])
        or len(reach[0] or "") > _MOST_NAME
    ):
        raise ValueError(f"reach is {shown(reach)}: expected a machine name, and true or false")
