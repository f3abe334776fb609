# SPDX-License-Identifier: Apache-2.0
"""A reference model of the sequence-group manager, written with lists, dictionaries and loops,
without hashes or arrays.

Content is identified by its tokens. The model predicts the exact block ids of allocations and
evictions.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

OK, LATER, NEVER = "OK", "LATER", "NEVER"


def ceil_div(a, b):
    return -(-a // b)


@dataclass
class ModelUse:
    """The values by which blocks are ranked for eviction."""

    time: float = 0
    release: float = 0  # sequence number of the release, which ranks blocks that were not accessed
    num_prefix_tokens: int = 0
    idle: int = 0
    is_accessed: bool = False

    def rank(self):
        return (self.time, self.release, -self.num_prefix_tokens, self.idle)


class ModelPool:
    """The blocks of one device. `content` maps each cached block to (extra, tokens of the prefix)."""

    def __init__(self, num_blocks, block_size, is_chain):
        self.num_total = max(num_blocks - 1, 0)
        self.block_size = block_size
        self.is_chain = is_chain  # whether a hit on a block requires a hit on its parent
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.uncached_free = list(range(1, num_blocks))
        self.cached_free = []  # cached free blocks, ordered by release
        self.content = {}  # cached blocks, oldest first
        self.use = {block: ModelUse() for block in self.refs}
        self.clock, self.num_idle, self.release_time = 0, 0, 0
        self.least_free = self.num_total

    def num_free(self):
        return len(self.uncached_free) + len(self.cached_free)

    def take(self, count):
        taken = []
        for _ in range(count):
            block = self.uncached_free.pop(0) if self.uncached_free else self._evict()
            assert self.refs[block] == 0
            self.refs[block] = 1
            self.use[block] = ModelUse()
            taken.append(block)
        self.least_free = min(self.least_free, self.num_free())
        return taken

    def _evict(self):
        leaves = [block for block in self.cached_free if not self._is_needed(block)]
        block = min(leaves or self.cached_free[:1], key=lambda b: self.use[b].rank())
        self.cached_free.remove(block)
        del self.content[block]
        return block

    def _is_needed(self, block):
        """Whether the block has a cached child that can only be hit through it."""
        parents = [(extra, tokens[: -self.block_size]) for extra, tokens in self.content.values()]
        twins = [each for each in self.content.values() if each == self.content[block]]
        return self.is_chain and self.content[block] in parents and len(twins) == 1

    def hold(self, blocks):
        for block in blocks:
            if self.refs[block] == 0:
                self.cached_free.remove(block)
            self.refs[block] += 1

    def release(self, blocks):
        for block in blocks:
            self.refs[block] -= 1
            assert self.refs[block] >= 0
            if self.refs[block]:
                continue
            if block not in self.content:
                self.uncached_free.append(block)
                continue
            self.cached_free.append(block)
            self.num_idle += 1
            use = self.use[block]
            use.idle = self.num_idle
            if not use.is_accessed:
                use.time, use.release = self.clock, self.release_time

    def publish(self, block, content):
        assert block not in self.content and self.refs[block]
        self.content[block] = content

    def find(self, content):
        return next((block for block, each in self.content.items() if each == content), 0)

    def access(self, blocks, now):
        self.clock = max(self.clock, now)
        for block in blocks:
            use = self.use[block]
            use.is_accessed, use.time, use.release = True, now, float("-inf")

    def reset(self):
        if any(self.refs.values()):
            return False
        self.uncached_free += self.cached_free
        self.cached_free, self.content = [], {}
        self.use = {block: ModelUse() for block in self.refs}
        return True


@dataclass
class ModelSequence:
    tokens: list[int]  # tokens with slots
    extra: object = None
    caches: bool = False
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)  # 0 in place of blocks that left the window
    num_published: int = 0
    num_marked: int = 0  # total number of tokens marked as computed
    num_kv: int = 0  # number of tokens known to have KV
    num_prompt: int = 0
    skips: bool = False  # whether the prompt's leading blocks were never allocated
    on_host: bool = False

    @property
    def num_dropped(self):
        return next((i for i, block in enumerate(self.blocks) if block), len(self.blocks))

    def tail_first(self):
        return [block for block in reversed(self.blocks) if block]


class ModelSpace:
    """The reference model of the manager. `sequences` may have keys of any type and includes
    cross-attention tables.
    """

    def __init__(
        self, block_size, num_gpu_blocks, num_cpu_blocks, watermark, sliding_window, enable_caching
    ):
        self.size = block_size
        self.window = sliding_window
        self.caching = enable_caching
        self.watermark = int(watermark * num_gpu_blocks)
        self.gpu = ModelPool(num_gpu_blocks, block_size, is_chain=sliding_window is None)
        self.cpu = ModelPool(num_cpu_blocks, block_size, is_chain=False)
        self.sequences: dict[object, ModelSequence] = {}
        self.num_releases = 0
        self.query_blocks = self.hit_blocks = 0

    # Queries ---------------------------------------------------------------------------------------

    def first_read(self, position):
        """Return the column of the first block that the token at this position reads."""
        return 0 if self.window is None else max(position - self.window + 1, 0) // self.size

    def required(self, num_tokens, lookahead, num_encoder_tokens):
        required = ceil_div(num_tokens + lookahead, self.size)
        if self.window is not None:
            required = min(required, self.window // self.size + 2)
        return required + ceil_div(num_encoder_tokens, self.size)

    def can_allocate(self, num_tokens, lookahead, num_encoder_tokens):
        required = self.required(num_tokens, lookahead, num_encoder_tokens)
        if self.gpu.num_total - required < self.watermark:
            return NEVER
        return OK if self.gpu.num_free() - required >= self.watermark else LATER

    def num_touched(self, lengths, lookahead):
        """Return the number of blocks to which the next step writes.

        `lengths` contains the current number of tokens of each sequence.
        """
        touched = set()
        for key, length in lengths.items():
            known = len(self.sequences[key].tokens)
            touched |= {(key, p // self.size) for p in range(known, length + lookahead)}
        return len(touched)

    def can_append(self, lengths, lookahead):
        return self.num_touched(lengths, lookahead) <= self.gpu.num_free()

    def can_swap_out(self, keys):
        return len(self.moving(keys)) <= self.cpu.num_free()

    def can_swap_in(self, keys, lengths, lookahead):
        """Determine the result by executing the swap on copies of the model, first in the current
        state and then with an otherwise empty device.
        """
        if copy.deepcopy(self)._fits_back(keys, lengths, lookahead, self.watermark):
            return OK
        alone = copy.deepcopy(self)
        for key in [key for key, each in self.sequences.items() if not each.on_host]:
            alone.free(key)
        assert alone.gpu.reset()
        return LATER if alone._fits_back(keys, lengths, lookahead, 0) else NEVER

    def _fits_back(self, keys, lengths, lookahead, watermark):
        """Swap in and append. Return whether both fit without ever leaving fewer than `watermark`
        blocks free.
        """
        self.gpu.least_free = self.gpu.num_free()
        if self.swap_in(keys) is None:
            return False
        for key, length in lengths.items():
            new = length - len(self.sequences[key].tokens)
            if self.append(key, [1] * new, lookahead) is None:
                return False
        return self.gpu.least_free >= watermark

    def moving(self, keys):
        """Return the blocks that contain KV of these sequences, without duplicates."""
        found = {}
        for key in keys:
            each = self.sequences[key]
            found.update(dict.fromkeys(filter(None, each.blocks[: self.num_written(each)])))
        return list(found)

    def num_written(self, sequence):
        return min(len(sequence.blocks), ceil_div(len(sequence.tokens), self.size))

    def hit_length(self, tokens, extra):
        """Return the number of tokens in the longest cached prefix that consists of whole blocks
        and is shorter than the prompt.
        """
        for num_blocks in range((len(tokens) - 1) // self.size, 0, -1):
            first = self.first_read(num_blocks * self.size)
            if all(self._cached(tokens, extra, column) for column in range(first, num_blocks)):
                # The sequence will hold all blocks after the hit. With a window, their number is
                # limited.
                num_held = ceil_div(len(tokens), self.size) - first
                fits = self.window is None or num_held <= self.window // self.size + 2
                return num_blocks * self.size if fits else 0
        return 0

    def _cached(self, tokens, extra, column):
        return self.gpu.find((extra, tuple(tokens[: (column + 1) * self.size])))

    # State changes ---------------------------------------------------------------------------------

    def allocate(self, keys, tokens, extra, cross_key, num_encoder_tokens):
        """Allocate a group, and return whether it fits.

        `cross_key` is None for a decoder-only model.
        """
        caches = self.caching and cross_key is None
        required = self.required(len(tokens), 0, num_encoder_tokens)
        if cross_key is not None and required > self.gpu.num_free():
            return False
        num_hit = self.hit_length(tokens, extra) if caches else 0
        sequence = self._admit(tokens, extra, num_hit) or (
            num_hit and self._admit(tokens, extra, 0)
        )
        if not sequence:
            return False
        sequence.caches = caches
        if caches:
            self.query_blocks += len(tokens) // self.size
            self.hit_blocks += sequence.num_cached // self.size
        self.sequences[keys[0]] = sequence
        for key in keys[1:]:
            self.fork(keys[0], key)
        if cross_key is not None:
            blocks = self.gpu.take(ceil_div(num_encoder_tokens, self.size))
            cross = ModelSequence([0] * num_encoder_tokens, blocks=blocks)
            self.sequences[cross_key] = cross
        return True

    def _admit(self, tokens, extra, num_hit):
        num_hit_blocks = num_hit // self.size
        first = self.first_read(num_hit)
        hits = [self._cached(tokens, extra, column) for column in range(first, num_hit_blocks)]
        num_blocks = ceil_div(len(tokens), self.size)
        # A prompt without a hit is computed in one step, so only its last window needs blocks.
        skipped = 0 if num_hit else self.first_read(len(tokens))
        num_new = num_blocks - max(skipped, num_hit_blocks)
        num_free = self.gpu.num_free() - sum(self.gpu.refs[block] == 0 for block in hits)
        if num_new > num_free:
            return None
        self.gpu.hold(hits)
        blocks = [0] * max(first, skipped) + hits + self.gpu.take(num_new)
        sequence = ModelSequence([*tokens], extra, num_cached=num_hit, blocks=blocks)
        sequence.num_published, sequence.num_kv = num_hit_blocks, num_hit
        sequence.num_prompt, sequence.skips = len(tokens), skipped > 0
        return sequence

    def append(self, key, tokens, lookahead):
        """Append tokens. Return the pairs of blocks to copy, or None if the tokens do not fit."""
        if not tokens and not lookahead:
            return []
        each, size = self.sequences[key], self.size
        start = len(each.tokens)
        stop = start + len(tokens) + lookahead
        drop_to = min(self.first_read(start), len(each.blocks))
        left = [block for block in each.blocks[:drop_to] if block]
        written = range(start // size, min(ceil_div(stop, size), len(each.blocks)))
        shared = [column for column in written if self.gpu.refs[each.blocks[column]] > 1]
        num_new = max(ceil_div(stop, size) - len(each.blocks), 0)
        room = self.gpu.num_free() + sum(self.gpu.refs[block] == 1 for block in left)
        if num_new + len(shared) > room:
            return None
        each.blocks[:drop_to] = [0] * drop_to
        self.gpu.release(left[::-1])
        own = self.gpu.take(len(shared) + num_new)
        pairs = []
        for column in shared:
            old, each.blocks[column] = each.blocks[column], own.pop(0)
            self.gpu.release([old])
            if column * size < start:
                pairs.append((old, each.blocks[column]))
        each.blocks += own
        each.tokens += tokens
        return pairs

    def fork(self, parent_key, child_key):
        parent = self.sequences[parent_key]
        child = ModelSequence(**{**vars(parent), "tokens": [*parent.tokens]})
        child.blocks = [*parent.blocks]
        child.num_published = max(parent.num_published, len(parent.tokens) // self.size)
        self.gpu.hold([block for block in child.blocks if block])
        self.sequences[child_key] = child

    def can_mark(self, keys, count):
        """Return True if none of these marks splits a prompt that must be computed in one step."""
        found = [self.sequences[key] for key in keys]
        return not any(
            each.skips and min(each.num_marked + count, len(each.tokens)) < each.num_prompt
            for each in found
        )

    def mark(self, key, count):
        each = self.sequences[key]
        each.num_marked = min(each.num_marked + count, len(each.tokens))
        if not each.caches:
            return
        num_computed = each.num_marked
        # Once the prompt is computed, all tokens except the newest count as computed, regardless of
        # the marks.
        if num_computed >= each.num_prompt:
            num_computed = max(num_computed, len(each.tokens) - 1)
        each.num_kv = max(each.num_kv, num_computed)
        self._publish(each)

    def num_cached_tokens(self, key):
        each = self.sequences[key]
        if not each.caches:
            return 0
        if each.on_host:
            return self.hit_length(each.tokens, each.extra)
        if each.num_marked < each.num_prompt:
            return each.num_cached
        return max(each.num_cached, each.num_kv // self.size * self.size)

    def _publish(self, each):
        for column in range(each.num_published, each.num_kv // self.size):
            if each.blocks[column]:
                content = (each.extra, tuple(each.tokens[: (column + 1) * self.size]))
                self.gpu.publish(each.blocks[column], content)
            each.num_published = column + 1

    def swap_out(self, keys):
        moving = self.moving(keys)
        if len(moving) > self.cpu.num_free():
            return None
        moved = {}
        for key in keys:
            each = self.sequences[key]
            self._notify_release(each)
            left = each.tail_first()
            del each.blocks[max(self.num_written(each), each.num_dropped) :]
            new = [block for block in each.blocks if block and block not in moved]
            moved.update(zip(new, self.cpu.take(len(new))))
            self.cpu.hold([moved[block] for block in each.blocks if block and block not in new])
            each.blocks = [block and moved[block] for block in each.blocks]
            each.on_host = True
            self.gpu.release(left)
        return list(moved.items())

    def swap_in(self, keys):
        # Device blocks have the same content as these host pages, which need not be swapped in.
        twins = self._cached_twins(keys)
        shared = {*twins.values()}
        num_taken = len(self.moving(keys)) - len(twins)
        num_taken += sum(self.gpu.refs[block] == 0 for block in shared)
        if num_taken > self.gpu.num_free():
            return None
        self.gpu.hold(shared)
        moved = dict(twins)
        for key in keys:
            each = self.sequences[key]
            left, own = each.tail_first(), []
            for column in range(each.num_dropped, len(each.blocks)):
                page = each.blocks[column]
                if page in moved:
                    self.gpu.hold([moved[page]])
                else:
                    moved[page] = self.gpu.take(1)[0]
                    own.append(column)
            each.blocks = [page and moved[page] for page in each.blocks]
            each.on_host = False
            # Publish the sequence's own blocks again.
            first = own[0] if own else len(each.blocks)
            is_whole = own == [*range(first, len(each.blocks))]
            num_full = len(each.tokens) // self.size
            each.num_published = min(first, num_full) if is_whole else num_full
            if each.caches:
                self._publish(each)
            self.cpu.release(left)
        self.gpu.release(shared)
        return [(page, block) for page, block in moved.items() if page not in twins]

    def _cached_twins(self, keys):
        """Map the leading host pages with computed tokens to cached device blocks that have the
        same content.
        """
        twins = {}
        for each in [self.sequences[key] for key in keys]:
            if not each.caches:
                continue
            for column in range(each.num_dropped, each.num_kv // self.size):
                block = self._cached(each.tokens, each.extra, column)
                if not block:
                    break
                twins[each.blocks[column]] = block
        return twins

    def free(self, key):
        each = self.sequences.pop(key)
        if each.on_host:
            self.cpu.release(each.tail_first())
        else:
            self._notify_release(each)
            self.gpu.release(each.tail_first())

    def access(self, key, now):
        if self.caching:
            self.gpu.access(self.sequences[key].tail_first(), now)

    def _notify_release(self, sequence):
        self.num_releases += 1
        self.gpu.release_time = self.num_releases
        for column, block in enumerate(sequence.blocks):
            if block:
                self.gpu.use[block].num_prefix_tokens = (column + 1) * self.size
