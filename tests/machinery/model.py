# SPDX-License-Identifier: Apache-2.0
"""A plain model of the allocator: lists, dictionaries and loops, without arrays or optimizations.

Prefix hits follow their definition: the longest prefix for which every group has the KV that it
reads. Content is identified by its tokens, without hashes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from math import gcd, lcm

SERVED, WAIT, NEVER = 0, 1, 2
TOKENS, STATE, ENCODER, CIRCULAR = "tokens", "state", "encoder", "circular"
FOREVER = 10**9


@dataclass
class ModelGroup:
    """A cache group. `reads_from(n)`: first token to which token n or any later token attends."""

    block_size: int
    reads_from: Callable[[int], int] = lambda n: 0
    pages: str = TOKENS
    keeps_all: bool = False  # reads_from always returns 0
    drafts: bool = False
    cached: bool = True
    transferred: bool = True
    buffer: int = 0  # CIRCULAR: token capacity of a row, before rounding up to whole blocks
    ends_caching: bool = False  # CIRCULAR: the group is declared as cached
    num_speculative: int = 0  # STATE: maximum number of drafts in a step
    sparse: bool = False  # the retention interval limits which blocks are cached

    def num_places(self):
        """Return the fixed number of blocks per row, or FOREVER if the number is not fixed."""
        return ceil_div(self.buffer, self.block_size) if self.pages == CIRCULAR else FOREVER

    def hits_from(self, n):
        """Return the first token whose KV a hit of n tokens provides."""
        return self.reads_from(n) if self.cached else n


@dataclass
class ModelRequest:
    tokens: list[int]
    reads: bool = True
    writes: bool = True
    num_encoder_tokens: int = 0
    number: int = field(default_factory=itertools.count().__next__)


@dataclass
class ModelHeld:
    """The blocks that a row holds in one group. Dropped blocks are 0.

    STATE: the zeros are followed by the page that a step reads, and then by one page per draft.
    """

    blocks: list[int] = field(default_factory=list)
    num_published: int = 0
    num_partial: int = 0
    num_hits: int = 0  # leading blocks that another row computed
    state_start: int = 0  # STATE: number of tokens in the state when the last page was allocated
    num_slots: int = 0  # CIRCULAR: number of slots assigned so far
    source: int = 0  # new rows: block to copy into the row's next block
    host_source: int = 0  # host page to load into the row's next block
    keeps_state: bool = False  # STATE: the page also holds a cached state that ends inside a block

    @property
    def num_dropped(self):
        return next((i for i, block in enumerate(self.blocks) if block), len(self.blocks))


@dataclass
class ModelRow:
    request: ModelRequest
    held: list[ModelHeld]
    by_step: bool
    start: int
    num_computed: int
    admission: int
    num_prompt: int  # tokens known at admission
    num_shared: int = 0  # prompt tokens that the groups of `shared_groups` would have hit
    ends: frozenset[int] = (
        frozenset()
    )  # lengths of additional hits for which sparse groups keep blocks
    resend: bool = False
    stale: bool = False
    forked: bool = False
    on_host: bool = False
    receiving: bool = False
    was_aborted: bool = False  # the step that admitted the row, while the row received
    reads: bool = True  # whether the request uses prefix hits when it restarts
    num_hit: int = 0  # tokens hit at admission; external tokens follow them
    hit_end: int = 0  # before this token, the row holds only hit blocks that later tokens read
    num_valid: int = FOREVER  # while receiving: upper bound on the number of valid tokens
    drafts: int = 0  # drafts of the last step that may still be rejected; each has a state page
    known: int = 0  # known tokens when the row was last served
    undecided_before: int = 0  # tokens before `start` that could be rejected at that time

    def undecided(self, start, known):
        """Return how many of the first `start` tokens may still be rejected, if `known` are known."""
        drafted = max(self.num_computed - max(self.start + 1, self.known), 0)
        return 0 if known >= start else min(drafted, start)

    def take_back(self, count):
        self.num_computed -= count
        self.drafts = self.drafts and self.drafts - count


@dataclass
class Answer:
    rows: list[int] = field(default_factory=list)
    status: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    # Per request: start positions of the attempted hits that need no partial-block copy.
    tried: list[list[int]] = field(default_factory=list)
    clear: set[int] = field(default_factory=set)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    copy: list[tuple[int, int]] = field(default_factory=list)
    zero: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)  # new blocks, including those that a copy fills


def ceil_div(a, b):
    return -(-a // b)


class ModelPool:
    """Blocks of one tier: held, cached and free, or empty.

    `chain_sizes`: block sizes of the groups whose blocks form chains. If given, a cached block is
    not evicted while it is the only path to a cached child.
    """

    def __init__(self, num_blocks, medium, events, chain_sizes=None):
        self.chain_sizes = chain_sizes
        self.num_blocks = num_blocks
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        # Number of allocations of each block.
        self.generation = dict.fromkeys(range(1, num_blocks), 0)
        self.uncached_free = list(range(1, num_blocks))
        self.cached_free: list[int] = []
        # Cached block -> (group, tokens of the full block or None, tokens of its partial contents).
        self.content: dict[int, tuple[int, tuple | None, list[tuple]]] = {}
        self.published: list[tuple[int, tuple, int]] = []  # (group, tokens, block), oldest first
        self.partial: list[tuple[int, tuple, int]] = []
        self.medium, self.events = medium, events
        self.on_eviction = None

    def num_free(self):
        return len(self.uncached_free) + len(self.cached_free)

    def find(self, g, prefix, partial=False):
        entries = self.partial if partial else self.published
        return next((block for group, key, block in entries if (group, key) == (g, prefix)), 0)

    def victim(self):
        leaves = [block for block in self.cached_free if not self.is_needed(block)]
        return (leaves or self.cached_free)[0]

    def is_needed(self, block):
        g, prefix, _ = self.content[block]
        if self.chain_sizes is None or g not in self.chain_sizes or prefix is None:
            return False
        size = self.chain_sizes[g]
        whole = [(group, key) for group, key, _ in self.published]
        has_child = any(group == g and key[:-size] == prefix for group, key in whole)
        return has_child and whole.count((g, prefix)) == 1

    def take(self):
        if self.uncached_free:
            block = self.uncached_free.pop(0)
        else:
            block = self.victim()
            g, prefix, _ = self.content[block]
            copies = [entry for entry in self.published if entry[:2] == (g, prefix)]
            if self.on_eviction and prefix is not None and len(copies) == 1:
                self.on_eviction(block)
            self.cached_free.remove(block)
        self.forget(block)
        self.refs[block] = 1
        self.generation[block] += 1
        return block

    def retain(self, block):
        if self.refs[block] == 0:
            self.cached_free.remove(block)
        self.refs[block] += 1

    def release(self, block):
        self.refs[block] -= 1
        if self.refs[block] == 0:
            (self.cached_free if block in self.content else self.uncached_free).append(block)

    def publish(self, block, g, prefix):
        if not self.find(g, prefix):
            self.events.append(("stored", self.medium, g, prefix))
        self.published.append((g, prefix, block))
        partial = self.content[block][2] if block in self.content else []
        self.content[block] = (g, prefix, partial)

    def publish_partial(self, block, g, prefix):
        self.partial.append((g, prefix, block))
        self.content.setdefault(block, (g, None, []))[2].append(prefix)

    def forget(self, block):
        if block not in self.content:
            return
        g, prefix, _ = self.content.pop(block)
        self.published = [entry for entry in self.published if entry[2] != block]
        self.partial = [entry for entry in self.partial if entry[2] != block]
        if prefix is not None and not self.find(g, prefix):
            self.events.append(("removed", self.medium, g, prefix))

    def evict(self, block):
        if block in self.content:
            self.forget(block)
            if self.refs[block] == 0:
                self.cached_free.remove(block)
                self.uncached_free.append(block)

    def clear(self):
        self.uncached_free += self.cached_free
        self.cached_free, self.content, self.published, self.partial = [], {}, [], []
        self.events.append(("cleared", self.medium))

    def any_prefix(self, block):
        _, prefix, partial = self.content[block]
        return prefix if prefix is not None else partial[0]


class ModelManager:
    def __init__(
        self,
        groups,
        num_blocks,
        max_model_len,
        max_num_reqs=FOREVER,
        num_preallocate_tokens=0,
        hash_block_size=None,
        watermark_blocks=0,
        fence_frees=False,
        enable_caching=True,
        num_host_blocks=0,
        host_write="back",
        retention_interval=None,
    ):
        self.groups = groups
        self.retention_interval = retention_interval
        self.events: list[tuple] = []
        self.pool = ModelPool(num_blocks, "gpu", self.events)
        self.host = None
        if num_host_blocks:
            sizes = {g: group.block_size for g, group in enumerate(groups) if group.keeps_all}
            self.host = ModelPool(num_host_blocks, "cpu", self.events, sizes)
            self.pool.on_eviction = self._on_eviction
        self.host_write = host_write
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.max_num_reqs = max_num_reqs
        self.num_preallocate_tokens = num_preallocate_tokens
        sizes = [group.block_size for group in groups]
        self.hash_size = hash_block_size or gcd(*sizes)
        self.has_partial = [
            hash_block_size is not None
            and self.hash_size < g.block_size
            and g.pages != ENCODER
            and g.cached
            for g in groups
        ]
        of_tokens = [g for g, group in enumerate(groups) if group.pages not in (ENCODER, CIRCULAR)]
        self.columns = [min(ceil_div(max_model_len, g.block_size), g.num_places()) for g in groups]
        cached = [g for g in of_tokens if groups[g].cached]
        self.any_cached = bool(cached)
        self.whole_unit = lcm(*[sizes[g] for g in of_tokens])
        self.unit = lcm(*[self.hash_size if self.has_partial[g] else sizes[g] for g in cached])
        self.is_uniform = all(size == self.hash_size for size in sizes)
        speculative = [group.num_speculative for group in groups if group.pages == STATE]
        self.max_drafts = min(speculative, default=0)
        self.watermark = watermark_blocks
        self.fence_frees = fence_frees
        self.caching = enable_caching and not any(group.ends_caching for group in groups)

        self.rows: dict[int, ModelRow] = {}
        self.to_clear: set[int] = set()
        self.fences: list[tuple[int, list[int]]] = []
        self.kept: dict[str, list[int]] = {}  # request id -> blocks
        self.loads: list[dict] = []  # loads in flight
        self.pending_writes: list[int] = []
        self.writing: list[int] = []  # blocks to write to the host in this step
        self.writes: list[tuple[int, int, tuple, str]] = []  # writes to the host in this step
        # States whose pages the rows release: (row, group, tokens, page, first token).
        self.moves: list[tuple[int, int, int, int, int]] = []
        # this step: source block or page -> destination of the swap
        self.moved: dict[int, int] = {}
        self.step_answer = None
        self.in_flight: list[dict] = []
        self.num_steps = self.num_completed = self.num_admissions = 0
        self.last_issued = -1
        self.query_tokens = self.hit_tokens = self.host_hit_tokens = 0
        self.counted: dict[int, int] = {}  # counted tokens of each request
        self.had: dict[int, int] = {}  # tokens that each request has hit, received or computed

    def blocks(self, row, group):
        return self.rows[row].held[group].blocks

    # Steps -----------------------------------------------------------------------------------------

    def step(
        self,
        rows,
        counts,
        ids,
        rejected,
        requests,
        limits,
        lookahead,
        reserved=0,
        leaving=(),
        most=None,
        external=None,
        delays=None,
    ):
        """Run a step. `ids`: newly known tokens per row. `lookahead`: number of lookahead slots for
        each row, then for each request.

        `leaving`: rows to swap out. `most`: maximum host blocks per request. `external`: number of
        external tokens after each request's hit. `delays`: whether the external tokens arrive after
        the step.
        """
        most = most or [FOREVER] * len(requests)
        external = external or [0] * len(requests)
        delays = delays or [False] * len(requests)
        hits = [self.capped_hit(request, cap)[0] for request, cap in zip(requests, most)]
        answer = Answer(clear=self.to_clear)
        self.to_clear = set()
        journal = {"id": self.num_steps, "rows": [], "published": [], "dropped": [], "left": []}
        self.in_flight.append(journal | {"swapped": [], "written": []})
        self.step_answer, self.moves, self.held_for_step = answer, [], []
        self.moved = {}
        swapped = [self._move_out(row) for row in leaving]
        self.moved = {}
        self.writing, self.pending_writes = self.pending_writes, []
        served = []
        for row, count, new_ids, back, ahead in zip(rows, counts, ids, rejected, lookahead):
            state = self.rows[row]
            start = state.num_computed - back
            answer.rows.append(row)
            answer.computed.append(start)
            if count == 0:  # the row computes nothing in this step
                state.take_back(back)
                state.request.tokens.extend(new_ids)
                answer.status.append(SERVED)
                answer.tokens.append(0)
                continue
            known = len(state.request.tokens) + len(new_ids)
            status = self._serve(state, row, start, count, ahead, known)
            answer.status.append(status)
            answer.tokens.append(count if status == SERVED else 0)
            if status == SERVED:
                state.request.tokens.extend(new_ids)
                served.append(row)
                self._note_row(row)
        for row, is_out in zip(leaving, swapped):
            answer.rows.append(row)
            answer.status.append(SERVED if is_out else WAIT)
            answer.computed.append(self.rows[row].num_computed)
            answer.tokens.append(0)
        asked = zip(requests, limits, lookahead[len(rows) :], most, external, delays, hits)
        for request, limit, ahead, cap, num_external, delay, hit in asked:
            statuses, tried = [], []
            for num_hit, shared in self._hits_to_try(request, cap, num_external):
                start = num_hit + num_external
                after = start if delay else min(start + limit, len(request.tokens))
                status, row = WAIT, -1
                # The hit changed, so the load would cover other tokens.
                if num_external and num_hit != hit:
                    statuses.append(WAIT)
                    break
                status, row = self._admit(
                    request,
                    num_hit,
                    start,
                    after,
                    ahead,
                    reserved,
                    by_step=True,
                    delay=delay,
                    num_shared=shared,
                )
                statuses.append(status)
                if not self._copies(request, num_hit):
                    tried.append(start)
                if num_external or not self._tries_less(request, num_hit, status):
                    break
            status = min(statuses)
            answer.tried.append(tried)
            answer.status.append(status)
            answer.computed.append(start)
            answer.tokens.append(after - start if status == SERVED else 0)
            answer.rows.append(row)
            if status == SERVED:
                answer.clear.add(row)
                served.append(row)
                self._note_row(row)
        if self.host:
            self._write_pending()
        for row, g, num_tokens, page, _ in self.moves:
            self._publish_state(self.rows[row], g, num_tokens, page)
        for row in served:
            self._publish(self.rows[row])
        self._release_left_states()
        self._end_writes()
        self.moved = {}
        self._release(self.held_for_step, self.num_steps)
        for row, state in self.rows.items():
            if state.resend:
                answer.clear.add(row)
                state.resend = False
        self.step_answer = None
        self.in_flight[-1]["clear"] = set(answer.clear)
        self.last_issued = self.num_steps
        self.num_steps += 1
        self.in_flight = [each for each in self.in_flight if each["id"] >= self.num_steps - 64]
        return answer

    def _hits_to_try(self, request, cap, num_external=0):
        """Yield each hit to try at admission, together with its `num_shared`."""
        for partial in (False,) if num_external else (True, False):
            num_hit, with_host = self.capped_hit(request, cap, partial)
            yield num_hit, self.hit_length(request, partial, with_host, only_shared=True)
        yield 0, 0

    def _tries_less(self, request, num_hit, status):
        """Whether to retry with a shorter hit: one without a partial-block copy, or none at all."""
        if status == WAIT:
            return self._copies(request, num_hit)
        return status == NEVER and num_hit > 0

    def _copies(self, request, num_hit):
        """Whether the hit ends inside a block.

        If so, the source block is held until the step completes.
        """
        return any(each.source for each in self.hit_blocks(request, num_hit))

    def _reads_beside(self, request, num_hit):
        """Whether the row reads one hit page and writes another, for a partial-block copy or a
        state.
        """
        held = self.hit_blocks(request, num_hit)
        states = (each for group, each in zip(self.groups, held) if group.pages == STATE)
        return self._copies(request, num_hit) or any(any(each.blocks) for each in states)

    def _note_row(self, row):
        entry = (row, self.rows[row].admission, self.safe_start)
        self.in_flight[-1]["rows"].append(entry)

    def would_fit_whole(self, request, chunk, lookahead, reserved, cap):
        """Return whether all known tokens, computed in chunks, fit now, later or never, and return
        the hits that were tried.

        A hit that can never fit, because the first chunk reads one of its pages and writes another,
        is excluded. A row that computes these tokens itself needs a single page for both.
        """
        statuses, tried = [], []
        for num_hit, _ in self._hits_to_try(request, cap):
            status, first = self._fits_whole(request, chunk, lookahead, reserved, num_hit)
            if first == SERVED:
                return status, [num_hit]
            statuses.append(status)
            if first != NEVER or not self._reads_beside(request, num_hit):
                tried.append(num_hit)
            if not self._tries_less(request, num_hit, first):
                break
        return min(statuses), tried

    def _fits_whole(self, request, chunk, lookahead, reserved, num_hit):
        """Return the statuses of the whole request and of its first chunk, with this hit."""
        held = self.hit_blocks(request, num_hit)
        hits = [block for each in held for block in each.blocks if block]
        sources = [each.source for each in held if each.source]
        free = self.pool.num_free() - reserved
        is_alone = self.pool.num_free() == self.num_blocks - 1
        # Later chunks may use the watermark blocks and the released copy source.
        room_later = self.pool.num_free()
        free -= sum(block < 0 or self.pool.refs[block] == 0 for block in hits + sources)
        room, encoder, most, most_new, start = free - self.watermark, 0, 0, 0, num_hit
        while start < len(request.tokens):
            stop = min(start + chunk, len(request.tokens))
            count = new = for_drafts = 0
            taken = []  # hit blocks that this chunk reads
            for g, (group, each) in enumerate(zip(self.groups, held)):
                size, columns = group.block_size, len(each.blocks)
                if group.pages == ENCODER:
                    encoder = ceil_div(request.num_encoder_tokens, size)
                    count += encoder
                    new += encoder
                elif group.pages == STATE:
                    for_drafts += min(lookahead, group.num_speculative)
                    if start == num_hit:
                        count += 1 + sum(block != 0 for block in each.blocks)
                        new += 1
                        taken += each.blocks
                    else:  # the state stays in place if no page is free
                        count += 1
                        new += 1
                else:
                    need = min(ceil_div(stop + lookahead, size), self.columns[g])
                    first = 0 if group.pages == CIRCULAR else group.reads_from(start) // size
                    # Leading null columns of the hit stay null.
                    first = max(first, each.num_dropped)
                    count += max(need - first, 0)
                    new += max(need - max(first, columns), 0)
                    taken += each.blocks[first:]
            if start == num_hit:
                needed = count + len(sources)
                if needed > self.num_blocks - 1 - (0 if num_hit else self.watermark):
                    return NEVER, NEVER
                if needed > self.num_blocks - 1 - self.watermark:
                    room = free if is_alone else -1
                fits = new <= room and len(self.rows) < self.max_num_reqs
                chunk_status = SERVED if fits else WAIT
            count, new = count + for_drafts, new + for_drafts
            new += sum(b < 0 or self.pool.refs[b] == 0 for b in taken if b)
            most, most_new, start = max(most, count), max(most_new, new), stop
        if most > self.num_blocks - 1:
            return NEVER, chunk_status
        return SERVED if fits and most_new <= room_later else WAIT, chunk_status

    def would_extend(self, row, count, lookahead):
        """Return the status that the row would get for `count` additional tokens. Called on a copy
        of the model.
        """
        state = self.rows[row]
        if self.step_answer is None:
            self.step_answer, self.held_for_step = Answer(), []
            self.in_flight.append({"rows": [], "published": [], "dropped": [], "swapped": []})
        known = len(state.request.tokens)
        return self._serve(state, row, state.num_computed, count, lookahead, known)

    def allocate(
        self,
        request,
        count,
        num_hit,
        lookahead,
        num_external=0,
        delay=False,
        num_shared=0,
        num_prompt=None,
    ):
        """Return the row and, for each group, its blocks after the hit.

        Returns None if the request is not admitted.
        """
        start = num_hit + num_external
        status, row = self._admit(
            request,
            num_hit,
            start,
            start if delay else min(start + count, len(request.tokens)),
            lookahead,
            0,
            by_step=False,
            delay=delay,
            num_shared=num_shared,
            num_prompt=num_prompt,
        )
        if status != SERVED:
            return None
        self._publish(self.rows[row])
        sizes = [
            num_hit // g.block_size if g.pages not in (ENCODER, CIRCULAR) else 0
            for g in self.groups
        ]
        return row, [held.blocks[n:] for held, n in zip(self.rows[row].held, sizes)]

    def append(self, row, count, lookahead, start=None):
        """Compute `count` tokens from `start`, by default from the row's current position."""
        state = self.rows[row]
        is_sure = start is not None
        start = state.num_computed if start is None else start
        sizes = [len(held.blocks) for held in state.held]
        known = len(state.request.tokens)
        if self._serve(state, row, start, count, lookahead, known, is_sure) != SERVED:
            return None
        self._publish(state)
        return [held.blocks[n:] for held, n in zip(state.held, sizes)]

    def most_rejected(self, row):
        """Return how many drafts can be rejected."""
        state = self.rows[row]
        return min(self.most_undone(row), max(state.num_computed - state.known, 0))

    def is_decided(self, row, back, num_ids):
        """Whether the row's states can continue, because all drafts are rejected or known."""
        state = self.rows[row]
        known = len(state.request.tokens) + num_ids
        return state.drafts - back <= 0 or known >= state.num_computed - back

    def undecided(self, row, start, known):
        """Return how many of the first `start` tokens may still be rejected.

        None may if groups keep the states of drafts: a step knows the result of earlier drafts, and
        a swap-out accepts them.
        """
        return 0 if self.max_drafts else self.rows[row].undecided(start, known)

    def most_undone(self, row):
        """Return how many tokens a row can go back."""
        state = self.rows[row]
        kept = state.start
        if any(group.pages == STATE for group in self.groups):
            kept = state.num_computed - state.drafts
        for g, (group, held) in enumerate(zip(self.groups, state.held)):
            if not group.cached:
                continue
            kept = max(kept, held.num_published * group.block_size)
            if self.has_partial[g]:
                kept = max(kept, held.num_partial * self.hash_size)
        return max(state.num_computed - kept, 0)

    def num_slots(self, row):
        """Return how many leading tokens have a slot in the row's blocks."""
        state = self.rows[row]
        return min(
            (
                state.num_computed
                if group.pages == CIRCULAR
                else len(held.blocks) * group.block_size
                for group, held in zip(self.groups, state.held)
                if group.pages in (TOKENS, CIRCULAR)
            ),
            default=FOREVER,
        )

    def reject(self, row, count):
        self.rows[row].take_back(count)

    def finish_receiving(self, row, num_tokens):
        """Finish receiving external tokens. Return the token from which the row continues."""
        state = self.rows[row]
        limit = min(state.num_hit + num_tokens, state.num_valid)
        state.receiving, state.num_valid = False, FOREVER
        if state.was_aborted:  # no block is kept that is filled only in part
            limit -= limit % lcm(*(g.block_size for g in self.groups if g.pages == TOKENS))
        state.was_aborted = False
        if limit < state.num_computed:
            state.resend |= state.by_step
            if self._can_resume(state, limit):
                self._truncate(state, limit)
            else:
                self._let_go(state)
                self._restart(state, limit)
        self._publish(state)
        return state.num_computed

    def release_kept(self, name):
        self._release(self.kept.pop(name), self.last_issued)

    def _note_left(self, state):
        if self.in_flight and state.by_step:
            self.in_flight[-1]["left"].append((state.admission, state.request))
        for load in self.loads:
            blocks = state.held[load["group"]].blocks
            if blocks[load["column"] : load["column"] + 1] == [load["device"]]:
                self._note_dropped(state, load["group"], load["column"], load["device"])
        for g, (group, held) in enumerate(zip(self.groups, state.held)):
            stop = ceil_div(state.num_computed, group.block_size)
            if group.pages == STATE:  # including the draft pages
                stop = held.num_dropped + state.drafts + 1
            for column, block in enumerate(held.blocks[:stop]):
                is_found = self.pool.content.get(block, (0, None))[1] is not None
                is_found &= group.pages != STATE  # a state page also depends on earlier tokens
                if group.pages != ENCODER and block and not is_found:
                    self._note_dropped(state, g, column, block)

    def _let_go(self, state):
        """Release all blocks except the encoder's, so that the row restarts."""
        if not state.on_host:
            self._note_left(state)
        self._release_row(state, with_encoder=False)

    def free(self, row, keep_as=None):
        state = self.rows.pop(row)
        self._note_had(state.request, state.num_hit if state.receiving else state.num_computed)
        if not state.on_host:
            self._publish(state)
            self._note_left(state)
        self._release_row(state, with_encoder=True, keep_as=keep_as)
        if state.by_step:
            self.to_clear.add(row)

    def complete(self, step_id):
        self.num_completed = max(self.num_completed, step_id + 1)
        self.in_flight = [each for each in self.in_flight if each["id"] >= self.num_completed]
        self._end_loads(lambda load: load["step"] < self.num_completed, arrived=True)
        self._lift_fences()

    def reset(self):
        pools = [self.pool] + ([self.host] if self.host else [])
        if any(any(pool.refs.values()) for pool in pools):
            return False
        self._clear()
        return True

    def start_epoch(self):
        self._clear()
        for state in self.rows.values():
            state.stale = True

    def _clear(self):
        self.pool.clear()
        self.pending_writes = []
        if self.host:
            self.host.clear()

    def num_common_prefix_blocks(self, row, num_running, g):
        count = 0
        for block in self.rows[row].held[g].blocks:
            if not block or self._num_holders(block) != num_running:
                break
            count += 1
        return count

    def most_slots(self, start, undecided=0):
        """Return the maximum number of slots, including lookahead, of a step from token `start`."""
        return min(
            columns * group.block_size - (start - group.reads_from(start - undecided))
            if group.pages == CIRCULAR
            else FOREVER
            for group, columns in zip(self.groups, self.columns)
        )

    # Hits ------------------------------------------------------------------------------------------

    def find(self, g, prefix, with_host=False):
        """Return the block for this prefix (negative for a host page), or 0 if there is none."""
        return self.pool.find(g, prefix) or (
            -self.host.find(g, prefix) if with_host and self.host else 0
        )

    def shared_groups(self):
        """Return the groups that determine `num_shared`: those that keep all tokens or, if there
        are none, all groups with cached tokens.
        """
        cached = [g for g, group in enumerate(self.groups) if group.cached]
        whole = [g for g in cached if self.groups[g].keeps_all and self.groups[g].pages == TOKENS]
        return whole or [g for g in cached if self.groups[g].pages == TOKENS]

    def retained_ends(self, num_prompt, num_hit, num_shared):
        """Return the hit lengths that are retained for a request in addition to the multiples of
        the retention interval.
        """
        ends = set()
        for partial, unit in ((True, self.unit), (False, self.whole_unit)):
            ends.add(self.longest_of_equal(num_prompt, partial))
            if num_shared > num_hit:
                ends.add(num_shared // unit * unit)
                ends.add(max(num_shared - self.redone(partial), 0) // unit * unit)
        return frozenset(ends - {0})

    def is_retained(self, state, g, num_tokens):
        """Whether the group has cached everything that a hit of this length reads."""
        if self.retention_interval is None or not self.groups[g].sparse:
            return num_tokens > 0 and num_tokens % self.unit == 0
        every = self.retention_interval
        is_multiple = every > 0 and num_tokens > 0 and num_tokens % every == 0
        return is_multiple or num_tokens in state.ends

    def has_all(self, tokens, num_tokens, partial, with_host=False, only_shared=False):
        """Whether every group has the KV read after this prefix and the KV that drafters recompute."""
        for g, group in enumerate(self.groups):
            size = group.block_size
            if group.pages == ENCODER or not group.cached:
                continue
            if only_shared and g not in self.shared_groups():
                continue
            first = group.reads_from(num_tokens)
            for column in range(first // size, num_tokens // size):
                if not self.find(g, tuple(tokens[: (column + 1) * size]), with_host):
                    return False
            is_inside = num_tokens % size and first < num_tokens
            if is_inside and not self.pool.find(g, tuple(tokens[:num_tokens]), partial=True):
                return False
            redone = self.hash_size if partial and self.has_partial[g] else size
            end = num_tokens + redone
            if group.drafts and num_tokens > 0 and not self.has_end(g, tokens, end, with_host):
                return False
        return True

    def has_end(self, g, tokens, num_tokens, with_host):
        """Return the block in which this prefix ends if the block is filled up to the end of the
        prefix; otherwise, return a falsy value.
        """
        if num_tokens > len(tokens):
            return False
        prefix = tuple(tokens[:num_tokens])
        if num_tokens % self.groups[g].block_size:
            return self.pool.find(g, prefix, partial=True)
        return self.find(g, prefix, with_host)

    def hit_length(self, request, partial=False, with_host=False, only_shared=False, reads=None):
        """Return the number of tokens of the longest hit.

        `partial`: hits may also end inside blocks.
        """
        reads = request.reads if reads is None else reads
        if not reads or not self.caching or not self.any_cached:
            return 0
        if only_shared and not self.shared_groups():
            return 0
        lengths = range(0, len(request.tokens), self.unit if partial else self.whole_unit)
        where = partial, with_host, only_shared
        return max(n for n in lengths if self.has_all(request.tokens, n, *where))

    def checkpoint_tokens(self, request, row, count):
        """Reduce `count` so that the step ends at a position where a state is kept."""
        start = self.hit_length(request, partial=True, with_host=True)
        shared = self.hit_length(request, partial=True, with_host=True, only_shared=True)
        if row is not None:
            start, shared = self.rows[row].num_computed, self.rows[row].num_shared
        known = len(request.tokens)
        stop = max(start, min(start + count, known))
        states = [group.block_size for group in self.groups if group.pages == STATE]
        if not states or not self.caching or not request.writes:
            return stop - start
        prompts = {known} if row is None else {known, self.rows[row].num_prompt}
        likely = {shared, *(self.longest_of_equal(num_prompt) for num_prompt in prompts)}
        if reached := [n for n in likely if start < n <= stop]:
            return min(reached) - start
        boundary = lcm(self.unit, *states)
        ends = [n for n in range(start + 1, stop + 1) if n % boundary == 0]
        return max(ends, default=stop) - start

    def redone(self, partial):
        """Return the number of tokens after a hit that drafters recompute."""
        return max(
            (
                self.hash_size if partial and self.has_partial[g] else group.block_size
                for g, group in enumerate(self.groups)
                if group.drafts and group.cached
            ),
            default=0,
        )

    def longest_of_equal(self, known, partial=True):
        """Return the longest hit that a prompt of `known` tokens can have of an identical prompt."""
        full = known // self.hash_size * self.hash_size
        lengths = range(0, known, self.unit if partial else self.whole_unit)
        return max(n for n in lengths if n == 0 or n + self.redone(partial) <= full)

    def capped_hit(self, request, cap, partial=False):
        """Return the hit length with at most `cap` host pages, and whether the host was searched."""
        num_hit = self.hit_length(request, partial, with_host=True)
        held = self.hit_blocks(request, num_hit)
        num_loads = sum(b < 0 for h in held for b in h.blocks)
        num_loads += sum(h.host_source > 0 for h in held)
        return (num_hit, True) if num_loads <= cap else (self.hit_length(request, partial), False)

    def hit_blocks(self, request, num_tokens, start=None):
        """Return, per group, the blocks that a row with this hit starts with.

        Host pages are negative.

        The row continues at `start`. Tokens between the hit and `start` are external. Hit blocks
        that the row no longer reads from `start` on are null.
        """
        start = num_tokens if start is None else start
        held = []
        for g, group in enumerate(self.groups):
            size, each = group.block_size, ModelHeld()
            if group.pages not in (ENCODER, CIRCULAR):
                first = group.hits_from(num_tokens)
                for column in range(num_tokens // size):
                    prefix = tuple(request.tokens[: (column + 1) * size])
                    is_read = column >= max(first, group.reads_from(start)) // size
                    each.blocks.append(self.find(g, prefix, with_host=True) if is_read else 0)
                each.num_published = num_tokens // size
                each.num_hits, each.state_start = each.num_published, num_tokens
                each.num_partial = each.num_published * (size // self.hash_size)
                if first > each.num_published * size:  # the last block lacks its leading tokens
                    each.num_partial = num_tokens // self.hash_size
                if num_tokens % size and first < num_tokens:
                    prefix = tuple(request.tokens[:num_tokens])
                    each.source = self.pool.find(g, prefix, partial=True)
                if group.pages == STATE and each.blocks and each.blocks[-1] < 0:
                    each.host_source, each.blocks[-1] = -each.blocks[-1], 0
                if group.pages == TOKENS and each.num_dropped == len(each.blocks):
                    skipped = group.reads_from(start) // size - len(each.blocks)
                    each.blocks += [0] * skipped
            held.append(each)
        return held

    # Serving ---------------------------------------------------------------------------------------

    def _needs(
        self, held, start, after, lookahead, drafts=0, accepted=0, gives_up=False, undecided=0
    ):
        """Return (number of new blocks, first column to keep) per group.

        `drafts`: number of drafts among these tokens. `accepted`: number of accepted drafts of the
        previous step.
        `gives_up`: release the states at block ends that the accepted drafts have passed.
        `undecided`: number of tokens before `start` that may still be rejected.
        """
        needs = []
        for group, each in zip(self.groups, held):
            size, columns = group.block_size, len(each.blocks)
            if group.pages == STATE:
                pages = [block for block in each.blocks if block]
                left = self._left_pages(group, pages, start, accepted, gives_up)
                spare = len(pages) - 1 - len(left) if pages else 0
                moves = self._moves(group, each, start, after - drafts)
                moves = moves and not (gives_up and self._stays(each, accepted))
                needs.append((moves + max(drafts - spare, 0), each.num_dropped))
            elif group.pages == ENCODER:
                needs.append((0, 0))
            elif group.pages == CIRCULAR:
                need = min(
                    ceil_div(after + lookahead, size), self.columns[self.groups.index(group)]
                )
                needs.append((max(need - columns, 0), 0))
            else:
                most = ceil_div(self.max_model_len, size)
                need = min(ceil_div(after + lookahead, size), most)
                first = group.reads_from(start - undecided) // size
                drop_to = max(each.num_dropped, min(first, columns))
                needs.append((max(need - columns, 0), drop_to))
        return needs

    @staticmethod
    def _moves(group, each, start, sure):
        """Whether the state moves to another page: after a block ends or if the row has no state."""
        size = group.block_size
        return sure > (ceil_div(start, size) if any(each.blocks) else len(each.blocks)) * size

    def _left_pages(self, group, pages, start, accepted, gives_up):
        """Return the pages of states at block ends that accepted drafts have passed.

        The row never writes them again.
        """
        at = [(n, page) for n, page in zip(range(start - accepted, start), pages)]
        at = [page for n, page in at if n % group.block_size == 0]
        return [page for page in at if self._is_shared(page)] if gives_up else at

    def _stays(self, each, accepted):
        """Whether a state at a block end stays in its page. If so, the row gives up the stored
        copy of the state.
        """
        return any(each.blocks) and not self._is_shared(each.blocks[each.num_dropped + accepted])

    def _room(self, held, needs, free):
        """Return the number of free blocks left after all `needs` are met."""
        for each, (num_new, drop_to) in zip(held, needs):
            free -= num_new
            for block in each.blocks[each.num_dropped : drop_to]:
                free += self.pool.refs[block] == 1 and not self._is_fenced(self.last_issued)
        return free

    def _shared(self, state, start, after, lookahead, drafts, accepted):
        """Return (group, column) of each shared block in which these tokens have slots."""
        found = []
        for g, (group, each) in enumerate(zip(self.groups, state.held)):
            size = group.block_size
            stop = ceil_div(after + lookahead, size)
            columns = range(start // size, min(stop, len(each.blocks)))
            if group.pages == STATE:  # written in place, unless the state moves to another page
                if not self._moves(group, each, start, after - drafts):
                    page = each.blocks[each.num_dropped + accepted]
                    found += [(g, (start - 1) // size)] if self._is_shared(page) else []
                continue
            if group.pages == CIRCULAR:
                blocks = range(start // size, min(stop, start // size + self.columns[g]))
                columns = [b % self.columns[g] for b in blocks]
                columns = [column for column in columns if column < len(each.blocks)]
            if group.pages != ENCODER:
                found += [(g, column) for column in columns if self._is_shared(each.blocks[column])]
        return found

    def _is_shared(self, block):
        """Whether another row holds the block.

        A connector that may still read the block counts as a row.
        """
        count = self._num_holders(block) - self.held_for_step.count(block)
        return count + sum(blocks.count(block) for blocks in self.kept.values()) > 1

    def _num_holders(self, block):
        """Return the number of references that rows hold, excluding fences, kept blocks and
        loads.
        """
        count = self.pool.refs.get(block, 0)
        count -= sum(blocks.count(block) for _, blocks in self.fences)
        count -= sum(blocks.count(block) for blocks in self.kept.values())
        return count - sum(load["device"] == block for load in self.loads)

    def _is_fenced(self, step_id):
        return self.fence_frees and step_id >= self.num_completed

    def _serve(self, state, row, start, count, lookahead, known, is_sure=False):
        """`is_sure`: no token before `start` can still be rejected."""
        after = start + count
        drafts = max(after - max(start + 1, known), 0) if self.max_drafts else 0
        accepted = state.drafts and state.drafts - (state.num_computed - start)
        undecided = 0 if is_sure else self.undecided(row, start, known)
        self.safe_start, self.copies = start, []
        if state.on_host:
            status = self._resume(state, row, start, after, lookahead, drafts, undecided)
            state.known = known if status == SERVED else state.known
            return status
        needs = self._needs(
            state.held, start, after, lookahead, drafts, accepted, undecided=undecided
        )
        shared = []
        if state.forked:
            shared = self._shared(state, start, after, lookahead, drafts, accepted)
        room = self._room(state.held, needs, self.pool.num_free()) - len(shared)
        spare = max(room - self.watermark, 0)
        surplus = None
        if room < 0:
            surplus = self._surplus(state.held, start, after + lookahead, drafts, accepted)
            alive = sum(
                1 + drafts  # if the row is alone, its state stays in its page
                if group.pages == STATE
                else len(each.blocks) - len(tail) - drop_to + num_new
                for group, each, tail, (num_new, drop_to) in zip(
                    self.groups, state.held, surplus, needs
                )
            )
            freed = sum(self.pool.refs[block] == 1 for tail in surplus for block in tail)
            gives_up = state.by_step and not self._is_fenced(self.last_issued)
            needs = self._needs(
                state.held, start, after, lookahead, drafts, accepted, gives_up, undecided
            )
            free = self.pool.num_free() + freed
            if not gives_up or self._room(state.held, needs, free) < len(shared):
                return NEVER if alive > self.num_blocks - 1 and not undecided else WAIT
            spare = 0
        state.start, state.num_computed, state.drafts = start, after, drafts
        state.undecided_before = 0 if self.max_drafts else undecided
        state.known = known
        before, self.moves = self.moves, []
        stays = []
        for g, (group, each) in enumerate(zip(self.groups, state.held)):
            if group.pages != STATE:
                continue
            moves = self._moves(group, each, start, after - drafts)
            if surplus is not None and moves and self._stays(each, accepted):
                stays.append(g)
            if accepted:
                self._settle_state(row, g, start, accepted, keeps_passed=surplus is None)
            if g in stays:
                pages = [page for page in each.blocks if page]
                self.pool.evict(pages[0])
                each.blocks = [0] * ((after - drafts - 1) // group.block_size) + pages
                each.keeps_state = False
        if surplus is not None:
            state.resend = True
            for each, given in zip(state.held, surplus):
                self._release(given[::-1], self.last_issued)
                each.blocks = [block for block in each.blocks if block == 0 or block not in given]
                each.num_hits = min(each.num_hits, len(each.blocks))
        self._allocate_blocks(state, row, start, after, lookahead, needs, spare, shared, stays)
        self.moves = before + sorted(self.moves, key=lambda move: move[1])  # in group order
        self._own_what_is_written(state, start, after)
        return SERVED

    def _surplus(self, held, start, stop, drafts, accepted):
        """Return, per group, the trailing blocks without a slot for any token before `stop`.

        STATE: trailing pages other than the current one and one page per draft.
        """
        surplus = []
        for group, each in zip(self.groups, held):
            given = []
            if group.pages == TOKENS:
                given = each.blocks[max(ceil_div(stop, group.block_size), each.num_dropped) :]
            elif group.pages == STATE:
                pages = each.blocks[each.num_dropped :]
                left = self._left_pages(group, pages, start, accepted, gives_up=True)
                own = [page for i, page in enumerate(pages) if i != accepted]
                given = [page for page in own if page not in left][drafts:]
            surplus.append(given)
        return surplus

    def _own_what_is_written(self, state, start, after):
        """Mark written blocks as computed by this row, even if another row started them."""
        for group, each in zip(self.groups, state.held if state.forked else ()):
            first = after - state.drafts - 1 if group.pages == STATE else start
            each.num_hits = min(each.num_hits, first // group.block_size)

    def _resume(self, state, row, start, after, lookahead, drafts, undecided):
        """Swap in the blocks that a row on the host still reads or writes."""
        needs = self._needs(state.held, start, after, lookahead, drafts, undecided=undecided)
        moving = [
            group.pages == STATE and start > 0 and self._moves(group, each, start, after - drafts)
            for group, each in zip(self.groups, state.held)
        ]
        loads = []  # (group, column, whether this step has already loaded the page)
        for g, (group, each) in enumerate(zip(self.groups, state.held)):
            if moving[g]:
                continue  # loaded into its new page below
            for column in range(needs[g][1], len(each.blocks)):
                is_read_only = group.pages == ENCODER or (
                    group.pages == TOKENS and (column + 1) * group.block_size <= start
                )
                loads.append((g, column, is_read_only and each.blocks[column] in self.moved))
        num_new = sum(n for n, _ in needs) + sum(not is_there for _, _, is_there in loads)
        is_alone = self.pool.num_free() == self.num_blocks - 1
        kept = 0 if is_alone else self.watermark
        if self.pool.num_free() - num_new < kept:
            num_held = sum(n for n, _ in needs) + len(loads)
            return NEVER if num_held > self.num_blocks - 1 and not undecided else WAIT
        room = max(self.pool.num_free() - num_new - self.watermark, 0)
        left = []
        for g, each in enumerate(state.held):
            drop_to = needs[g][1]
            left += each.blocks[each.num_dropped : drop_to]
            each.blocks[:drop_to] = [0] * drop_to
            if moving[g]:
                each.host_source, each.blocks[-1] = each.blocks[-1], 0
                needs[g] = (needs[g][0], len(each.blocks))
            each.state_start = start
            for column in [column for group, column, _ in loads if group == g]:
                page = each.blocks[column]
                if (g, column, True) in loads:
                    each.blocks[column] = self.moved[page]
                    self.pool.retain(self.moved[page])
                    left.append(page)
                    continue
                each.blocks[column] = self.pool.take()
                self.moved.setdefault(page, each.blocks[column])
                self._load(state, g, column, page, each.blocks[column], is_hit=False)
        for page in reversed(left):
            self.host.release(page)
        state.on_host, state.resend = False, True
        self.safe_start = 0
        self.in_flight[-1]["swapped"].append((row, state.admission))
        state.start, state.num_computed, state.drafts = start, after, drafts
        state.undecided_before = 0 if self.max_drafts else undecided
        self._allocate_blocks(state, row, start, after, lookahead, needs, room)
        self._own_what_is_written(state, start, after)
        return SERVED

    def _admit(
        self,
        request,
        num_hit,
        start,
        after,
        lookahead,
        reserved,
        by_step,
        delay=False,
        num_shared=0,
        num_prompt=None,
    ):
        held = self.hit_blocks(request, num_hit, start)
        hits = [block for each in held for block in each.blocks if block]
        sources = [each.source for each in held if each.source]
        free = self.pool.num_free()
        free -= sum(block < 0 or self.pool.refs[block] == 0 for block in hits + sources)
        needs = self._needs(held, start, after, lookahead)
        for g, group in enumerate(self.groups):
            if group.pages == ENCODER:
                needs[g] = (ceil_div(request.num_encoder_tokens, group.block_size), 0)
        room = self._room(held, needs, free) - self.watermark - reserved
        is_alone = self.pool.num_free() == self.num_blocks - 1
        now = len(hits) + len(sources) + sum(num_new for num_new, _ in needs)
        if now > self.num_blocks - 1 - (0 if start else self.watermark):
            return NEVER, -1
        if now > self.num_blocks - 1 - self.watermark and is_alone:
            room = min(room + self.watermark, 0)  # leaves no room for preallocation
        row = next(row for row in range(len(self.rows) + 1) if row not in self.rows)
        if room < 0 or row >= self.max_num_reqs:
            return WAIT, -1
        self.safe_start, self.copies = start if delay else num_hit, []
        first_on_host = self._first_on_host(request, num_hit)
        for source in sources:
            self.pool.retain(source)
            self.held_for_step.append(source)
        self.num_admissions += 1
        prompt = num_prompt or len(request.tokens)
        state = ModelRow(request, held, by_step, start, after, self.num_admissions, prompt)
        state.known = len(request.tokens)
        state.num_shared = num_shared
        state.ends = self.retained_ends(prompt, num_hit, num_shared)
        state.receiving, state.num_hit, state.hit_end = delay, num_hit, num_hit
        state.reads = request.reads  # the `read_cache` setting of this call
        self.rows[row] = state
        self._take_hits(state)
        self._allocate_blocks(state, row, start, after, lookahead, needs, room)
        if request.reads:
            self._count_hit(request, num_hit, first_on_host)
        return SERVED, row

    def _note_had(self, request, num_tokens):
        self.had[request.number] = max(self.had.get(request.number, 0), num_tokens)

    def _count_hit(self, request, num_hit, first_on_host):
        """Count a request once, and of its hits, the tokens that it did not have before."""
        if request.number not in self.counted:
            self.counted[request.number] = len(request.tokens)
            self.query_tokens += len(request.tokens)
        first = self.had.get(request.number, 0)
        stop = min(num_hit, self.counted[request.number])
        self.hit_tokens += max(stop - first, 0)
        self.host_hit_tokens += max(stop - max(first, first_on_host), 0)
        self._note_had(request, num_hit)

    def _first_on_host(self, request, num_hit):
        """Return the first hit token that depends on host pages."""
        first = num_hit
        for group, each in zip(self.groups, self.hit_blocks(request, num_hit)):
            columns = [column for column, block in enumerate(each.blocks) if block < 0]
            columns += [len(each.blocks) - 1] if each.host_source else []
            first = min([first, *(column * group.block_size for column in columns)])
        return first

    def _take_hits(self, state):
        """Retain the hit blocks and load those on the host."""
        for each in state.held:
            for block in each.blocks:
                if block > 0:
                    self.pool.retain(block)
            for page in [-block for block in each.blocks if block < 0] + [each.host_source]:
                if page:
                    self.host.retain(page)
        for g, each in enumerate(state.held):
            for column, block in enumerate(each.blocks):
                if block < 0:
                    each.blocks[column] = self.pool.take()
                    self._load(state, g, column, -block, each.blocks[column], is_hit=True)

    def _allocate_blocks(
        self, state, row, start, after, lookahead, needs, room, shared=(), stays=()
    ):
        numbers, sure = [], after - state.drafts
        moving = [
            g not in stays and self._moves(group, each, start, sure)
            for g, (group, each) in enumerate(zip(self.groups, state.held))
        ]
        for each in state.held:
            each.num_slots = max(each.num_slots, after + lookahead)
        for g, (group, each, (num_new, drop_to)) in enumerate(zip(self.groups, state.held, needs)):
            first = each.num_dropped
            if drop_to > first:
                dropped = each.blocks[first:drop_to]
                for column in range(first, drop_to):
                    self._note_dropped(state, self.groups.index(group), column, each.blocks[column])
                each.blocks[first:drop_to] = [0] * len(dropped)
                self._release(dropped[::-1], self.last_issued)
            more = 0
            if num_new and group.pages == TOKENS:
                most = ceil_div(self.max_model_len, group.block_size)
                more = min(
                    ceil_div(self.num_preallocate_tokens, group.block_size),
                    room,
                    most - len(each.blocks) - num_new,
                )
                room -= more
            if each.keeps_state:
                each.keeps_state = False
                if not moving[g] and g not in [group for group, _ in shared]:
                    more = min(room, 1)  # the old page keeps the cached state
                    room -= more
                    moving[g] = more > 0
                    if not more:
                        self.pool.evict(each.blocks[each.num_dropped])
            numbers.append(num_new + more)
        # Allocation order: for each group, replacements for shared blocks, then new blocks.
        taken, own = [], []
        for g, n in enumerate(numbers):
            columns = [column for group, column in shared if group == g]
            own += [(g, column, self.pool.take()) for column in columns]
            taken.append([self.pool.take() for _ in range(n)])
        if self.step_answer is not None:
            self.step_answer.given += [*(block for _, _, block in own), *chain(*taken)]
        for g, column, block in own:
            self._own(state, g, column, block, start)
        for g, (group, each) in enumerate(zip(self.groups, state.held)):
            if group.pages == STATE:
                if moving[g]:
                    self._move_state(row, each, g, start, sure, taken[g].pop(0))
                each.blocks += taken[g]
                continue
            if each.source and taken[g]:
                self.step_answer.copy.append((each.source, taken[g][0]))
                self._note_dropped(state, g, len(each.blocks), each.source)
                self.safe_start = min(self.safe_start, len(each.blocks) * group.block_size)
                each.source = 0
            is_behind_hit = not each.blocks and start > 0 and self.step_answer is not None
            if taken[g] and group.pages == CIRCULAR and is_behind_hit:
                self.step_answer.zero += taken[g]
                self.safe_start = 0
            starts = len(each.blocks) * group.block_size
            is_step = self.step_answer is not None
            if (
                is_step
                and taken[g]
                and not group.cached
                and group.pages == TOKENS
                and starts < start
            ):
                self.step_answer.zero += taken[g][: ceil_div(start - starts, group.block_size)]
                self.safe_start = min(self.safe_start, starts)
            each.blocks += taken[g]

    def _own(self, state, g, column, block, start):
        """Replace a shared block with the row's own block, and copy the content (copy-on-write)."""
        each, size = state.held[g], self.groups[g].block_size
        shared, each.blocks[column] = each.blocks[column], block
        each.num_hits = min(each.num_hits, column)
        if self.groups[g].pages in (STATE, CIRCULAR) or column * size < start:
            self._note_dropped(state, g, column, shared)
            each.state_start = start
            self.safe_start = min(self.safe_start, column * size)
            if self.step_answer:
                self.step_answer.copy.append((shared, block))
                self.held_for_step.append(shared)
                return
            self.copies.append((shared, block))
        self._release([shared], self.last_issued)

    def _move_state(self, row, held, g, start, sure, page):
        column = (sure - 1) // self.groups[g].block_size
        pages = [block for block in held.blocks if block]
        first_token, held.state_start = self._first_token(self.rows[row], g, 0), start
        if held.host_source:
            self._load(self.rows[row], g, column, held.host_source, page, is_hit=False)
            held.host_source = 0
        elif held.source:
            self.step_answer.copy.append((held.source, page))
            inside = start // self.groups[g].block_size
            self._note_dropped(self.rows[row], g, inside, held.source)
            self.safe_start = min(self.safe_start, inside * self.groups[g].block_size)
            held.source = 0
        elif pages:
            left = pages.pop(0)
            self.step_answer.copy.append((left, page))
            self.moves.append((row, g, start, left, first_token))
        elif start == 0:
            self.step_answer.zero.append(page)
        held.blocks = [0] * column + [page] + pages

    def _settle_state(self, row, g, start, accepted, keeps_passed=True):
        """Put the page of the last accepted draft first. Reuse or release the other pages."""
        state, held, size = self.rows[row], self.rows[row].held[g], self.groups[g].block_size
        first, pages = held.num_dropped, held.blocks[held.num_dropped :]
        first_token = self._first_token(state, g, first)
        spare = pages[accepted + 1 :]
        for i in reversed(range(accepted)):
            n = start - accepted + i
            if n % size or not (keeps_passed or self._is_shared(pages[i])):
                self._note_dropped(state, g, first, pages[i])
                self.pool.evict(pages[i])
                spare.insert(0, pages[i])
        for i in range(accepted):
            n = start - accepted + i
            if n % size == 0 and (keeps_passed or self._is_shared(pages[i])):
                self.moves.append((row, g, n, pages[i], first_token))
        held.blocks = [0] * ((start - 1) // size) + [pages[accepted]] + spare
        held.state_start = start

    def _release_left_states(self):
        for row, g, _, page, first_token in self.moves:
            self._note_dropped(self.rows[row], g, 0, page, first_token)
            in_step = self.step_answer is not None
            self._release([page], self.num_steps if in_step else self.last_issued)
        self.moves = []

    # Blocks ----------------------------------------------------------------------------------------

    def _release(self, blocks, step_id, is_fenced=None):
        if self._is_fenced(step_id) if is_fenced is None else is_fenced:
            if blocks:
                later = sum(step > step_id for step, _ in self.fences)
                self.fences.insert(len(self.fences) - later, (step_id, list(blocks)))
            return
        for block in blocks:
            self.pool.release(block)

    def _lift_fences(self):
        while self.fences and self.fences[0][0] < self.num_completed:
            for block in self.fences.pop(0)[1]:
                self.pool.release(block)

    def _tail_first(self, state, with_encoder):
        last, first = [], []
        for g, (group, each) in enumerate(zip(self.groups, state.held)):
            if group.pages == ENCODER:
                first += reversed(each.blocks) if with_encoder else []
                continue
            for column, block in enumerate(each.blocks):
                if block:
                    last.append((-column * group.block_size, g, block))
        return first + [block for _, _, block in sorted(last)]

    def _release_row(self, state, with_encoder, keep_as=None):
        blocks = self._tail_first(state, with_encoder)
        if state.on_host:
            for page in blocks:
                self.host.release(page)
        elif keep_as is not None:
            own = {
                block
                for group, each in zip(self.groups, state.held)
                for block in each.blocks
                if not group.transferred
            }
            self._release([block for block in blocks if block in own], self.last_issued)
            self.kept[keep_as] = [block for block in blocks if block not in own]
        else:
            self._release(blocks, self.last_issued)
        for g, group in enumerate(self.groups):
            if with_encoder or group.pages != ENCODER:
                state.held[g] = ModelHeld()

    # Forks, swaps, and the host -----------------------------------------------------------------------

    def fork(self, row, request):
        """Fork a row. Return the child's row, or -1 if no row is free."""
        parent = self.rows[row]
        other = next(row for row in range(len(self.rows) + 1) if row not in self.rows)
        if other >= self.max_num_reqs:
            return -1
        self._publish(parent)
        self._accept_drafts(row)
        parent.forked = True
        held = []
        for each, group in zip(parent.held, self.groups):
            blocks = list(each.blocks)
            if group.pages == STATE:  # without the draft pages
                del blocks[each.num_dropped + 1 :]
            for block in blocks:
                if block:
                    self.pool.retain(block)
            child = ModelHeld(
                blocks,
                keeps_state=each.keeps_state,
                num_slots=each.num_slots,
                state_start=each.state_start,
            )
            if group.pages != ENCODER:
                full = parent.num_computed // group.block_size
                child.num_hits = len(each.blocks)
                child.num_published = max(each.num_published, full)
                child.num_partial = max(each.num_partial, parent.num_computed // self.hash_size)
            held.append(child)
        self.num_admissions += 1
        n = parent.num_computed
        known = len(request.tokens)
        state = ModelRow(request, held, parent.by_step, n, n, self.num_admissions, known)
        state.ends = self.retained_ends(known, n, 0)
        state.forked, state.stale, state.resend = True, parent.stale, parent.by_step
        state.reads = request.reads
        state.hit_end = parent.hit_end
        self.counted[request.number] = 0
        self._note_had(request, n)
        self.rows[other] = state
        for step in self.in_flight:
            for what in ("rows", "swapped"):
                step[what] += [
                    (other, state.admission, *rest)
                    for of, admission, *rest in step[what]
                    if (of, admission) == (row, parent.admission)
                ]
            step["dropped"] += [
                (state.admission, *rest)
                for admission, *rest in step["dropped"]
                if admission == parent.admission
            ]
        return other

    def _accept_drafts(self, row):
        """Accept all drafts of the row's last step, which can no longer be rejected."""
        state = self.rows[row]
        if not state.drafts:
            return
        self.moves = []
        for g, group in enumerate(self.groups):
            if group.pages == STATE:
                self._settle_state(row, g, state.num_computed, state.drafts)
        self._release_left_states()
        state.drafts, state.resend = 0, True

    def _move_out(self, row):
        """Swap out the row's blocks with KV. Return False if the host lacks the space."""
        state = self.rows[row]
        held = []
        for group, each in zip(self.groups, state.held):
            stop = len(each.blocks)
            if group.pages == STATE and any(each.blocks):  # without the draft pages
                column = (state.num_computed - 1) // group.block_size
                held.append([0] * column + [each.blocks[each.num_dropped + state.drafts]])
                continue
            if group.pages != ENCODER:
                stop = min(stop, ceil_div(state.num_computed, group.block_size))
            held.append(each.blocks[: max(stop, each.num_dropped)])
        new = {block for blocks in held for block in blocks if block} - set(self.moved)
        there = {}  # block -> host page that already holds its content
        for block in new:
            group, prefix, _ = self.pool.content.get(block, (0, None, []))
            page = self.host.find(group, prefix) if prefix is not None else 0
            if page:
                there[block] = page
        free = sum(self.host.refs[page] == 0 for page in set(there.values()))
        if len(new) - len(there) > self.host.num_free() - free:
            return False
        self._publish(state)
        for page in there.values():
            self.host.retain(page)
        left = self._tail_first(state, with_encoder=True)
        for g, blocks in enumerate(held):
            first, pages = state.held[g].num_dropped, state.held[g].blocks
            if self.groups[g].pages == STATE:
                for page in pages[first : first + state.drafts]:
                    self._note_dropped(state, g, first, page)
            state.held[g].blocks, state.held[g].keeps_state = [], False
            for column, block in enumerate(blocks):
                if not block:
                    state.held[g].blocks.append(0)
                    continue
                self._note_dropped(state, g, column, block)
                if block in there:
                    self.moved[block] = there[block]
                elif block in self.moved:
                    self.host.retain(self.moved[block])
                else:
                    self.moved[block] = page = self.host.take()
                    self.step_answer.swap_out.append((block, page))
                    group, prefix, _ = self.pool.content.get(block, (0, None, []))
                    if prefix is not None:
                        self.writes.append((page, group, prefix, "row"))
                state.held[g].blocks.append(self.moved[block])
        self._release(left, self.num_steps)
        state.on_host, state.drafts = True, 0
        self.in_flight[-1]["swapped"].append((row, state.admission))
        return True

    def _on_eviction(self, block):
        if self.step_answer is not None:
            self._write(block)

    def _write(self, block):
        """Write a cached block to the host. Return whether a new host page was allocated."""
        g, prefix, _ = self.pool.content[block]
        page = self.host.find(g, prefix)
        if page:
            self.host.retain(page)  # already on the host, so this only adds a reference
            self.writes.append((page, g, prefix, "there"))
            return False
        if any((group, key) == (g, prefix) for _, group, key, _ in self.writes):
            return False  # another block with this content is written in this step
        if not self.host.num_free():
            return False
        page = self.host.take()
        self.step_answer.swap_out.append((block, page))
        self.writes.append((page, g, prefix, "new"))
        return True

    def _write_pending(self):
        writing, self.writing = self.writing, []
        for block in reversed(writing):
            if self.pool.content.get(block, (0, None))[1] is None or not self._write(block):
                continue
            if self._is_fenced(self.num_steps):
                self.pool.retain(block)
                self.held_for_step.append(block)

    def _end_writes(self):
        for page, g, prefix, what in self.writes:
            if what != "there":
                self.host.publish(page, g, prefix)
                self.in_flight[-1]["written"].append(page)
            if what != "row":
                self.host.release(page)
        self.writes = []

    def _load(self, state, g, column, page, block, is_hit):
        self.step_answer.swap_in.append((page, block))
        self.pool.retain(block)
        load = {"step": self.num_steps, "host": page, "device": block, "column": column}
        request = state.request if is_hit else None
        self.loads.append(load | {"group": g, "request": request})
        self.safe_start = min(self.safe_start, column * self.groups[g].block_size)

    def _end_loads(self, is_over, arrived):
        over = [load for load in self.loads if is_over(load)]
        self.loads = [load for load in self.loads if not is_over(load)]
        for load in over if arrived else []:
            g, block, page = load["group"], load["device"], load["host"]
            if load["request"] is None:
                continue
            prefix = tuple(
                load["request"].tokens[: (load["column"] + 1) * self.groups[g].block_size]
            )
            is_there = self.host.content.get(page, (0, None))[:2] == (g, prefix)
            if is_there and self.pool.content.get(block, (0, None))[1] is None:
                self._publish_content(block, g, prefix)
        for load in reversed(over):
            self.pool.release(load["device"])
        for load in reversed(over):
            self.host.release(load["host"])

    # Publishing ------------------------------------------------------------------------------------

    def _publish(self, state):
        if not state.request.writes or state.stale or state.receiving or not self.caching:
            return
        known = min(state.num_computed, len(state.request.tokens))
        for g, (group, each) in enumerate(zip(self.groups, state.held)):
            if not group.cached:
                continue
            if self.has_partial[g] and group.pages == TOKENS:
                self._publish_partials(state, g, known)
            if group.pages == STATE:
                first = state.num_computed - state.drafts
                pages = each.blocks[each.num_dropped :]
                for n, page in zip(range(first, state.num_computed + 1), pages):
                    if n == first or n % group.block_size == 0:
                        self._publish_state(state, g, n, page)
                if self.has_partial[g]:
                    self._keep_state(state, g)
            elif group.pages == TOKENS:
                for column in range(each.num_published, known // group.block_size):
                    if self.may_be_hit(state, g, column):
                        self._publish_block(state, g, column)
                each.num_published = max(each.num_published, known // group.block_size)

    def may_be_hit(self, state, g, column):
        """Whether some retained hit reads the whole block, or a drafter recomputes it after a hit."""
        group = self.groups[g]
        end = (column + 1) * group.block_size
        if group.keeps_all:
            return True
        redone = {group.block_size, self.hash_size if self.has_partial[g] else group.block_size}
        if group.drafts and any(self.is_retained(state, g, end - each) for each in redone):
            return True
        most = end + max(self.max_model_len, self.unit, self.retention_interval or 0)
        first = next((n for n in range(end, most + 1) if self.is_retained(state, g, n)), None)
        return first is not None and group.reads_from(first) < end

    def may_hit_part(self, state, g, num_tokens):
        """Whether some retained hit ends inside a block after these tokens, or a drafter recomputes
        them.
        """
        group = self.groups[g]
        if self.retention_interval is None or not group.sparse:
            return True
        ends = [num_tokens] + [num_tokens - self.hash_size] * group.drafts
        return any(self.is_retained(state, g, n) for n in ends)

    def _publish_block(self, state, g, column):
        self._publish_page(state, g, column, state.held[g].blocks[column])

    def _publish_page(self, state, g, column, block):
        if not block:
            return
        prefix = tuple(state.request.tokens[: (column + 1) * self.groups[g].block_size])
        self._publish_content(block, g, prefix)
        self._note_published(state, block, g, prefix)

    def _publish_content(self, block, g, prefix):
        self.pool.publish(block, g, prefix)
        if self.host and self.host_write == "through":
            self._write_later(block)

    def _write_later(self, block):
        if block not in self.pending_writes + self.writing:
            self.pending_writes.append(block)

    def _publish_partials(self, state, g, known):
        each, size = state.held[g], self.groups[g].block_size
        for i in range(each.num_partial, known // self.hash_size):
            end = (i + 1) * self.hash_size
            block = each.blocks[(end - 1) // size]
            if end % size == 0 or not block or not self.may_hit_part(state, g, end):
                continue
            prefix = tuple(state.request.tokens[:end])
            self.pool.publish_partial(block, g, prefix)
            self._note_published(state, block, g, prefix)
        each.num_partial = max(each.num_partial, known // self.hash_size)

    def _publish_state(self, state, g, num_tokens, page):
        if not state.request.writes or state.stale or not self.caching:
            return
        each, size = state.held[g], self.groups[g].block_size
        if num_tokens % size:
            each.num_published = max(each.num_published, num_tokens // size)
        elif num_tokens // size > each.num_published and num_tokens <= len(state.request.tokens):
            if self.may_be_hit(state, g, num_tokens // size - 1):
                self._publish_page(state, g, num_tokens // size - 1, page)
            each.num_published = num_tokens // size

    def _keep_state(self, state, g):
        """Keep a state inside a block if a step of the prompt ended at a hash boundary."""
        each, n = state.held[g], state.num_computed
        if state.drafts or n // self.hash_size <= each.num_partial:
            return
        each.num_partial = n // self.hash_size
        if n % self.hash_size or n % self.groups[g].block_size == 0 or n > state.num_prompt:
            return
        if not self.may_hit_part(state, g, n):
            return
        prefix = tuple(state.request.tokens[:n])
        if not self.pool.find(g, prefix, partial=True):
            page = each.blocks[each.num_dropped]
            self.pool.publish_partial(page, g, prefix)
            self._note_published(state, page, g, prefix)
            each.keeps_state = True

    def _note_published(self, state, block, g, prefix):
        if self.in_flight and state.by_step:
            entry = (state.admission, block, g, prefix, self.pool.generation[block])
            self.in_flight[-1]["published"].append(entry)

    def _note_dropped(self, state, g, column, block, first_token=None):
        if self.in_flight and state.by_step:
            if first_token is None:
                first_token = self._first_token(state, g, column)
            entry = (state.admission, first_token, block, state.request)
            self.in_flight[-1]["dropped"].append(entry)

    def _first_token(self, state, g, column):
        """Return the first token of the row that is invalid if this block's content is invalid."""
        group = self.groups[g]
        if group.pages == ENCODER:
            return 0
        # The next step reads the state, which every step since the page was allocated has updated.
        if group.pages == STATE:
            return min(state.held[g].state_start, state.num_computed - 1)
        return column * group.block_size

    # Withdrawing -----------------------------------------------------------------------------------

    def abort(self, step_id):
        if step_id not in [step["id"] for step in self.in_flight]:
            return {}  # already aborted
        alive = {state.admission: row for row, state in self.rows.items()}
        invalid, limits, published, dropped, left = {}, {}, [], [], []
        for step in [each for each in reversed(self.in_flight) if each["id"] >= step_id]:
            published += step["published"]
            dropped += step["dropped"]
            left += step["left"]
            for row, admission, safe_start in step["rows"]:
                if alive.get(admission) != row:
                    continue
                limits[row] = min(limits.get(row, FOREVER), safe_start)
                self.rows[row].was_aborted |= self.rows[row].receiving
                self.rows[row].resend |= self.rows[row].by_step
            for row, admission in step["swapped"]:
                if alive.get(admission) == row:
                    limits[row] = 0
            for page in step["written"]:
                self.host.evict(page)
            for row in step["clear"]:
                if row in self.rows and self.rows[row].by_step:
                    self.rows[row].resend = True
                else:
                    self.to_clear.add(row)
        for admission, block, g, prefix, generation in published:
            if generation != self.pool.generation[block]:
                continue  # the block has been reallocated
            right, size = 0, self.groups[g].block_size
            if admission in alive:
                start = (len(prefix) - 1) // size * size
                limit = limits.get(alive[admission], FOREVER)
                if start + size <= limit:
                    continue
                right = max(limit, start)
            invalid[block] = min(invalid.get(block, right), right)
            # Prefix lookups no longer find the block, but the requests that released it must still
            # be considered.
            if self.groups[g].pages != STATE:
                first = (len(prefix) - 1) // size * size
                dropped += [(of, first, block, who) for of, who in left if of == admission]
        self.in_flight = [each for each in self.in_flight if each["id"] < step_id]
        if self.in_flight:  # a step still in flight may have computed the block
            self.in_flight[-1]["published"] += published
            self.in_flight[-1]["dropped"] += dropped
            self.in_flight[-1]["left"] += left
        self.last_issued = min(self.last_issued, step_id - 1)
        self.fences = [(min(id_, self.last_issued), blocks) for id_, blocks in self.fences]
        self._end_loads(lambda load: load["step"] > self.last_issued, arrived=False)
        self._lift_fences()
        return self._withdraw(invalid, limits, None, set())

    def invalidate(self, blocks, pages=()):
        invalid, limits, prefixes = dict.fromkeys(blocks, 0), {}, {}
        invalid_pages, self.invalid_roots = set(pages), set()
        for load in self.loads:
            if load["device"] in blocks or load["host"] in invalid_pages:
                invalid_pages.add(load["host"])
                invalid[load["device"]] = 0
        blocks = list(invalid)
        alive = {state.admission: row for row, state in self.rows.items()}
        for step in self.in_flight:
            for admission, first_token, block, request in step["dropped"]:
                if block not in blocks:
                    continue
                row = alive.get(admission)
                if row is not None:
                    limits[row] = min(limits.get(row, FOREVER), first_token)
                self._add_used(request, first_token, invalid, prefixes)
        for block in blocks:
            g, whole, partial = self.pool.content.get(block, (0, None, []))
            for prefix in [*partial, *([whole] if whole else [])]:
                self._add_prefix(prefixes, prefix, 0, self.groups[g].block_size)
        for page in invalid_pages:
            g, whole, _ = self.host.content.get(page, (0, None, []))
            if whole:
                self._add_prefix(prefixes, whole, 0, self.groups[g].block_size)
        return self._withdraw(invalid, limits, prefixes, invalid_pages)

    def _add_used(self, request, first_token, invalid, prefixes):
        """Add the prefixes that a row holding the block may have computed from this token on."""
        if not self.caching:
            return
        num_hashed = len(request.tokens) // self.hash_size * self.hash_size
        for g, group in enumerate(self.groups):
            size = group.block_size
            if group.pages != ENCODER and first_token // size * size < num_hashed:
                self.invalid_roots.add(tuple(request.tokens[: self.hash_size]))
            first = first_token // self.hash_size * self.hash_size + self.hash_size
            for end in range(first, len(request.tokens) + 1, self.hash_size):
                prefix = tuple(request.tokens[:end])
                right = max(first_token, (end - 1) // size * size)
                found = self.find(g, prefix, with_host=True) if end % size == 0 else 0
                if found > 0:
                    invalid[found] = min(invalid.get(found, right), right)
                if group.pages != ENCODER and (found or self.has_partial[g]):
                    self._add_prefix(prefixes, prefix, right, size)

    def _withdraw(self, invalid, limits, prefixes, invalid_pages):
        """Withdraw invalid content. Return the rows that lose tokens and where each continues.

        `invalid`: block -> number of valid tokens of its prefix. `prefixes`: invalid content ->
        (number of valid tokens, block size). Every row whose tokens start with the content is
        affected, whichever blocks it holds. If `prefixes` is None, only blocks are compared.
        """
        before = None
        while before != (invalid, limits, prefixes):
            before = dict(invalid), dict(limits), None if prefixes is None else dict(prefixes)
            for row, state in self.rows.items():
                limit = min(
                    limits.get(row, FOREVER), self._limit_of(state, invalid, prefixes or {})
                )
                if state.on_host and any(invalid_pages & set(each.blocks) for each in state.held):
                    limit = 0
                if limit >= state.num_computed:
                    continue
                known = len(state.request.tokens)
                certain = state.start - state.undecided_before
                if limit > certain and known <= state.num_computed:
                    # The tokens after the known ones may be drafts, including the last position.
                    limit = max(certain, min(limit, known - 1))
                limits[row] = limit = self._own_limit(state, limit)
                self._add_computed(state, limit, invalid, prefixes)
        if prefixes is None:
            for block in sorted(invalid):
                self.pool.evict(block)
        else:
            self._evict_derived(invalid, prefixes, invalid_pages)
        affected, restart = {}, []
        for row in sorted(limits):
            state, limit = self.rows.get(row), limits[row]
            if state is None or limit >= state.num_computed:
                continue
            if state.receiving:  # the row keeps its blocks until the senders have finished writing
                state.num_valid = min(state.num_valid, limit)
                continue
            state.resend |= state.by_step
            if not state.on_host and self._can_resume(state, limit):
                self._truncate(state, limit)
            else:
                self._let_go(state)
                restart.append(row)
            affected[row] = limit
        for row in restart:
            affected[row] = self._restart(self.rows[row], self.rows[row].num_computed)
        return affected

    @staticmethod
    def _add_prefix(prefixes, prefix, num_right, block_size):
        right, size = prefixes.get(prefix, (num_right, block_size))
        prefixes[prefix] = min(right, num_right), max(size, block_size)

    def _limit_of(self, state, invalid, prefixes):
        limit = FOREVER
        for g, each in enumerate(state.held):
            for column, block in enumerate(each.blocks):
                if block and block in invalid and not state.on_host:
                    limit = min(limit, max(invalid[block], self._first_token(state, g, column)))
        tokens = state.request.tokens
        for prefix, (right, size) in prefixes.items():
            if self.caching and tuple(tokens[: len(prefix)]) == prefix:
                limit = min(limit, max(right, (len(prefix) - self.hash_size) // size * size))
        return limit

    def _own_limit(self, state, limit):
        """Lower `limit` so that the row continues inside a block only if it computed that block."""
        before = None
        while before != limit:
            before = limit
            for group, each in zip(self.groups, state.held):
                if group.pages == TOKENS and limit // group.block_size < each.num_hits:
                    limit -= limit % group.block_size
        return limit

    def _add_computed(self, state, limit, invalid, prefixes):
        for g, (group, each) in enumerate(zip(self.groups, state.held)):
            size = group.block_size
            for column, block in enumerate(each.blocks):
                block = 0 if state.on_host else block
                start, end = column * size, (column + 1) * size
                if group.pages == CIRCULAR and start < state.num_computed:
                    if block:
                        invalid[block] = min(invalid.get(block, limit), limit)
                    elif prefixes is not None and self.caching:
                        root = tuple(state.request.tokens[: self.hash_size])
                        self.invalid_roots |= {root} if len(root) == self.hash_size else set()
                if group.pages == CIRCULAR:
                    continue
                is_own = column >= each.num_hits and group.pages != ENCODER
                right = max(limit, start)
                if not is_own or end <= limit or start >= state.num_computed:
                    continue
                if block:
                    invalid[block] = min(invalid.get(block, right), right)
                if prefixes is None or not self.caching:
                    continue
                _, whole, partial = self.pool.content.get(block, (0, None, []))
                if not block and len(state.request.tokens) >= self.hash_size:
                    self.invalid_roots.add(tuple(state.request.tokens[: self.hash_size]))
                for n in range(right // self.hash_size + 1, end // self.hash_size + 1):
                    n *= self.hash_size
                    prefix = tuple(state.request.tokens[:n])
                    if len(prefix) < n:
                        continue
                    if block:
                        is_invalid = prefix in [whole, *partial]
                        # The state may also be in a page that the row has released.
                        if group.pages == STATE and self.has_partial[g]:
                            is_invalid |= n < end and n <= state.num_computed
                    else:  # a dropped block: a full one counts if it is found, a partial one always
                        found = self.find(g, prefix, with_host=True) if n == end else 0
                        if found > 0:
                            invalid[found] = min(invalid.get(found, right), right)
                        is_invalid = found or self.has_partial[g]
                    if is_invalid:
                        self._add_prefix(prefixes, prefix, right, size)

    def _evict_derived(self, invalid, prefixes, invalid_pages):
        """Evict cached blocks and pages with invalid content, or content that may derive from it."""
        pools = [(self.pool, invalid)]
        if self.host:
            for prefix in prefixes:
                pages = [self.host.find(g, prefix) for g in range(len(self.groups))]
                invalid_pages |= {page for page in pages if page}
            pools.append((self.host, invalid_pages))
        invalid_blocks = [(pool, b) for pool, blocks in pools for b in blocks if b in pool.content]
        roots = {pool.any_prefix(block)[: self.hash_size] for pool, block in invalid_blocks}
        roots |= self.invalid_roots
        invalid_prefixes = {pool.content[block][1] for pool, block in invalid_blocks}
        for pool, _ in pools:
            found = [b for b in pool.content if pool.any_prefix(b)[: self.hash_size] in roots]
            if self.is_uniform:
                found = [
                    block
                    for block in found
                    if not self._is_untouched(pool, block, invalid_prefixes)
                ]
            for block in sorted(found):
                pool.evict(block)

    def _is_untouched(self, pool, block, invalid_prefixes):
        """Whether all blocks that this one derives from are still cached and valid."""
        g, prefix, _ = pool.content[block]
        ends = range(self.hash_size, len(prefix) + 1, self.hash_size)
        return all(pool.find(g, prefix[:n]) and prefix[:n] not in invalid_prefixes for n in ends)

    def _can_resume(self, state, num_tokens):
        """Whether the row's blocks contain the KV that the next token reads and the slot that it
        writes.
        """
        if num_tokens == 0:
            return False
        for g, (group, each) in enumerate(zip(self.groups, state.held)):
            size, first = group.block_size, group.reads_from(num_tokens)
            if group.pages == STATE:
                return False
            if group.pages == CIRCULAR and each.num_slots - first > self.columns[g] * size:
                return False
            needed = each.blocks[first // size : ceil_div(num_tokens, size)]
            if group.pages == TOKENS and group.cached and num_tokens < state.hit_end:
                brought = group.reads_from(state.hit_end)
            else:
                brought = 0
            if any(i < brought for i in range(first, num_tokens)):
                return False  # the hit did not provide these tokens, even if their block is held
            is_any = num_tokens % size or first < num_tokens
            if group.pages == TOKENS and is_any and not all(needed):
                return False
        return True

    def _truncate(self, state, num_tokens):
        for group, each in zip(self.groups, state.held):
            if group.pages == ENCODER:
                continue
            kept = ceil_div(num_tokens, group.block_size)
            tail = [block for block in reversed(each.blocks[kept:]) if block]
            self._release(tail, self.last_issued)
            del each.blocks[kept:]
            each.num_published = min(each.num_published, num_tokens // group.block_size)
            each.num_partial = min(each.num_partial, num_tokens // self.hash_size)
            each.num_hits = min(each.num_hits, kept)
        state.num_computed = state.start = num_tokens
        state.undecided_before = 0
        state.hit_end = min(state.hit_end, num_tokens)

    def _restart(self, state, num_had):
        self._note_had(state.request, num_had)
        num_hit = self.hit_length(state.request, reads=state.reads)
        held = self.hit_blocks(state.request, num_hit)
        for g, group in enumerate(self.groups):
            if group.pages == ENCODER:
                held[g] = state.held[g]
                continue
            for block in held[g].blocks:
                if block:
                    self.pool.retain(block)
        state.held = held
        state.on_host = state.on_host and state.request.num_encoder_tokens > 0
        state.forked = False
        state.drafts = state.undecided_before = 0
        state.num_computed = state.start = state.hit_end = num_hit
        state.stale = False
        if state.reads:
            self._count_hit(state.request, num_hit, num_hit)
        return num_hit
