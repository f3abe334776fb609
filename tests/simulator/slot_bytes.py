# SPDX-License-Identifier: Apache-2.0
"""Writes and checks the bytes in the slots of requests, as attention layers would."""

from __future__ import annotations

import random

import numpy as np
import torch

from kvcache import KVCacheManager, Request
from kvcache.assembly import KVCache
from kvcache.kinds import KindProperties
from tests.simulator.content import extended, mix, values_of
from tests.simulator.row import Row, Wrong


class SlotBytes:
    """The part of an engine that computes: it writes the KV of tokens, and checks what they read."""

    cache: KVCache
    manager: KVCacheManager
    kinds: list[KindProperties]
    layer_numbers: list[list[int]]  # of each group's layers
    rng: random.Random
    num_checked: int

    def owner(self, request: Request) -> int:
        raise NotImplementedError

    def slots(self, each: Row, g: int, positions: np.ndarray) -> torch.Tensor:
        rows = np.full(len(positions), each.row, np.int32)
        return self.cache.tables[g].slots_of(rows, positions)

    def put(self, g: int, contents: list[int | None], slots: torch.Tensor) -> None:
        """Write the KV of tokens. None: garbage."""
        values = [self.rng.getrandbits(64) if each is None else each for each in contents]
        for i, layer in enumerate(self.layer_numbers[g]):
            key, value = (values_of(values, layer, part, 1) for part in (0, 1))
            self.cache.storages[g].write(i, key, value, slots)

    def put_state(self, g: int, content: int | None, page: int) -> None:
        value = self.rng.getrandbits(64) if content is None else content
        for i, layer in enumerate(self.layer_numbers[g]):
            state = values_of([value], layer, 0, 2).reshape(1, 1, -1)
            self.cache.storages[g].write(i, state, None, torch.tensor([page]))

    def check_slots(
        self, each: Row, g: int, contents: list[int | None], slots: torch.Tensor, when: str
    ) -> None:
        right = [i for i, content in enumerate(contents) if content is not None]
        if not right:
            return
        slots, contents = slots[right], [contents[i] for i in right]
        self.num_checked += len(contents)
        if int(slots.min()) < self.manager.block_sizes[g]:
            raise Wrong(f"{each.name} reads the null page in group {g} {when}")
        for i, layer in enumerate(self.layer_numbers[g]):
            found = self.cache.storages[g].gather(i, slots)
            for part in (0, 1):
                wrong = (found[part] != values_of(contents, layer, part, 1)).any(dim=2).any(dim=1)
                if wrong.any():
                    at = right[int(wrong.nonzero()[0, 0])]
                    raise Wrong(
                        f"{each.name} has wrong bytes of token {at} of {len(right)} in group {g} {when}"
                    )

    def state_pages(self, each: Row, end: int, sure: int, g: int) -> list[int]:
        found = self.cache.tables[g].state_pages(
            np.array([each.row]), np.array([end]), np.array([end - sure])
        )
        return found[0].tolist()

    def check_one_state(self, each: Row, g: int, content: int, page: int, when: str) -> None:
        self.num_checked += 1
        for i, layer in enumerate(self.layer_numbers[g]):
            found = self.cache.storages[g].gather(i, torch.tensor([page]))[0]
            if not page or not torch.equal(
                found.reshape(-1), values_of([content], layer, 0, 2).reshape(-1)
            ):
                raise Wrong(f"{each.name} has a wrong state in page {page} of group {g} {when}")

    def receive(self, each: Row, first: int, stop: int, arrived: int, sure: int) -> None:
        """Write external tokens [first, stop), of which those before `arrived` are right."""
        right = extended([], each.units[:stop], self.owner(each.request))
        contents = [*right[:arrived], *[None] * (stop - arrived)]
        each.contents[first:] = contents[first:]
        for g, (spec, kind) in enumerate(zip(self.manager.groups, self.kinds)):
            if not spec.transferred or kind.pages.of_encoder:
                continue
            blocks, size = (
                self.manager.block_ids(each.request, g).tolist(),
                self.manager.block_sizes[g],
            )
            if not kind.pages.has_slots:
                self.put_state(g, contents[stop - 1], blocks[(sure - 1) // size])
                continue
            held = [p for p in range(first, stop) if blocks[p // size]]
            slots = [blocks[p // size] * size + p % size for p in held]
            self.put(g, [contents[p] for p in held], torch.tensor(slots, dtype=torch.int64))

    def garble_received(self, each: Row) -> None:
        """A transfer may still write to the blocks of a request that has left."""
        first, stop = each.external
        if each.is_receiving and stop > first:
            self.receive(each, first, stop, first, stop)

    def write_encoder(self, each: Row) -> None:
        for g, kind in enumerate(self.kinds):
            n = each.request.num_encoder_tokens if kind.pages.of_encoder else 0
            if n:
                contents = [mix(each.encoder, i) for i in range(n)]
                self.put(g, contents, self.slots(each, g, np.arange(n)))

    def write(self, each: Row, start: int, end: int, sure: int) -> None:
        for g, kind in enumerate(self.kinds):
            if kind.pages.of_encoder:
                continue
            if kind.pages.has_slots:
                self.put(g, each.contents[start:end], self.slots(each, g, np.arange(start, end)))
                continue
            pages = self.state_pages(each, end, sure, g)
            for j, n in enumerate(range(sure, end + 1)):
                self.put_state(g, each.contents[n - 1], pages[j])

    def check_reads(self, each: Row, start: int, stop: int, sure: int, end: int, when: str) -> None:
        """Check what the tokens from `start` read, as far as it lies before `stop`."""
        if each.num_valid < min(start, stop):
            return  # the row continues from rejected drafts
        when = f"{when}, from token {start} to {end}"
        for g, (spec, kind) in enumerate(zip(self.manager.groups, self.kinds)):
            if kind.pages.of_encoder:
                n = each.request.num_encoder_tokens
                if n:
                    self.check_slots(
                        each,
                        g,
                        [mix(each.encoder, i) for i in range(n)],
                        self.slots(each, g, np.arange(n)),
                        when,
                    )
                continue
            if not kind.pages.has_slots:
                if start and start == stop:
                    page = self.state_pages(each, end, sure, g)[0]
                    self.check_one_state(each, g, each.contents[start - 1], page, when)
                continue
            first = kind.first_needed_token(start)
            if not spec.cached or kind.pages.wraps:
                first = max(first, each.begins[0 if spec.transferred else 1])
            if stop > first:
                self.check_slots(
                    each,
                    g,
                    each.contents[first:stop],
                    self.slots(each, g, np.arange(first, stop)),
                    when,
                )

    def check_state(self, each: Row, end: int, sure: int) -> None:
        for g, kind in enumerate(self.kinds):
            if not kind.pages.has_slots:
                for n, page in zip(range(sure, end + 1), self.state_pages(each, end, sure, g)):
                    if each.contents[n - 1] is not None:
                        self.check_one_state(
                            each, g, each.contents[n - 1], page, f"after {n} tokens"
                        )

    def check_cached(self, each: Row) -> None:
        """Check the bytes of every block that is cached under a hash of this request."""
        request = each.request
        probe = Request(
            "probe",
            request.token_ids,
            lora=request.lora,
            mm_items=request.mm_items,
            cache_salt=request.cache_salt,
        )
        contents = extended([], each.units[: request.num_tokens], self.owner(probe))
        hashes = self.manager.cache.hashes(probe)
        unit = self.manager.cache.hash_block_size
        for g, (spec, kind) in enumerate(zip(self.manager.groups, self.kinds)):
            if not (spec.cached and kind.pages.is_transferable) or not len(hashes):
                continue
            size = self.manager.block_sizes[g]
            found = self.manager.cache.find(
                hashes[size // unit - 1 :: size // unit], g
            ).device.tolist()
            for column, page in enumerate(found):
                if page <= 0:
                    continue
                end = (column + 1) * size
                if not kind.pages.has_slots:
                    self.check_one_state(each, g, contents[end - 1], page, "that is cached")
                elif kind.first_needed_token(end) == 0:
                    slots = torch.arange(page * size, (page + 1) * size)
                    self.check_slots(
                        each, g, contents[end - size : end], slots, f"in cached block {page}"
                    )
