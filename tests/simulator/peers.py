# SPDX-License-Identifier: Apache-2.0
"""Peers: engines that load prefixes from each other. Their calls, messages and events are delayed,
lost and refused, and the engines are cut off from each other and stopped.
"""

from __future__ import annotations

import json
import random
import types
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import ClassVar
from unittest import mock

from kvcache_exchange.circuit import Circuit
from kvcache_exchange.disaggregation.offer_calls import OfferRefusedError, OfferServer
from kvcache_exchange.peers import PeerSource
from kvcache_exchange.peers.watch import PEER_PATH, PeerWatch
from tests.simulator import events
from tests.simulator.events import Sockets
from tests.simulator.hints import LIMITS
from tests.simulator.row import Wrong

ANSWERS = ("refuses", "is down", "is late", "sends nonsense", "offers nothing")
JUMPS = (3.0, 40.0, 1000.0)


class SteppedCalls:
    """A `ThreadPoolExecutor` whose calls are sent, served and answered when the world says so."""

    created: ClassVar[list[SteppedCalls]] = []  # in the world that is being created

    def __init__(self, *_: object) -> None:
        self.waiting: list[tuple[Future, Callable, OfferServer]] = []
        self.served: list[tuple[Future, object]] = []
        self.created.append(self)

    def submit(self, work: Callable, server: OfferServer) -> Future:
        self.waiting.append((Future(), work, server))
        return self.waiting[-1][0]

    def shutdown(self, **_: object) -> None:
        self.waiting.clear()

    def work(self, network: Network) -> None:
        """Serve the oldest call, or deliver its answer."""
        if self.served:
            future, answer = self.served.pop(0)
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        elif self.waiting:
            future, work, server = self.waiting[0]
            if network.node_at(server).is_stopped and not future.cancelled():
                return
            del self.waiting[0]
            if future.set_running_or_notify_cancel():
                try:
                    self.served.append((future, work(server)))
                except Wrong:
                    raise
                except Exception as error:
                    self.served.append((future, error))


