# SPDX-License-Identifier: Apache-2.0
"""What connects engines: a store and a wire. Both are stepped by the world, and fail at random."""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import ClassVar
from unittest import mock

from kvcache_exchange.circuit import Circuit
from kvcache_exchange.disaggregation import Connector, layouts_of_plan
from kvcache_exchange.disaggregation.leases import Leases, done_message, is_lease_over
from kvcache_exchange.disaggregation.offer import RankAddress
from kvcache_exchange.disaggregation.steps import RankHandshake, Results
from kvcache_exchange.store import BlockStore, Share, StoreRank, StoreTier
from kvcache_exchange.store.thread import Call

FAULTS = ("missing", "corrupt", "short", "swapped", "raises", "full", "torn")
CLOCKED = (
    *("store.tier", "store.rank", "disaggregation.offer_calls", "peers.watch"),
    *(f"router_events.{each}" for each in ("publisher", "subscriber", "replay_client")),
    "router_events.replay_server",
)


class SimulatedStore:
    """A store that loses, garbles and refuses values. All engines of a world share it."""

    def __init__(self, rng: random.Random) -> None:
        self.values: dict[str, bytes] = {}
        self.rng, self.rate, self.capacity = (
            rng,
            rng.choice([0, 0, 0.1, 0.3]),
            rng.choice([5, 40, 1000]),
        )

    def fault(self) -> str | None:
        return self.rng.choice(FAULTS) if self.rng.random() < self.rate else None


