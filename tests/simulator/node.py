# SPDX-License-Identifier: Apache-2.0
"""An engine that has peers, publishes events and receives hints."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np

from kvcache import Request
from kvcache_exchange.router_events import CacheView
from kvcache_exchange.router_events.wire import wire_hash
from tests.machinery.cache_user import cached
from tests.simulator.content import extended, owner_of
from tests.simulator.engine import LONGEST, Engine
from tests.simulator.events import Publishing
from tests.simulator.hints import Hints
from tests.simulator.row import Row, Wrong
from tests.simulator.slot_bytes import Cells

PROMPTS = (0, 3000, 4000)  # first tokens


class Node(Hints, Engine):
    """An engine of a network. `peers` and `publishing` are None if its groups cannot be offered."""

    is_stopped = False
    peers = publishing = None

    def __init__(self, number: int, rng: random.Random, *parts: object) -> None:
        super().__init__(f"e{number}", rng, *parts)
        self.taken: list = []
        self.num_declined = self.num_offered = 0
        self.share = rng.choice([0, 0.3, 0.9])  # of prompts that all engines receive
        network = self.wire.network
        others = [f"e{i}" for i in range(network.size) if i != number]
        if self.connector is not None and rng.random() < 0.95:
            self.peers = network.source_of(self, others)
        if self.peers is not None:
            seed = self.manager.options.hash_seed
            self.publishing = Publishing(network.sockets, number, seed, rng)
            self.sources = [each for each in (self.tier, self.peers) if each is not None]
        self.set_up_hints()
        more = {self.hint: rng.choice([0, 2, 6, 20]), self.hint_step: 8}
        more |= {self.forget_values: 0.3, self.evict: 2}
        self.operations += [*more]
        self.weights_of += [*more.values()]
        for call, weight in (
            (self.step, 20),
            (self.free, 14),
            (self.poll, 12 if self.sources else 0),
        ):
            at = self.operations.index(call)
            self.weights_of[at] = max(self.weights_of[at], weight)
        self.weights_rate = rng.choice([0, 0.1, 0.3, 1])

    def free(self, rows: list[Row] | None = None) -> None:
        loads = any(each.source is not None for each in self.rows.values())
        is_early = rows is None and loads and self.rng.random() < 0.7
        self.poll() if is_early else super().free(rows)

    def forget_values(self) -> None:
        """Remove values from the store."""
        values = self.wire.store.values
        for key in self.rng.sample(sorted(values), len(values) // 3):
            del values[key]

    def weights(self) -> None:
        if self.rng.random() < self.weights_rate:
            super().weights()

    def evict(self) -> None:
        """Evict blocks from the device, so that prefixes are loaded again."""
        ids = np.arange(1, self.manager.pool.num_blocks)
        ids = ids[self.manager.pool.ref_counts(ids) == 0].tolist()
        self.call(self.manager.cache.evict, self.rng.sample(ids, len(ids) // 2))

    def new_row(self) -> Row:
        each = super().new_row()
        if each.name.endswith("=") or self.rng.random() >= self.share:
            return each
        n, rows = self.rng.randint(8, 38), []
        for first in PROMPTS:
            tokens = [*range(first, first + LONGEST + 1)]
            hashes = [] if self.hashing[0] else None
            request = Request(f"{each.name}=", tokens[:n], block_hashes=hashes)
            rows.append(Row(request, tokens, tokens, n, LONGEST, hashing=self.hashing))
            rows[-1].encoder = each.encoder
            rows[-1].add_hashes(n)
        self.rng.shuffle(rows)
        return max(rows, key=self.num_to_load) if self.rng.random() < 0.6 else rows[0]

    def may_ask(self, each: Row) -> bool:
        return self.peers._may_ask(each.request)

    def num_to_load(self, each: Row) -> int:
        """Return how many tokens peers have cached, and this engine has not."""
        if self.peers is None:
            return 0
        most = max(self.peers._index.num_tokens(each.request).values(), default=0)
        return most - self.manager.cache.cached_tokens(each.request).with_host

    # Peers -----------------------------------------------------------------------------------------

    def match(self, each: Row) -> int:
        if self.peers is None or self.rng.random() < (0.8 if self.foreign_offers() else 0.3):
            return super().match(each)
        self.carry_out_all()
        for _ in range(3):
            try:
                n = self.peers.match(each.request)
            except ValueError as error:
                self.log(f"    match: {error}")
                n = 0
            if n is not None:
                break
            if self.rng.random() < 0.8:
                self.wire.network.answer_all()
        if n:
            each.source = self.peers
        else:
            self.forget(each)
        return n or 0

    def offer_for(self, each: Row) -> dict | None:
        offer = super().offer_for(each)
        if offer is not None and self.rng.random() < 0.7:  # it is read once
            others = [of for of in self.wire.offers if of[2]["request_id"] != offer["request_id"]]
            self.wire.offers = others
        return offer

    def put_back(self, each: Row) -> None:
        super().put_back(each)
        self.forget(each)

    def leave(self, each: Row) -> None:
        super().leave(each)
        self.forget(each)

    def publish(self, each: Row) -> None:
        super().publish(each)
        self.forget(each)

    def forget(self, each: Row) -> None:
        """Tell all sources that a request has ended."""
        for source in self.sources:
            source.cancel(each.request)

    def answer(self, body: dict) -> dict | None:
        """Answer a peer that asks for an offer, and check the bytes that it may read."""
        self.log(f"{self.name}: peer asks for {body}")
        salt = body.get("cache_salt")
        tokens, least = body["prompt"], body["min_tokens"]
        self.carry_out_all()
        offer = self.peers.offer(tokens, min_tokens=least, cache_salt=salt)
        if offer is None:
            self.num_declined += 1
            return None
        self.num_offered += 1
        if self.manager.pool.num_kept > self.peers._max_kept_blocks:
            raise Wrong("more blocks are kept for peers than max_kept_share allows")
        n, groups = offer["num_tokens"], self.plan.transferred_groups
        if not least <= n < len(tokens):
            raise Wrong(f"{n} tokens are offered of {len(tokens)}, at least {least}")
        contents = extended([], tokens[:n], owner_of(self.version, None, salt, self.scale))
        for g, blocks in zip(groups, offer["blocks"]):
            first, size = self.kinds[g].first_needed_token(n), self.manager.block_sizes[g]
            slots = [blocks[p // size] * size + p % size for p in range(first, n)]
            cells = Cells(g, contents[first:], [np.array(slots, np.int64)])
            self.check_slots(cells, None, f"in an offer of {self.name}")
        return offer

    # What others see -------------------------------------------------------------------------------

    def take_events(self) -> list:
        self.taken = super().take_events()
        return self.taken

    def follow_events(self) -> None:
        super().follow_events()
        taken, self.taken = self.taken, []
        if self.rng.random() < 0.1:
            known = {(m.upper(), g, wire_hash(h)) for m, g, h in self.view if m in ("gpu", "cpu")}
            if known != cached(self.manager):
                raise Wrong("events do not list exactly the blocks that are cached")
        if self.publishing is not None:
            self.publishing.publish(taken, self.view)

    def check_tokens(self, view: CacheView) -> None:
        """Check the tokens and parents that a reader of this engine's events knows."""
        cache = self.manager.cache
        for each in [*self.rows.values(), *self.idle]:
            hashes = [wire_hash(found.tobytes()) for found in cache.hashes(each.request)]
            for m, g in view.places:
                size, parent = self.manager.block_sizes[g], None
                per_block = size // cache.hash_block_size
                for column, found in enumerate(hashes[per_block - 1 :: per_block]):
                    block = view.block(found, m, g)
                    tokens = tuple(each.tokens[column * size : (column + 1) * size])
                    if block and block.token_ids and block[:2] != (parent, tokens):
                        raise Wrong(f"events describe block {column} of {each.name} as {block}")
                    parent = found

    def takes(self, arrived: object) -> bool:
        return self.hints.arrived(arrived)

    def new_admit(self, left: int) -> tuple:
        each, ask = super().new_admit(left)
        self.hints.look(each.request)
        return each, ask

    def admitted(self, each: Row, start: int) -> None:
        super().admitted(each, start)
        self.hints.hit(each.request)

    def check_end(self) -> None:
        super().check_end()
        if self.peers is not None and self.peers.is_busy:
            raise Wrong("leases or late answers are left at the end")
        calls = [] if self.peers is None else [*self.peers._calls._calls]
        lookups = [] if self.tier is None else [*self.tier._lookups]
        if calls or lookups:
            raise Wrong(f"requests that have ended are not forgotten: {calls}, {lookups}")

    def counts(self) -> Counter:
        """Return what has happened, to be printed."""
        stats = self.hints.stats
        found = Counter(
            {
                "reads of a token's bytes": self.num_checked,
                "hits": self.num_hits,
                "loaded tokens": self.num_loaded,
                "rejected calls": self.num_refused,
                "receipts": self.num_told,
                "prefetched tokens": stats.prefetched_tokens,
                "used prefetched tokens": stats.used_tokens,
                "pins": sum(stats.receipts["pin"][each] for each in ("done", "partly")),
            }
        )
        if self.tier is not None:
            found["tokens loaded from the store"] = self.tier.stats.loaded_tokens
        if self.peers is not None:
            stats = self.peers.stats
            found["calls of peers"] = stats.asked_requests
            found["calls that peers miss"] = stats.missed_requests
            found["calls that peers do not answer"] = stats.unanswered_requests
            found["offers"] = stats.offered_requests
            found["declined calls"] = stats.declined_requests
            found["tokens loaded from engines"] = stats.loaded_tokens
            batches, _, replays, snapshots, *_ = self.publishing.publisher.counts
            found["batches of events"] = batches
            found["replays"] = replays
            found["snapshots"] = snapshots
        return found

    def close(self, rng: random.Random) -> None:
        self.hints.close()
        super().close(rng)
