"""A plain model of the allocator: lists, dictionaries and loops, no cleverness, no arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

SERVED, WAIT, NEVER = 0, 1, 2


@dataclass
class ModelRow:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_published: int = 0


@dataclass
class Answer:
    rows: list[int] = field(default_factory=list)
    status: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)


class ModelManager:
    def __init__(self, num_blocks, block_size, max_model_len, max_num_reqs):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_reqs = max_num_reqs
        self.rows: dict[int, ModelRow] = {}
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.uncached_free = list(range(1, num_blocks))
        self.cached_free: list[int] = []
        self.prefixes: dict[int, tuple] = {}  # block -> all tokens up to its end
        self.published: list[int] = []  # oldest first

    def num_free(self):
        return len(self.uncached_free) + len(self.cached_free)

    def num_cached(self):
        return len(self.prefixes)

    def step(self, rows, counts, prompts, limits, lookahead):
        answer = Answer()
        served = []
        for row, count in zip(rows, counts):
            state = self.rows[row]
            answer.rows.append(row)
            answer.computed.append(state.num_computed)
            after = state.num_computed + count
            status = self._fits(len(state.blocks), after, after, lookahead, self.num_free())
            answer.status.append(status)
            if status == SERVED:
                self._grow(state, after, lookahead)
                served.append(state)
        for tokens, limit in zip(prompts, limits):
            hits = self._lookup(tokens)
            computed = len(hits) * self.block_size
            after = min(computed + limit, len(tokens))
            free = self.num_free() - sum(self.refs[block] == 0 for block in hits)
            status = self._fits(len(hits), after, len(tokens), lookahead, free)
            unused = [row for row in range(self.max_num_reqs) if row not in self.rows]
            if status == SERVED and not unused:
                status = WAIT
            answer.status.append(status)
            answer.computed.append(computed)
            answer.rows.append(unused[0] if status == SERVED else -1)
            if status != SERVED:
                continue
            for block in hits:
                if self.refs[block] == 0:
                    self.cached_free.remove(block)
                self.refs[block] += 1
            state = ModelRow(list(tokens), list(hits), 0, len(hits))
            self.rows[unused[0]] = state
            self._grow(state, after, lookahead)
            served.append(state)
        for state in served:
            self._publish(state)
        return answer

    def free(self, row):
        for block in reversed(self.rows.pop(row).blocks):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                (self.cached_free if block in self.prefixes else self.uncached_free).append(block)

    def reset(self):
        if any(self.refs.values()):
            return False
        self.uncached_free += self.cached_free
        self.cached_free = []
        self.prefixes = {}
        self.published = []
        return True

    def _blocks_for(self, num_tokens):
        most = -(-self.max_model_len // self.block_size)
        return min(-(-num_tokens // self.block_size), most)

    def _fits(self, held, after, ever, lookahead, free):
        need = self._blocks_for(after + lookahead)
        if max(need, -(-ever // self.block_size)) > self.num_blocks - 1:
            return NEVER
        return SERVED if need - held <= free else WAIT

    def _grow(self, state, after, lookahead):
        while len(state.blocks) < self._blocks_for(after + lookahead):
            block = (self.uncached_free or self.cached_free).pop(0)
            if block in self.prefixes:
                del self.prefixes[block]
                self.published.remove(block)
            self.refs[block] = 1
            state.blocks.append(block)
        state.num_computed = after

    def _lookup(self, tokens):
        hits = []
        while (len(hits) + 1) * self.block_size <= len(tokens) - 1:
            prefix = tuple(tokens[: (len(hits) + 1) * self.block_size])
            found = [block for block in self.published if self.prefixes[block] == prefix]
            if not found:
                break
            hits.append(found[0])
        return hits

    def _publish(self, state):
        full = min(state.num_computed, len(state.tokens)) // self.block_size
        for i in range(state.num_published, full):
            block = state.blocks[i]
            self.prefixes[block] = tuple(state.tokens[: (i + 1) * self.block_size])
            self.published.append(block)
        state.num_published = max(state.num_published, full)