class Network:
    """The links between the engines of a world. Each seed has its own set of faults."""

    def __init__(self, wire, rng: random.Random, size: int) -> None:
        def wait(seconds: float) -> None:
            wire.now += seconds

        self.wire, self.rng, self.size, self.counts = wire, rng, size, Counter()
        self.sockets = Sockets(rng, self.reaches, wait)
        self.sockets.fault_rate = rng.choice([0, 0, 0.1, 0.4])
        rates = {"answer": 0.3, "cut": 0.1, "stop": 0.05, "jump": 0.03}
        self.rates = {name: rate * rng.choice([0, 0, 0.3, 1]) for name, rate in rates.items()}
        self.cuts: set[frozenset[str]] = set()
        self.held: list[tuple[frozenset[str], Callable]] = []  # messages across a cut
        self.calls: list[SteppedCalls] = []
        numbers = iter(range(1 << 30))
        names = types.SimpleNamespace(uuid4=lambda: types.SimpleNamespace(hex=f"{next(numbers)}"))
        watch = types.SimpleNamespace(Thread=mock.Mock(), Event=mock.Mock())
        self.patches = [
            mock.patch("kvcache_exchange.peers.source.uuid", names),
            mock.patch("kvcache_exchange.peers.watch.threading", watch),
            mock.patch(
                "kvcache_exchange.disaggregation.offer_calls.ThreadPoolExecutor", SteppedCalls
            ),
            mock.patch.object(
                OfferServer, "fetch", lambda server, *call: self.fetch(server, *call)
            ),
            *(mock.patch(f"kvcache_exchange.hints.limits.{n}", each) for n, each in LIMITS.items()),
            *events.patches(self.sockets),
        ]

    @property
    def nodes(self) -> list:
        return [*self.wire.engines.values()]

    def node_at(self, server: OfferServer):
        return self.wire.engines[server.address.partition(".")[0]]

    def reaches(self, one: str, other: str) -> bool:
        return not self.is_cut(one, other) and not self.wire.engines[other].is_stopped

    def is_cut(self, one: str, other: str) -> bool:
        return frozenset((one, other)) in self.cuts

    def forget(self, node) -> None:
        """Forget an engine whose process has ended."""
        self.sockets.unbind(node.name)
        if node.peers is not None:
            self.calls.remove(node.peers._calls._threads)

    def source_of(self, node, names: list[str]) -> PeerSource | None:
        """Return a source that follows and asks the engines with these names."""
        rng = node.rng
        SteppedCalls.created = self.calls
        try:
            source = PeerSource(
                node.manager,
                node.connector,
                [f"{name}.sim:1" for name in names],
                min_tokens=rng.choice([1, 1, 4]),
                timeout_s=rng.choice([0.2, 1.0]),
                lease_s=rng.choice([0.3, 5.0, 50.0]),
                max_kept_share=rng.choice([0.3, 1.0, 1.0]),
            )
        except ValueError:
            return None
        for watch in source._watches.values():
            watch.server.caller = node
            watch.server.circuit = Circuit(rng.choice([1, 3, 99]), clock=lambda: self.wire.now)
        return source

    def fetch(self, server: OfferServer, path: str, body: dict | None = None) -> dict:
        """Answer a request over HTTP."""
        peer = self.node_at(server)
        if not self.reaches(server.caller.name, peer.name):
            raise TimeoutError("no answer")
        if peer.peers is None:
            raise OfferRefusedError("not a peer")
        if path == PEER_PATH:
            described = peer.peers.describe() | {"events": peer.publishing.describe()}
            return json.loads(json.dumps(described))
        fault = self.rng.choice(ANSWERS) if self.rng.random() < self.rates["answer"] else None
        self.counts[f"answers: {fault}"] += fault is not None
        if fault == "refuses":
            raise OfferRefusedError("not for you")
        if fault == "is down":
            raise ConnectionRefusedError
        if fault == "sends nonsense":
            return {"offer": {"version": 9}}
        if fault == "offers nothing":
            return {"offer": None}
        offer = peer.answer(json.loads(json.dumps(body)))
        if fault == "is late":  # the offer is made, and its reader does not learn of it
            raise TimeoutError("late")
        return {"offer": json.loads(json.dumps(offer))}

    def send(self, sender: str, receiver: str, act: Callable) -> None:
        """Carry a message. Across a cut, it waits, and may be lost."""
        pair = frozenset((sender, receiver))
        if pair in self.cuts:
            self.held.append((pair, act))
        else:
            act()

    def operate(self, rng: random.Random) -> None:
        if rng.random() < self.rates["cut"]:
            self.cuts.add(frozenset(rng.sample(sorted(self.wire.engines), 2)))
            self.counts["cuts"] += 1
        elif rng.random() < self.rates["stop"]:
            rng.choice(self.nodes).is_stopped = True
            self.counts["stops"] += 1
        elif rng.random() < self.rates["jump"]:
            self.wire.now += rng.choice(JUMPS)
            self.counts["jumps"] += 1
        for _ in range(rng.randint(4, 30)):
            self.work(rng)
        for pair in sorted(self.cuts, key=sorted):
            if rng.random() < 0.2:
                self.heal(pair, rng)
        for node in self.nodes:
            node.is_stopped &= rng.random() < 0.8

    def heal(self, pair: frozenset[str], rng: random.Random) -> None:
        self.cuts.discard(pair)
        arriving = [act for of, act in self.held if of == pair and rng.random() < 0.6]
        self.held = [each for each in self.held if each[0] != pair]
        for act in arriving:
            act()
        for reader in self.sockets.subscribed:
            if rng.random() < 0.5:
                reader.peer = None  # the connection was lost, and with it what it held

    def work(self, rng: random.Random) -> None:
        """Advance calls, events or what follows them."""
        what = rng.randrange(4)
        node = rng.choice(self.nodes)
        if what == 0 and self.calls:
            rng.choice(self.calls).work(self)
        elif what == 1 and not node.is_stopped and node.publishing is not None:
            node.publishing.work()
        elif what == 2 and self.sockets.subscribed:
            fault = self.sockets.deliver(rng.choice(self.sockets.subscribed))
            self.counts[f"events {fault}"] += fault is not None
        elif what == 3 and not node.is_stopped and node.peers is not None:
            self.follow(node, rng.choice([*node.peers._watches.values()]), rng.random() < 0.2)

    def follow(self, node, watch: PeerWatch, refreshes: bool) -> None:
        """Take a turn of the thread that follows a peer, and check what it knows."""
        self.sockets.acting = node.name
        try:
            if watch._subscriber is None or refreshes:
                watch._refresh()
            watch._subscriber.poll(0)
        except Wrong:
            raise
        except Exception as error:
            watch._lose(f"{error}")
        if watch._subscriber is not None:
            peer = self.node_at(watch.server)
            self.counts["checked views"] += self.sockets.check_view(peer.name, watch._subscriber)

    def answer_all(self) -> None:
        """Serve and answer all calls that wait."""
        for calls in self.calls:
            for _ in range(2 * len(calls.waiting) + len(calls.served)):
                calls.work(self)

    def settle(self, rng: random.Random) -> None:
        """End all faults, deliver everything, and check that each engine knows its peers' blocks."""
        self.rates, self.sockets.fault_rate = dict.fromkeys(self.rates, 0), 0.0
        for pair in sorted(self.cuts, key=sorted):
            self.heal(pair, rng)
        for node in self.nodes:
            node.is_stopped = False
            node.follow_events()
        for node in [each for each in self.nodes if each.peers is not None]:
            for watch in node.peers._watches.values():
                self.check_settled(node, watch)
        self.answer_all()

    def check_settled(self, node, watch: PeerWatch) -> None:
        peer = self.node_at(watch.server)
        for _ in range(8):
            if peer.publishing is not None:
                peer.publishing.work()
            self.follow(node, watch, refreshes=True)
            for reader in [*self.sockets.subscribed]:
                self.sockets.deliver(reader)
            self.wire.now += 2.0
        if watch.error is None:
            reader, publishing = watch._subscriber, peer.publishing
            self.counts["settled views"] += 1
            is_known = reader.next_seq == publishing.publisher._buffer.stop
            if not is_known or not self.sockets.check_view(peer.name, reader):
                raise Wrong(f"{node.name} does not know what {peer.name} has cached")
            peer.check_tokens(reader.view)
            self.check_index(node, watch)

    def check_index(self, node, watch: PeerWatch) -> None:
        """Check how many tokens an engine expects its peer to offer."""
        peer, index = self.node_at(watch.server), node.peers._index
        if any(spec.drafts for spec in node.manager.groups):
            return  # which blocks a drafter recomputes is only estimated
        groups = peer.publishing.publisher._translator._groups.values()
        waits = any(group.held for group in groups)  # for their parents
        for each in filter(node.may_ask, [*node.rows.values(), *node.idle]):
            listed = index.num_tokens(each.request).get(watch.server.address, 0)
            prefix = peer.manager.cache.find_prefix(each.request, whole_blocks=True)
            if not any(ids.any() for ids in prefix.block_ids):
                continue  # where a chunk begins, no block is needed, from no peer
            found = prefix.num_tokens
            self.counts["prefixes that peers have"] += found > 0
            most = min(found, index._prefixes.longest(each.request))
            if listed > most or (listed < most and not waits):
                raise Wrong(f"{listed} tokens of {each.name} are listed, not {found}")
