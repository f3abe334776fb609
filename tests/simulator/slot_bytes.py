# SPDX-License-Identifier: Apache-2.0
"""Writes and checks the bytes in the slots of requests, as attention layers would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvcache import KVCacheManager, Request
from kvcache.assembly import KVCache
from kvcache.kinds import KindProperties
from tests.simulator.content import extended, factors_of, mix
from tests.simulator.row import Row, Span, Wrong

Contents = Sequence[int | None]


@dataclass
class Cells:
    """Slots of one group on each rank, what they must hold (None: anything), and when they are used."""

    group: int
    contents: Contents
    slots: list[np.ndarray]  # of each rank; -1: on another rank
    span: list[Span] = field(default_factory=list)
    place: list[int] = field(default_factory=list)  # token, or number of tokens before a state
    read: list[bool] = field(default_factory=list)  # before the step's tokens are written
    written: list[bool] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)  # must be right after that

    def add(self, span: Span, place: int, *when: bool) -> None:
        self.span.append(span)
        self.place.append(place)
        self.read.append(when[0])
        self.written.append(when[1])
        self.kept.append(when[2])


class SlotBytes:
    """The part of an engine that computes: it writes the KV of tokens, and checks what they read."""

    ranks: list[KVCache]
    cache: KVCache
    manager: KVCacheManager
    kinds: list[KindProperties]
    layer_numbers: list[list[int]]  # of each group's layers
    rng: random.Random
    cp_size: int
    num_checked: int

    def owner(self, request: Request) -> int:
        raise NotImplementedError

    def view_bytes(self) -> None:
        """Map the memory of each group and rank as 64-bit numbers: [blocks, slots, numbers]."""
        self.views: list[list[list[tuple[np.ndarray, np.ndarray]]]] = []
        for g, kind in enumerate(self.kinds):
            of_group = []
            for number, rank in enumerate(self.ranks):
                found, storage = [], rank.storages[g]
                for i, layer in enumerate(self.layer_numbers[g]):
                    parts = [storage.key_cache(i), storage.value_cache(i)]
                    for part, tensor in enumerate(parts[: 2 if kind.pages.has_slots else 1]):
                        part += number * (not kind.pages.has_slots)  # ranks have other states
                        view = tensor.view(torch.int64).numpy().view(np.uint64)[:, :, 0]
                        found.append((view, factors_of(layer, part, view.shape[2])))
                of_group.append(found)
            self.views.append(of_group)
        # Slots of the null page.
        self.num_null = [
            self.ranks[0].storages[g].block_size * self.ranks[0].storages[g].blocks_per_page
            for g in range(len(self.kinds))
        ]

    def bytes_of(self, pages: list[int]) -> list[bytes]:
        layers = [r.pages.layer(i) for r in self.ranks for i in range(r.pages.num_layers)]
        return [layer[pages].numpy().tobytes() for layer in layers] if pages else []

    def put(self, g: int, contents: Contents, slots: Sequence[np.ndarray]) -> None:
        """Write the KV of tokens, or states. None: garbage."""
        garbage = self.rng.getrandbits(64)
        digests = np.array([garbage if each is None else each for each in contents], np.uint64)
        for views, at in zip(self.views[g], slots):
            is_own = at >= self.num_null[g]
            own, values = at[is_own], digests[is_own, None]
            for view, factors in views:
                view[own // view.shape[1], own % view.shape[1]] = values * factors

    def check_slots(self, cells: Cells, used: Sequence[bool] | None, when: str) -> None:
        """Check the cells that are `used` (None: all), except those that may hold anything."""
        right = [
            i
            for i, each in enumerate(cells.contents)
            if each is not None and (used is None or used[i])
        ]
        if not right:
            return
        g, num_found = cells.group, np.zeros(len(right), np.int64)
        self.num_checked += len(right)
        digests = np.array([cells.contents[i] for i in right], np.uint64)[:, None]
        wrong = np.zeros(len(right), bool)
        for views, at in zip(self.views[g], cells.slots):
            own = at[right]
            is_own = own >= self.num_null[g]
            num_found += is_own
            own = np.where(is_own, own, 0)
            for view, factors in views:
                found = view[own // view.shape[1], own % view.shape[1]]
                wrong |= is_own & (found != digests * factors).any(1)
        copies = len(self.ranks) // (self.cp_size if self.kinds[g].pages.has_slots else 1)
        for faults, what in ((num_found != copies, "no place for"), (wrong, "wrong bytes of")):
            if faults.any():
                i = right[int(faults.nonzero()[0][0])]
                span = cells.span[i].described if cells.span else "the cache"
                place = cells.place[i] if cells.place else i
                raise Wrong(f"{span} has {what} place {place} in group {g} {when}")

    def cells_of_step(self, g: int, spans: list[Span]) -> Cells:
        """Return what the spans of a step read and write in a group."""
        spec, kind = self.manager.groups[g], self.kinds[g]
        contents: list[int | None] = []
        cells = Cells(g, contents, [])
        if not kind.pages.has_slots:
            return self.states_of_step(g, spans)
        for each in spans:
            if kind.pages.of_encoder:
                contents += each.encoder
                for i in range(len(each.encoder)):
                    cells.add(each, i, each.start > 0, each.start == 0, True)
                continue
            first = kind.first_needed_token(each.known or each.start)
            if not spec.cached or kind.pages.wraps:
                first = max(first, each.begins[0 if spec.transferred else 1])
            first = min(first, each.start)
            contents += each.contents[first:]
            is_right = each.known == each.start
            for i in range(first, each.end):
                is_old = i < each.known
                cells.add(each, i, is_old and first <= i, i >= each.start, is_right)
        if contents:
            rows = np.array([each.row for each in cells.span], np.int32)
            positions = np.array(cells.place, np.int64)
            cells.slots = [rank.tables[g].slots_of(rows, positions).numpy() for rank in self.ranks]
        return cells

    def states_of_step(self, g: int, spans: list[Span]) -> Cells:
        cells = Cells(g, contents := [], [])
        rows, ends = (
            np.array([getattr(each, name) for each in spans], np.int32) for name in ("row", "end")
        )
        drafts = np.array([each.end - each.sure for each in spans], np.int32)
        pages = [
            rank.tables[g].state_pages(rows, ends, drafts).numpy().astype(np.int64)
            for rank in self.ranks
        ]
        used = []
        for i, each in enumerate(spans):
            if each.start:
                contents.append(each.contents[each.start - 1])
                cells.add(each, each.start, each.known == each.start, False, False)
                used.append((i, 0))
            for j, n in enumerate(range(each.sure, each.end + 1)):
                contents.append(each.contents[n - 1])
                cells.add(each, n, False, True, True)
                used.append((i, j))
        at = tuple(np.array(used, np.int64).reshape(-1, 2).T)
        cells.slots = [each[at] for each in pages]
        return cells

    def compute(self, spans: list[Span]) -> list[Cells]:
        """Compute the tokens of a step: read, write, and read again what the step has written.
        Return the cells.
        """
        if not spans:
            return []
        for each in spans:
            for g, contents, slots in each.puts:
                self.put(g, contents, [slots])
        cells = [self.cells_of_step(g, spans) for g in range(len(self.kinds))]
        cells = [each for each in cells if each.contents]
        for each in cells:
            self.check_slots(each, each.read, "before its tokens are written")
        for each in cells:
            new = [i for i, is_written in enumerate(each.written) if is_written]
            self.put(
                each.group, [each.contents[i] for i in new], [slots[new] for slots in each.slots]
            )
        for each in cells:
            self.check_slots(each, each.kept, "after its tokens are written")
        return cells

    def received(
        self, each: Row, first: int, stop: int, arrived: int, sure: int
    ) -> list[tuple[int, Contents, np.ndarray]]:
        """Return where external tokens [first, stop) are written, of which those before `arrived`
        are right, as (group, contents, slots).
        """
        right = extended([], each.units[:stop], self.owner(each.request))
        contents = [*right[:arrived], *[None] * (stop - arrived)]
        each.contents[first:] = contents[first:]
        found: list[tuple[int, Contents, np.ndarray]] = []
        for g, (spec, kind) in enumerate(zip(self.manager.groups, self.kinds)):
            if not spec.transferred or kind.pages.of_encoder:
                continue
            blocks = self.manager.block_ids(each.request, g)
            size = self.manager.block_sizes[g]
            if not kind.pages.has_slots:
                page = blocks[(sure - 1) // size : (sure - 1) // size + 1]
                found.append((g, [contents[stop - 1]], page.astype(np.int64)))
                continue
            places = np.arange(first, stop)
            slots = blocks[places // size] * np.int64(size) + places % size
            found.append((g, contents[first:stop], slots))
        return found

    def receive(self, each: Row, first: int, stop: int, arrived: int, sure: int) -> None:
        for g, contents, slots in self.received(each, first, stop, arrived, sure):
            self.put(g, contents, [slots])

    def garble_received(self, each: Row) -> None:
        """A transfer may still write to the blocks of a request that has left."""
        first, stop = each.external
        if each.is_receiving and stop > first:
            self.receive(each, first, stop, first, stop)

    def encoder_of(self, each: Row) -> list[int]:
        return [mix(each.encoder, i) for i in range(each.request.num_encoder_tokens)]

    def check_cached(self, each: Row) -> None:
        """Check the bytes of every block that is cached under a hash of this request."""
        request = each.request
        if len(self.ranks) > 1:
            return
        probe = Request(
            "probe",
            request.token_ids,
            lora=request.lora,
            mm_items=request.mm_items,
            cache_salt=request.cache_salt,
            block_hashes=each.hashes_of(request.num_tokens),
        )
        contents = extended([], each.units[: request.num_tokens], self.owner(probe))
        # Blocks of images with other lengths may have the same hashes. Hits distinguish them.
        first_image = min((first for _, first, _ in request.mm_items), default=len(contents))
        hashes = self.manager.cache.hashes(probe)
        unit = self.manager.cache.hash_block_size
        for g, (spec, kind) in enumerate(zip(self.manager.groups, self.kinds)):
            if not (spec.cached and kind.pages.is_transferable) or not len(hashes):
                continue
            size, places, slots = self.manager.block_sizes[g], [], []
            found = self.manager.cache.find(
                hashes[size // unit - 1 :: size // unit], g
            ).device.tolist()
            for column, page in enumerate(found):
                end = (column + 1) * size
                if page <= 0 or end > first_image:
                    continue
                if not kind.pages.has_slots:
                    places.append(end - 1)
                    slots.append(page)
                elif kind.first_needed_token(end) == 0:
                    places += range(end - size, end)
                    slots += range(page * size, (page + 1) * size)
            cells = Cells(g, [contents[i] for i in places], [np.array(slots, np.int64)])
            self.check_slots(cells, None, f"in cached blocks of {each.name}")
