# SPDX-License-Identifier: Apache-2.0
"""A lane that sends packed pieces over NIXL. The sender writes them into the receiver's staging
memory.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvcache.checks import shown
from kvcache_exchange.transport.channel import Channel
from kvcache_exchange.transport.connection import Connection
from kvcache_exchange.transport.lane import PIECES_AHEAD, Lane, PieceStaging
from kvcache_exchange.transport.nixl_agent import Agent, Handle, Reach
from kvcache_exchange.transport.nixl_direct import DirectFlow
from kvcache_exchange.transport.registered import Region

if TYPE_CHECKING:
    from kvcache_exchange.transport.registered import RegisteredMemory

_SLOTS = PIECES_AHEAD  # number of staging pieces in each direction
_MOST_TAGS = 1 << 12  # maximum number of tags for which a peer may grant room at the same time
_MOST_NAME = 128
_HOST = ("DRAM", 0)


class NixlLane(Lane):
    """A lane over NIXL. It exchanges the following frames with the peer:

    - `hello`: the address of the staging memory, and NIXL's metadata.
    - `room`: one of the receiver's slots is free for the next piece with a tag.
    - `arrived`: the piece was written.
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
        self._agent, self._registered_memory = agent, memory
        # Whether peers can access pages without this side's help, and a callback that keeps memory
        # alive because a lost peer may still write to it.
        self._pages_are_registered, self._keep = pages_are_registered, keep
        self._connection, self._channel = connection, channel
        self._piece_bytes = connection.piece_bytes
        device = memory.cuda_device
        self._staging: PieceStaging | None = PieceStaging(2 * _SLOTS, self._piece_bytes, device)
        self._mapped = self._staging.mapped
        self._memory = self._staging.pieces.view(2, _SLOTS, self._piece_bytes)
        begin = self._memory.data_ptr()
        region = Region(begin, begin + self._memory.nbytes, self._memory)
        try:
            self._registered = agent.register([region])
        except BaseException:
            agent.release()
            raise
        self._changed = threading.Condition()
        self._hello: tuple[dict, bytes] | None = None
        self._rooms: dict[int, deque[int]] = {}
        self._arrived: dict[int, int] = {}
        self._is_closed = False
        self._peer_slots: list[int] = []
        # Pieces that were not started yet, and pieces that were not announced to the peer yet. The
        # sending thread adds and removes pieces, and `close` clears the queues.
        self.unsent: deque[_Sending] = deque()
        self._under_way: deque[_Sending] = deque()
        self.is_direct = False  # whether both sides' pages are registered with NIXL
        self.is_reached = False  # whether NIXL can access the peer's memory without the peer's help
        self.is_beside = False  # whether the peer is on the same machine
        self.direct: DirectFlow | None = None

    def open(self, timeout_s: float) -> None:
        """Exchange NIXL's metadata.

        Raises RuntimeError if the peer does not send valid metadata.
        """
        nixl, deadline = self._agent, time.monotonic() + timeout_s
        slots = [self._memory[1, slot].data_ptr() for slot in range(_SLOTS)]
        reach = Reach.of_this()
        is_direct = self._pages_are_registered
        header = {"op": "lane", "kind": "hello", "slots": slots, "direct": is_direct}
        header["reach"] = list(reach)
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
        kind = header.get("kind")
        with self._changed:
            if kind == "hello" and self._hello is None:
                _check_hello(header)
                self._hello = (header, payload)
            elif kind in ("room", "arrived"):
                tag = header.get("tag")
                if type(tag) is not int or max(len(self._rooms), len(self._arrived)) > _MOST_TAGS:
                    raise ValueError(f"tag is {shown(tag)}: expected the tag of a transfer")
                if kind == "room":
                    slot = header.get("slot")
                    rooms = self._rooms.setdefault(tag, deque())
                    if type(slot) is not int or not 0 <= slot < _SLOTS or len(rooms) == _SLOTS:
                        raise ValueError(f"slot is {shown(slot)}: expected a free slot")
                    rooms.append(slot)
                else:
                    self._arrived[tag] = self._arrived.get(tag, 0) + 1
            else:
                raise ValueError(f"kind is {shown(kind)}: expected 'room' or 'arrived'")
            self._changed.notify_all()

    def staging(self, *, is_outgoing: bool) -> tuple[Sequence[torch.Tensor], PieceStaging]:
        if (staging := self._staging) is None:
            raise ConnectionError("the connection has ended")
        return list(self._memory[0 if is_outgoing else 1]), staging

    def send(self, piece: torch.Tensor, tag: int) -> _Sending:
        return _Sending(self, piece, tag)

    def receive(self, piece: torch.Tensor, tag: int) -> _Receiving:
        slot = (piece.data_ptr() - self._memory[1].data_ptr()) // self._piece_bytes
        self._channel.put({"op": "lane", "kind": "room", "tag": tag, "slot": slot})
        return _Receiving(self, tag)

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            # Each piece refers to the lane, so a queue that is not empty would keep the agent alive.
            self.unsent.clear()
            self._under_way.clear()
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
        self._staging = None  # unpinned once no copy is running
        self._mapped.madvise(mmap.MADV_DONTNEED)
        (self._keep if self.is_reached else self._agent.keep)(self._mapped)
        self._agent.release()

    # Methods that pieces call.

    def queue(self, piece: _Sending) -> None:
        """Queue a new piece. Raises ConnectionError if the lane is closed."""
        with self._changed:
            self._check_open()
            self.unsent.append(piece)

    def first(self, pieces: deque[_Sending]) -> _Sending | None:
        """Return the first piece of one of the lane's queues, or None if the queue is empty.

        Raises ConnectionError if the lane is closed.
        """
        with self._changed:
            self._check_open()
            return pieces[0] if pieces else None

    def take_room(self, tag: int, timeout_s: float) -> int | None:
        """Return the slot for the next piece with a tag, or None if no slot becomes free within
        `timeout_s`.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or tag in self._rooms, timeout_s)
            self._check_open()
            rooms = self._rooms.get(tag)
            if rooms is None:
                return None
            slot = rooms.popleft()
            if not rooms:
                del self._rooms[tag]
            return slot

    def begin_unsent(self) -> None:
        """Start writing pieces in order while the peer has room, and announce the pieces that were
        written.
        """
        while (first := self.first(self.unsent)) is not None and first.begin():
            self._announce_written()
        self._announce_written()

    def take_arrived(self, tag: int, timeout_s: float) -> None:
        """Wait for the next piece with a tag."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or tag in self._arrived, timeout_s)
            self._check_open()
            if tag not in self._arrived:
                raise TimeoutError("the peer did not answer in time")
            self._arrived[tag] -= 1
            if not self._arrived[tag]:
                del self._arrived[tag]

    def write(self, sending: _Sending, slot: int) -> None:
        """Start writing the first piece of `unsent` into one of the peer's slots."""
        sides = [
            (np.array([sending.piece.data_ptr()]), *_HOST),
            (np.array([self._peer_slots[slot]]), *_HOST),
        ]
        peer, length = self._connection.peer.incarnation, np.array([sending.piece.nbytes])
        sending.handle = self._agent.begin("WRITE", peer, sides, length)
        with self._changed:
            self._check_open()
            self._under_way.append(self.unsent.popleft())

    def wait_until_written(self, sending: _Sending, deadline: float) -> None:
        """Wait for a piece in flight and for all earlier pieces."""
        while not sending.is_announced:
            self.first(self._under_way).handle.wait(deadline, lambda: self._is_closed)
            self._announce_written()

    def _announce_written(self) -> None:
        """Announce written pieces to the peer, in order."""
        while (first := self.first(self._under_way)) is not None and first.handle.is_done():
            first.handle.release()
            with self._changed:
                self._check_open()
                self._under_way.popleft()
            first.is_announced = True
            self._channel.put({"op": "lane", "kind": "arrived", "tag": first.tag})

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConnectionError("the connection has ended")