class StoreClient(BlockStore):
    """One engine's connection to the store."""

    knows_keys = True

    def __init__(self, store: SimulatedStore) -> None:
        self.store, self.evicted = store, []

    def open(self, memory, value_bytes):
        if self.store.fault() == "raises":
            raise OSError("the store is down")

    def exists(self, keys):
        if self.store.fault() == "raises":
            raise OSError("the store is down")
        return [key in self.store.values for key in keys]

    def put(self, keys, values):
        fault, stored = self.store.fault(), []
        for key, value in zip(keys, values):
            if fault == "full":
                stored.append(False)
                continue
            data = value.tobytes()
            self.store.values[key] = data[: len(data) // 2] if fault == "torn" else data
            stored.append(True)
            if fault == "raises":
                raise OSError("the store fails after a part of the values")
            while len(self.store.values) > self.store.capacity:
                gone = next(iter(self.store.values))
                del self.store.values[gone]
                self.evicted.append(gone)
        return stored

    def get(self, keys, values):
        fault, sizes = self.store.fault(), []
        if fault == "missing":
            self.remove(keys[:1])
        for key, value in zip(keys, values):
            data = self.store.values.get(key)
            sizes.append(-1 if data is None else len(data))
            if data is not None:
                value[: len(data)] = memoryview(data)
            if fault == "raises":
                raise OSError("the store fails in the middle of a read")
        if fault == "corrupt" and values:
            values[-1][self.store.rng.randrange(len(values[-1]))] ^= 1 << self.store.rng.randrange(
                8
            )
        if fault == "short" and sizes:
            sizes[0] -= 1
        if fault == "swapped" and len(values) > 1:
            values[0][:], values[1][:] = values[1].copy(), values[0].copy()
        return sizes

    def remove(self, keys):
        if self.store.fault() in ("raises", "full", "torn", "short"):
            raise OSError("the store is down")
        for key in keys:
            if self.store.values.pop(key, None) is not None:
                self.evicted.append(key)

    def keys(self):
        return [*self.store.values]

    def take_evicted(self):
        evicted, self.evicted = self.evicted, []
        return [key for key in evicted if key not in self.store.values]

    def close(self):
        pass


class SteppedThread:
    """A `StoreThread` whose calls run when the world says so."""

    def __init__(self, store: BlockStore, open_store: Callable) -> None:
        self.store, self.open_store, self.is_open = store, open_store, False
        self.waiting: list[tuple[int, int, Call]] = []
        self.over: list[Call] = []
        self.running, self.number = None, 0
        Wire.threads.append(self)

    def submit(self, work: Callable, priority: int, tag: object = None) -> Call:
        call = Call(work, tag=tag)
        self.number += 1
        self.waiting.append((priority, self.number, call))
        return call

    def take_over(self) -> Iterator[Call]:
        for _ in range(len(self.over)):
            yield self.over.pop(0)

    def work(self) -> None:
        """Make the next call."""
        if not self.waiting:
            return
        self.waiting.sort(key=lambda each: each[:2])
        call = self.waiting.pop(0)[2]
        try:
            if not call.is_given_up:
                if not self.is_open:
                    self.over.append(
                        Call(self.open_store, self.open_store(), is_over=True, tag="opened")
                    )
                    self.is_open = True
                try:
                    call.result = call.work()
                finally:
                    call.evicted = self.store.take_evicted()
        except Exception as error:
            call.error = error
        call.is_over = True
        self.over.append(call)

    def close(self, timeout_s: float) -> bool:
        while self.waiting:
            self.work()
        self.store.close()
        return True


class Wire:
    """The clock, the store and all transfers of a world."""

    threads: ClassVar[list[SteppedThread]] = []  # of the world that is being created

    def __init__(self, rng: random.Random) -> None:
        self.now, self.store, self.num_tiers = 0.0, SimulatedStore(rng), 0
        self.own_threads: list[SteppedThread] = []
        self.engines: dict[str, object] = {}
        self.processes = itertools.count()
        self.offers: list[tuple] = []  # (engine, row, offer)
        starts = itertools.count(1)
        clock = types.SimpleNamespace(
            monotonic=lambda: self.now,
            time=lambda: self.now,
            time_ns=lambda: int((next(starts) + self.now) * 1e9),
        )
        self.patches = [mock.patch(f"kvcache_exchange.{each}.time", clock) for each in CLOCKED]
        self.patches.append(mock.patch("kvcache_exchange.store.rank.StoreThread", SteppedThread))

    def __enter__(self) -> Wire:
        Wire.threads = self.own_threads
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.patches:
            each.stop()

    def answer_all(self) -> None:
        """Make all calls to the store that are waiting."""
        for thread in self.own_threads:
            while thread.waiting:
                thread.work()

    def operate(self, rng: random.Random) -> None:
        """Advance the store, a transfer, or time."""
        what, engines = rng.random(), self.engines.values()
        movers = [
            engine.mover
            for engine in engines
            if engine.mover and engine.mover.loads and not engine.is_stopped
        ]
        if what < 0.5 and self.own_threads:
            for _ in range(rng.randint(1, 4)):
                rng.choice(self.own_threads).work()
        elif what < 0.85 and movers:
            mover = rng.choice(movers)
            mover.work(rng.choice([*mover.loads]), rng)
        else:
            self.now += rng.choice([0.001, 0.01, 0.01, 0.1, 0.1, 0.1, 2.0])

    def tier_of(self, engine) -> StoreTier | None:
        """Connect an engine to the store. None if a store cannot fill its groups."""
        cache, size, num_staged = engine.cache, len(engine.ranks), engine.rng.choice([4, 20])
        cp_size, tp_size = engine.cp_size, size // engine.cp_size
        try:
            ranks = [
                StoreRank(
                    cache.manager,
                    each.pages,
                    StoreClient(self.store),
                    model="simulated",
                    rank=Share.of_rank(
                        num_layers=len(engine.layers), num_heads=1, tp_rank=i % tp_size,
                        tp_size=tp_size, cp_rank=i % cp_size, cp_world_size=cp_size,
                    ),
                    contents=list(each.storages),
                    host_pages=each.host_pages,
                    staging_bytes=num_staged * (cache.pages.page_bytes + 192),
                    timeout_s=0.5,
                    circuit=Circuit(2, 0.1, 0.2, clock=lambda: self.now),
                )
                for i, each in enumerate(engine.ranks)
            ]  # fmt: skip
            found = StoreTier.over(cache.manager, ranks, announce=True)
            self.num_tiers += 1
            return found
        except ValueError:
            return None

    def connector_of(self, engine) -> tuple[Connector | None, Mover | None]:
        """Connect an engine to the wire, if its groups and pages can be exchanged."""
        if any(storage.blocks_per_page != 1 for storage in engine.cache.storages):
            return None, None
        try:
            layouts = layouts_of_plan(
                engine.plan,
                engine.cache.storages,
                engine_id=engine.name,
            )
            mover = Mover(self, engine, layouts)
            found = Connector(
                engine.manager, [mover], engine_id=engine.name, clock=lambda: self.now
            )
        except (ValueError, TypeError):
            return None, None
        return found, mover


class Mover:
    """A rank that copies pages from another engine when the world says so."""

    def __init__(self, wire: Wire, engine, layouts) -> None:
        self.wire, self.engine = wire, engine
        self.leases = Leases(lambda: wire.now)
        address = RankAddress(
            "moved",
            f"process {next(wire.processes)}",
            tuple((0,) * each.num_regions(0) for each in layouts),
            0,
        )
        self.handshake = RankHandshake(layouts, address)
        self.loads, self.senders, self.results = {}, {}, Results()

    def begin(self, step) -> None:
        for name, lease in step.leases.items():
            self.leases.begin(name, *lease)
        for name in step.ends:
            self.leases.end(name)
        for name, load in step.loads.items():
            self.loads[name] = [load, False, None]
            sender = self.wire.engines[load.offer.engine_id]
            is_same = sender.mover and sender.mover.handshake.address == load.offer.ranks[0]
            self.senders[name] = sender if is_same else None
        for name in step.cancels & set(self.loads):
            self.loads[name][2] = "it was canceled"
        for offer in step.unread:
            self.tell(offer)

    def take_results(self) -> Results:
        found, self.results = self.results, Results()
        found.sent = dict.fromkeys(sorted(self.leases.ended()))  # in the same order in each run
        return found

    def close(self) -> None:
        pass

    def tell(self, offer) -> None:
        message = done_message(offer.request_id, offer.lease.generation, 1)

        def arrive() -> None:
            self.wire.engines[offer.engine_id].mover.leases.note(message, self.engine.name)

        for _ in range(self.wire.store.rng.choice([0, 1, 1, 1, 2])):  # lost, or delivered twice
            self.wire.network.send(self.engine.name, offer.engine_id, arrive)

    def work(self, name: str, rng: random.Random) -> None:
        """Advance one load: copy its pages, or check the lease and end."""
        load, is_copied, error = self.loads[name]
        sender = self.senders[name]
        if sender is not self.wire.engines[load.offer.engine_id]:
            error = "the sender was restarted"
        elif self.wire.network.is_cut(self.engine.name, sender.name):
            if rng.random() < 0.7:
                return
            error = "the connection broke"
        if error is None and not is_copied:
            self.copy(load, sender)
            self.loads[name][1] = True
            if rng.random() < 0.1:
                self.loads[name][2] = "the connection broke"
            return
        lease = load.offer.lease
        if error is None:
            word = sender.mover.leases.slots[lease.slot]
            if is_lease_over(word, lease.generation) is not False:
                error = "the lease has ended"
        if error is None:
            self.results.received.add(name)
        else:
            self.results.failed[name] = error
            self.results.released.add(name)
        del self.loads[name], self.senders[name]
        self.tell(load.offer)

    def copy(self, load, sender) -> None:
        mine, theirs = self.engine.cache.pages, sender.cache.pages
        groups = self.engine.plan.transferred_groups
        for g, own, other in zip(groups, load.blocks, load.offer.blocks):
            size = self.engine.manager.block_sizes[g]
            for column, (block, source) in enumerate(zip(own, other)):
                if block and source and (column + 1) * size > load.first_token:
                    for layer in range(mine.num_layers):
                        mine.layer(layer)[block] = theirs.layer(layer)[source]
