# SPDX-License-Identifier: Apache-2.0
"""Publishers and subscribers of cache events, over sockets that lose, delay, repeat and reorder
messages, and what a subscriber must know at each sequence number.
"""

from __future__ import annotations

import random
import types
from collections import deque
from collections.abc import Callable
from unittest import mock

import zmq

from kvcache_exchange.router_events import EventPublisher, EventSubscriber
from kvcache_exchange.router_events.wire import (
    WireHash,
    decode_sequence,
    wire_hash,
)
from tests.simulator.row import Wrong

Shown = frozenset[tuple[str, int, WireHash]]  # (medium, group, hash) of all blocks

MEDIUMS = {"gpu": "GPU", "cpu": "CPU", "storage": "STORAGE"}
FAULTS = ("lost", "repeated", "late", "cut")


class Sockets:
    """All ZMQ sockets of a world. Used in place of a `zmq.Context`.

    `reaches(a, b)`: whether messages between two engines arrive. `wait(seconds)`: let time pass.
    """

    def __init__(self, rng: random.Random, reaches: Callable, wait: Callable) -> None:
        self.rng, self.reaches, self.wait, self.acting = rng, reaches, wait, ""
        self.bound: dict[str, Socket] = {}
        self.subscribed: list[Socket] = []
        self.fault_rate = 0.0
        self.states: dict[str, dict[int, Shown]] = {}  # by publisher, after each batch
        self.topics: dict[tuple[str, int], str] = {}  # of each batch of each publisher

    def socket(self, kind: int) -> Socket:
        return Socket(self, kind, self.acting)

    def unbind(self, owner: str) -> None:
        """Forget all sockets of an engine whose process has ended."""
        self.bound = {at: each for at, each in self.bound.items() if each.owner != owner}
        self.subscribed = [each for each in self.subscribed if each.owner != owner]

    def fails(self) -> bool:
        return self.rng.random() < self.fault_rate

    def deliver(self, reader: Socket) -> str | None:
        """Let messages arrive at a subscriber, or fail. Return the fault."""
        rng = self.rng
        sender = self.bound.get(reader.endpoint)
        if sender is None or not self.reaches(reader.owner, sender.owner):
            return None
        if reader.peer is not sender:
            reader.connect_to(sender)
        fault = rng.choice(FAULTS) if self.fails() else None
        pipe = reader.pipe
        if fault == "cut":
            pipe.clear()
            reader.connect_to(sender)
        for _ in range(min(rng.randint(1, 8), len(pipe))):
            frames = pipe.popleft()
            if fault == "late" and pipe:
                pipe.insert(rng.randint(1, len(pipe)), frames)
                continue
            if fault != "lost":
                reader.arrived += [frames] * (2 if fault == "repeated" else 1)
        return fault

    def check_view(self, publisher: str, reader: EventSubscriber) -> bool:
        """Check a view that says that it is exact. Return whether it does."""
        if not reader.is_exact:
            return False
        view, topic = reader.view, reader._topic.decode()
        if topic and reader.next_seq and self.topics[publisher, reader.next_seq - 1] != topic:
            raise Wrong(f"a subscriber of topic {topic!r} has taken batches of another topic")
        found = {(m, g, each) for m, g in view.places for each in view.hashes(m, g)}
        if found != (self.states[publisher][reader.next_seq - 1] if reader.next_seq else set()):
            raise Wrong(f"the view at event batch {reader.next_seq} is not what was cached")
        return True