class _Sending:
    """A piece that is written once the peer has room and all earlier pieces have started."""

    def __init__(self, lane: NixlLane, piece: torch.Tensor, tag: int) -> None:
        self._lane, self.piece, self.tag = lane, piece, tag
        self.handle: Handle | None = None
        self.is_announced = False  # whether the piece was announced to the peer
        lane.queue(self)
        lane.begin_unsent()

    def begin(self, timeout_s: float = 0.0) -> bool:
        """Start the piece if there is room within `timeout_s`. Returns whether it was started."""
        slot = self._lane.take_room(self.tag, timeout_s)
        if slot is not None:
            self._lane.write(self, slot)
        return slot is not None

    def wait(self, timeout_s: float) -> None:
        lane, deadline = self._lane, time.monotonic() + timeout_s
        # Start earlier pieces first, because the peer grants room in the order of the pieces.
        while self.handle is None:
            if not lane.first(lane.unsent).begin(max(deadline - time.monotonic(), 0.0)):
                raise TimeoutError("the peer did not make room in time")
            lane.begin_unsent()
        lane.wait_until_written(self, deadline)


class _Receiving:
    """A piece that the peer writes into this side's staging memory."""

    def __init__(self, lane: NixlLane, tag: int) -> None:
        self._lane, self._tag = lane, tag

    def wait(self, timeout_s: float) -> None:
        self._lane.take_arrived(self._tag, timeout_s)


def _check_hello(header: dict) -> None:
    slots, direct, reach = (header.get(name) for name in ("slots", "direct", "reach"))
    if (
        not isinstance(slots, list)
        or len(slots) != _SLOTS
        or not all(type(each) is int and 0 < each < 2**62 for each in slots)
    ):
        raise ValueError(f"slots are {shown(slots)}: expected {_SLOTS} addresses")
    if type(direct) is not bool:
        raise ValueError(f"direct is {shown(direct)}: expected true or false")
    if (
        not isinstance(reach, list)
        or [type(each) for each in reach] not in ([str, bool], [type(None), bool])
        or len(reach[0] or "") > _MOST_NAME
    ):
        raise ValueError(f"reach is {shown(reach)}: expected a machine name, and true or false")
