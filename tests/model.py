"""A plain model of the allocator: lists, dictionaries and loops, no cleverness, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

SERVED, WAIT, NEVER = 0, 1, 2


@dataclass
class ModelRequest:
    tokens: list[int]
    reads: bool = True
    writes: bool = True


@dataclass
class ModelRow:
    request: ModelRequest
    by_step: bool
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0


@dataclass
class Answer:
    rows: list[int] = field(default_factory=list)
    status: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    clear: set[int] = field(default_factory=set)


class ModelManager:
    def __init__(self, num_blocks, block_size, max_model_len, max_num_reqs, num_preallocate_tokens):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_reqs = max_num_reqs
        self.num_preallocate_tokens = num_preallocate_tokens
        self.rows: dict[int, ModelRow] = {}
        self.to_clear: set[int] = set()
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.uncached_free = list(range(1, num_blocks))
        self.cached_free: list[int] = []
        self.prefixes: dict[int, tuple] = {}  # block -> all tokens up to its end
        self.published: list[int] = []  # oldest first
        self.query_tokens = self.hit_tokens = 0

    def num_free(self):
        return len(self.uncached_free) + len(self.cached_free)

    def num_cached(self):
        return len(self.prefixes)

    def step(self, rows, counts, requests, limits, lookahead):
        answer = Answer(clear=self.to_clear)
        self.to_clear = set()
        served = []
        for row, count in zip(rows, counts):
            state = self.rows[row]
            answer.rows.append(row)
            answer.computed.append(state.num_computed)
            status = self._serve(state, count, lookahead)
            answer.status.append(status)
            if status == SERVED:
                served.append(state)
        for request, limit in zip(requests, limits):
            hits = self.lookup(request)
            computed = len(hits) * self.block_size
            after = min(computed + limit, len(request.tokens))
            status, row = self._admit(request, hits, after, lookahead, by_step=True)
            answer.status.append(status)
            answer.computed.append(computed)
            answer.rows.append(row)
            if status == SERVED:
                answer.clear.add(row)
                served.append(self.rows[row])
        for state in served:
            self._publish(state)
        return answer

    def allocate(self, request, count, hits, lookahead):
        """The row and its blocks behind the hits, or None."""
        after = len(hits) * self.block_size + count
        status, row = self._admit(request, hits, after, lookahead, by_step=False)
        if status != SERVED:
            return None
        self._publish(self.rows[row])
        return row, self.rows[row].blocks[len(hits) :]

    def append(self, row, count, lookahead):
        state = self.rows[row]
        held = len(state.blocks)
        if self._serve(state, count, lookahead) != SERVED:
            return None
        self._publish(state)
        return state.blocks[held:]

    def free(self, row):
        state = self.rows.pop(row)
        self._publish(state)
        for block in reversed(state.blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                (self.cached_free if block in self.prefixes else self.uncached_free).append(block)
        if state.by_step:
            self.to_clear.add(row)

    def reset(self):
        if any(self.refs.values()):
            return False
        self.uncached_free += self.cached_free
        self.cached_free = []
        self.prefixes = {}
        self.published = []
        return True

    def lookup(self, request):
        hits = []
        tokens, size = request.tokens, self.block_size
        while request.reads and (len(hits) + 1) * size <= len(tokens) - 1:
            prefix = tuple(tokens[: (len(hits) + 1) * size])
            found = [block for block in self.published if self.prefixes[block] == prefix]
            if not found:
                break
            hits.append(found[0])
        return hits

    def _admit(self, request, hits, after, lookahead, by_step):
        free = self.num_free() - sum(self.refs[block] == 0 for block in hits)
        status, num_new = self._need(len(hits), after, len(request.tokens), lookahead, free)
        unused = [row for row in range(self.max_num_reqs) if row not in self.rows]
        if status == SERVED and not unused:
            status = WAIT
        if status != SERVED:
            return status, -1
        for block in hits:
            if self.refs[block] == 0:
                self.cached_free.remove(block)
            self.refs[block] += 1
        state = ModelRow(request, by_step, list(hits), after, len(hits))
        self.rows[unused[0]] = state
        self._take(state, num_new)
        if request.reads:
            self.query_tokens += len(request.tokens)
            self.hit_tokens += len(hits) * self.block_size
        return status, unused[0]

    def _serve(self, state, count, lookahead):
        after = state.num_computed + count
        status, num_new = self._need(len(state.blocks), after, after, lookahead, self.num_free())
        if status == SERVED:
            self._take(state, num_new)
            state.num_computed = after
        return status

    def _need(self, held, after, ever, lookahead, free):
        """Whether it fits, and how many blocks to take, with preallocation."""

        def blocks_for(num_tokens):
            return -(-num_tokens // self.block_size)

        most = blocks_for(self.max_model_len)
        need = min(blocks_for(after + lookahead), most)
        if max(need, blocks_for(ever)) > self.num_blocks - 1:
            return NEVER, 0
        num_new = max(need - held, 0)
        if num_new > free:
            return WAIT, 0
        extra = blocks_for(self.num_preallocate_tokens) if num_new else 0
        while extra and (num_new + extra > free or held + num_new + extra > most):
            extra -= 1
        return SERVED, num_new + extra

    def _take(self, state, num_new):
        for _ in range(num_new):
            block = (self.uncached_free or self.cached_free).pop(0)
            if block in self.prefixes:
                del self.prefixes[block]
                self.published.remove(block)
            self.refs[block] = 1
            state.blocks.append(block)

    def _publish(self, state):
        tokens = state.request.tokens
        if not state.request.writes:
            return
        full = min(state.num_computed, len(tokens)) // self.block_size
        for i in range(state.num_published, full):
            block = state.blocks[i]
            self.prefixes[block] = tuple(tokens[: (i + 1) * self.block_size])
            self.published.append(block)
        state.num_published = max(state.num_published, full)