class Socket:
    """A PUB, SUB, ROUTER or DEALER socket, with the calls that publishers and subscribers make."""

    closed = False

    def __init__(self, sockets: Sockets, kind: int, owner: str) -> None:
        self.sockets, self.kind, self.owner = sockets, kind, owner
        self.endpoint, self.topic, self.peer = "", b"", None
        self.pipe: deque[list[bytes]] = deque()  # sent, and not arrived
        self.arrived: list[list[bytes]] = []
        self.parts: list[bytes] = []  # of a message that is being sent
        self.connections = 0  # that the monitor has not reported
        self.serve: Callable[[], None] = lambda: None  # steps the publisher of a ROUTER
        self.on_send: Callable[[int], None] = lambda number: None

    def bind(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.sockets.bound[endpoint] = self

    def connect(self, endpoint: str) -> None:
        self.endpoint = endpoint
        if self.kind == zmq.SUB:
            self.sockets.subscribed.append(self)

    def connect_to(self, sender: Socket) -> None:
        self.peer, self.connections = sender, self.connections + 1
        self.pipe.clear()

    def getsockopt_string(self, _: int) -> str:
        return self.endpoint

    def subscribe(self, topic: bytes) -> None:
        self.topic = topic

    def get_monitor_socket(self, _: int) -> types.SimpleNamespace:
        def take() -> None:
            self.connections -= 1

        return types.SimpleNamespace(poll=lambda _: self.connections, recv_multipart=take)

    def disable_monitor(self) -> None:
        pass

    def close(self, linger: int = 0) -> None:
        self.closed = True
        if self in self.sockets.subscribed:
            self.sockets.subscribed.remove(self)

    def poll(self, wait_ms: int) -> bool:
        if self.kind == zmq.DEALER and not self.arrived:
            server = self.sockets.bound.get(self.endpoint)
            if server is not None and self.sockets.reaches(self.owner, server.owner):
                server.pipe.extend(self.pipe)
                self.pipe.clear()
                server.serve()
                if self.sockets.fails():  # the connection breaks in the middle of a replay
                    del self.arrived[len(self.arrived) // 2 :]
                    self.endpoint = ""
            if not self.arrived:
                self.sockets.wait(wait_ms / 1000)
        return bool(self.arrived)

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        queue = self.pipe if self.kind == zmq.ROUTER else self.arrived
        if not queue:
            raise zmq.Again
        return queue.popleft() if queue is self.pipe else queue.pop(0)

    def send_multipart(self, frames: list[bytes], copy: bool = True) -> None:
        if self.kind == zmq.DEALER:
            self.pipe.append([self, *frames])
            return
        for reader in self.sockets.subscribed:
            if reader.peer is self and frames[0].startswith(reader.topic):
                reader.pipe.append(frames)
        self.on_send(decode_sequence(frames[1]))

    def send(self, part, flags: int = 0, copy: bool = True, track: bool = False):
        self.parts.append(part)
        if not flags & zmq.SNDMORE:
            (reader, *frames), self.parts = self.parts, []
            if reader.closed:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            reader.arrived.append(frames)
        return types.SimpleNamespace(done=True)


class Publishing:
    """An engine's publisher, and what a reader of each of its batches must know."""

    def __init__(self, sockets: Sockets, number: int, seed: str, rng: random.Random) -> None:
        sockets.acting = self.name = f"e{number}"
        self.waiting: deque[set] = deque()  # what was cached when each queued batch was taken
        self.states = sockets.states.setdefault(sockets.acting, {})
        self.publisher = EventPublisher(
            f"tcp://127.0.0.1:{5000 + number}",
            f"tcp://127.0.0.1:{6000 + number}",
            topic=rng.choice(["", "kv@a@b", "kv@a@bc"]),
            event_encoding=rng.choice(["map", "array"]),
            hash_seed=seed,
            buffer_steps=rng.choice([1, 5, 40, 10_000]),
        )
        self.publisher._socket.on_send = self.sent
        number = self.publisher._buffer.stop - 1
        if self.states and number <= max(self.states):
            raise Wrong(f"a new publisher begins with {number}, which its predecessor has reached")
        self.states[number], self.topics = frozenset(), sockets.topics
        self.topics[sockets.acting, number] = self.publisher.topic
        self.publisher._router.serve = self.work

    def describe(self) -> dict:
        return {
            name: getattr(self.publisher, name) for name in ("endpoint", "replay_endpoint", "topic")
        }

    def publish(self, events: list, view: set) -> None:
        """Publish the events after which `view` is cached."""
        if events:
            self.waiting.append({*view})
            self.publisher.publish(events)

    def sent(self, number: int) -> None:
        self.states[number] = self.shown(self.waiting.popleft())
        self.topics[self.name, number] = self.publisher.topic

    def shown(self, view: set) -> Shown:
        """Return how readers name the blocks, without those whose parents are being loaded."""
        groups = self.publisher._translator._groups.items()
        held = {("GPU", number, each) for number, group in groups for each in group.held}
        return frozenset((MEDIUMS[m], g, wire_hash(h)) for m, g, h in view) - held

    def work(self) -> None:
        """Make the publisher's thread take a turn."""
        self.publisher._publish_some()
        self.publisher._server.hear()
        self.publisher._server.serve()


def patches(sockets: Sockets) -> list:
    """Return patches that make publishers and subscribers use these sockets, and no threads."""
    of, thread = "kvcache_exchange.router_events", mock.Mock()
    pipes = types.SimpleNamespace(socketpair=lambda: (mock.Mock(), mock.Mock()))
    return [
        mock.patch(f"{of}.publisher.checked_context", lambda _: sockets),
        mock.patch(f"{of}.subscriber.checked_context", lambda _: sockets),
        mock.patch(f"{of}.publisher.threading", thread),
        mock.patch(f"{of}.publisher.socket", pipes),
    ]
