# SPDX-License-Identifier: Apache-2.0
"""Baseline implementations that execute one Python step per block, as in serving engines."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from itertools import pairwise

import cbor2


def hash_blocks(token_ids: list[int], block_size: int, seed: str = "vllm-none-hash") -> list[bytes]:
    """Hash blocks one by one, using libraries for SHA-256 and canonical CBOR."""
    parent = hashlib.sha256(cbor2.dumps(seed, canonical=True)).digest()
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        content = [parent, token_ids[start : start + block_size], None]
        parent = hashlib.sha256(cbor2.dumps(content, canonical=True)).digest()
        hashes.append(parent)
    return hashes


class PrefixCache:
    """A block pool with a dict of hashes, an OrderedDict of free blocks, and loops over blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.refs = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}
        self.free_blocks: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    def lookup(self, hashes: list[bytes]) -> list[int]:
        hits = []
        for block_hash in hashes:
            block = self.block_of.get(block_hash)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate(self, hits: list[int], hashes: list[bytes], num_blocks: int) -> list[int] | None:
        num_new = num_blocks - len(hits)
        if num_new > len(self.free_blocks) - sum(self.refs[block] == 0 for block in hits):
            return None
        for block in hits:
            if self.refs[block] == 0:
                del self.free_blocks[block]
            self.refs[block] += 1
        new = []
        for _ in range(num_new):
            block, _ = self.free_blocks.popitem(last=False)
            if self.hash_of[block] is not None:
                del self.block_of[self.hash_of[block]]
                self.hash_of[block] = None
            self.refs[block] = 1
            new.append(block)
        table = hits + new
        for i in range(len(hits), len(hashes)):
            if hashes[i] not in self.block_of:
                self.block_of[hashes[i]] = table[i]
                self.hash_of[table[i]] = hashes[i]
        return table

    def free(self, table: list[int]) -> None:
        for block in reversed(table):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free_blocks[block] = None
                if self.hash_of[block] is None:
                    self.free_blocks.move_to_end(block, last=False)


class PoolBlock:
    """A block object as used in engines, linked into the free queue."""

    __slots__ = ("after", "before", "block_id", "key", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.key: bytes | None = None
        self.before: PoolBlock | None = None
        self.after: PoolBlock | None = None


class FreeQueue:
    """A linked list of the free blocks. The least recently freed block comes first."""

    def __init__(self, blocks: list[PoolBlock]) -> None:
        self.num_free = len(blocks)
        self.head, self.tail = PoolBlock(-1), PoolBlock(-1)
        chain = [self.head, *blocks, self.tail]
        for before, after in pairwise(chain):
            before.after, after.before = after, before

    def pop(self, n: int) -> list[PoolBlock]:
        self.num_free -= n
        popped, block = [], self.head.after
        for _ in range(n):
            popped.append(block)
            after = block.after
            block.before = block.after = None
            block = after
        self.head.after, block.before = block, self.head
        return popped

    def remove(self, block: PoolBlock) -> None:
        block.before.after, block.after.before = block.after, block.before
        block.before = block.after = None
        self.num_free -= 1

    def append(self, blocks: list[PoolBlock]) -> None:
        self.num_free += len(blocks)
        last = self.tail.before
        for block in blocks:
            last.after, block.before = block, last
            last = block
        last.after, self.tail.before = self.tail, last


class BlockObjects:
    """A block pool as used in engines.

    Blocks are objects, which are looked up by hash and cache group.
    """

    def __init__(self, num_blocks: int) -> None:
        blocks = [PoolBlock(i) for i in range(num_blocks)]
        self.queue = FreeQueue(blocks[1:])
        self.cached: dict[bytes, dict[int, PoolBlock]] = {}

    def find(self, block_hash: bytes, group: int) -> PoolBlock | None:
        blocks = self.cached.get(block_hash + group.to_bytes(4, "big"))
        return next(iter(blocks.values())) if blocks else None

    def touch(self, blocks: list[PoolBlock]) -> None:
        for block in blocks:
            if block.ref_count == 0:
                self.queue.remove(block)
            block.ref_count += 1

    def take(self, n: int) -> list[PoolBlock]:
        blocks = self.queue.pop(n)
        for block in blocks:
            self.evict(block)
            block.ref_count += 1
        return blocks

    def evict(self, block: PoolBlock) -> None:
        if block.key is None:
            return
        blocks = self.cached[block.key]
        del blocks[block.block_id]
        if not blocks:
            del self.cached[block.key]
        block.key = None

    def cache(self, blocks: list[PoolBlock], hashes: list[bytes], group: int) -> None:
        for block, block_hash in zip(blocks, hashes):
            block.key = block_hash + group.to_bytes(4, "big")
            self.cached.setdefault(block.key, {})[block.block_id] = block

    def free(self, blocks: list[PoolBlock]) -> None:
        for block in blocks:
            block.ref_count -= 1
        self.queue.append([block for block in blocks if block.ref_count == 0])


class GroupOfRequests:
    """The blocks of each request in one cache group."""

    def __init__(self, pool: BlockObjects, block_size: int, group: int) -> None:
        self.pool, self.block_size, self.group = pool, block_size, group
        self.tables: dict[str, list[PoolBlock]] = {}
        self.num_cached: dict[str, int] = {}

    def find(self, hashes: list[bytes], num_tokens: int) -> list[PoolBlock]:
        hits = []
        for block_hash in hashes[: num_tokens // self.block_size]:
            block = self.pool.find(block_hash, self.group)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_needed(self, request_id: str, num_tokens: int, hits: list[PoolBlock]) -> int:
        num_held = len(self.tables.get(request_id, ())) + len(hits)
        num_free_hits = sum(block.ref_count == 0 for block in hits)
        return -(-num_tokens // self.block_size) - num_held + num_free_hits

    def take_hits(self, request_id: str, hits: list[PoolBlock]) -> None:
        self.pool.touch(hits)
        self.tables.setdefault(request_id, []).extend(hits)
        self.num_cached[request_id] = len(hits)

    def grow(self, request_id: str, num_tokens: int) -> list[PoolBlock]:
        table = self.tables[request_id]
        new = self.pool.take(-(-num_tokens // self.block_size) - len(table))
        table.extend(new)
        return new

    def cache(self, request_id: str, hashes: list[bytes], num_tokens: int) -> None:
        first, stop = self.num_cached[request_id], num_tokens // self.block_size
        self.pool.cache(self.tables[request_id][first:stop], hashes[first:stop], self.group)
        self.num_cached[request_id] = stop

    def free(self, request_id: str) -> None:
        self.pool.free(self.tables.pop(request_id)[::-1])
        del self.num_cached[request_id]


class RequestCache:
    """A request manager as used in engines, with one pool for all groups and one object per block."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockObjects(num_blocks)
        self.groups = [GroupOfRequests(self.pool, block_size, 0)]

    def lookup(self, hashes: list[bytes], num_tokens: int) -> tuple[list[PoolBlock], ...]:
        return tuple(group.find(hashes, num_tokens - 1) for group in self.groups)

    def allocate(
        self,
        request_id: str,
        hashes: list[bytes],
        num_tokens: int,
        hits: tuple[list[PoolBlock], ...],
    ) -> tuple[list[PoolBlock], ...] | None:
        pairs = list(zip(self.groups, hits))
        needed = sum(group.num_needed(request_id, num_tokens, each) for group, each in pairs)
        if needed > self.pool.queue.num_free:
            return None
        for group, each in pairs:
            group.take_hits(request_id, each)
        new = tuple(group.grow(request_id, num_tokens) for group in self.groups)
        for group in self.groups:
            group.cache(request_id, hashes, num_tokens)
        return new

    def free(self, request_id: str) -> None:
        for group in self.groups:
            group.free(request_id)


class Sequence:
    """A running request, as in an engine written in Python."""

    def __init__(self, cache: PrefixCache, token_ids: list[int], block_size: int) -> None:
        self.tokens = token_ids
        self.hashes = hash_blocks(token_ids, block_size)
        self.num_computed = len(token_ids)
        self.table = cache.allocate([], self.hashes, -(-len(token_ids) // block_size))


def decode_step(
    cache: PrefixCache, running: list[Sequence], block_size: int, token_ids: list[int] | None
) -> list[list[int]]:
    """Add one slot per request.

    If tokens are given, also append them, and hash and cache the blocks that they fill.
    """
    new_blocks = []
    for i, sequence in enumerate(running):
        needed = -(-(sequence.num_computed + 1) // block_size) - len(sequence.table)
        new = cache.allocate([], [], needed) if needed > 0 else []
        sequence.table.extend(new)
        new_blocks.append(new)
        sequence.num_computed += 1
        if token_ids is None:
            continue
        sequence.tokens.append(token_ids[i])
        full = len(sequence.tokens) // block_size
        if full > len(sequence.hashes):
            start = (full - 1) * block_size
            content = [sequence.hashes[-1], sequence.tokens[start : start + block_size], None]
            block_hash = hashlib.sha256(cbor2.dumps(content, canonical=True)).digest()
            sequence.hashes.append(block_hash)
            block = sequence.table[full - 1]
            cache.block_of.setdefault(block_hash, block)
            cache.hash_of[block] = block_hash
    return new_blocks


class GroupMember:
    """A sequence, as in an engine's scheduler."""

    def __init__(self, seq_id: int, token_ids: list[int], status: str = "WAITING") -> None:
        self.seq_id = seq_id
        self.token_ids = token_ids
        self.status = status

    def get_len(self) -> int:
        return len(self.token_ids)

    def get_token_ids(self) -> list[int]:
        return self.token_ids


class Group:
    """A sequence group with one sequence."""

    def __init__(self, sequence: GroupMember) -> None:
        self.request_id = str(sequence.seq_id)
        self.sequences = [sequence]

    def get_seqs(self) -> list[GroupMember]:
        return self.sequences

    def is_encoder_decoder(self) -> bool:
        return False


class Block:
    """One entry of a sequence's block table: the block and its tokens."""

    __slots__ = ("block_id", "prev", "token_ids")

    def __init__(self, prev: Block | None, token_ids: list[int], block_id: int) -> None:
        self.prev = prev
        self.token_ids = token_ids
        self.block_id = block_id


class SequenceBlocks:
    """A sequence-group manager as used in engines, with one object and one Python step per block.

    It has the same methods as `BlockSpaceManager`, for the same sequences and groups.
    """

    def __init__(
        self, block_size: int, num_blocks: int, num_host_blocks: int, enable_caching: bool
    ) -> None:
        self.size = block_size
        self.caching = enable_caching
        self.refs = [0] * num_blocks
        self.free_blocks = deque(range(1, num_blocks))
        self.free_pages = deque(range(1, num_host_blocks))
        self.watermark = num_blocks // 100
        self.tables: dict[int, list[Block]] = {}
        self.lengths: dict[int, int] = {}
        self.accesses: dict[int, float] = {}
        self.computed: set[int] = set()
        self.touched: list[int] = []  # blocks used since the last mark

    def _take(self) -> int:
        block_id = self.free_blocks.popleft()
        self.refs[block_id] = 1
        return block_id

    def _release(self, block_id: int) -> None:
        self.refs[block_id] -= 1
        if self.refs[block_id] == 0:
            self.free_blocks.append(block_id)

    def can_allocate(self, group: Group, lookahead: int = 0) -> str:
        sequence = _with_status(group, "WAITING")[0]
        required = -(-(sequence.get_len() + lookahead) // self.size)
        if group.is_encoder_decoder():
            required += -(-group.get_encoder_seq().get_len() // self.size)
        if len(self.refs) - 1 - required < self.watermark:
            return "NEVER"
        return "OK" if len(self.free_blocks) - required >= self.watermark else "LATER"

    def allocate(self, group: Group) -> None:
        sequence = _with_status(group, "WAITING")[0]
        token_ids = sequence.get_token_ids()
        table: list[Block] = []
        for start in range(0, len(token_ids), self.size):
            prev = table[-1] if table else None
            table.append(Block(prev, token_ids[start : start + self.size], self._take()))
        self.tables[sequence.seq_id] = table
        self.lengths[sequence.seq_id] = len(token_ids)
        if self.caching:
            self.touched.extend(block.block_id for block in table)

    def fork(self, parent: GroupMember, child: GroupMember) -> None:
        table: list[Block] = []
        for block in self.tables[parent.seq_id]:
            self.refs[block.block_id] += 1
            prev = table[-1] if table else None
            table.append(Block(prev, [*block.token_ids], block.block_id))
        self.tables[child.seq_id] = table
        self.lengths[child.seq_id] = self.lengths[parent.seq_id]

    def can_append_slots(self, group: Group, lookahead: int) -> bool:
        touched = 0
        for sequence in _with_status(group, "RUNNING"):
            last = self.tables[sequence.seq_id][-1]
            num_empty = self.size - len(last.token_ids)
            num_new = sequence.get_len() - self.lengths[sequence.seq_id] + lookahead
            touched += 1 + -(-max(num_new - num_empty, 0) // self.size)
        return touched <= len(self.free_blocks)

    def append_slots(self, sequence: GroupMember, lookahead: int) -> list[tuple[int, int]]:
        table, pairs = self.tables[sequence.seq_id], []
        unseen = sequence.get_token_ids()[self.lengths[sequence.seq_id] :]
        for token in unseen:
            last = table[-1]
            if len(last.token_ids) == self.size:
                last = Block(last, [], self._take())
                table.append(last)
            elif self.refs[last.block_id] > 1:
                old, last.block_id = last.block_id, self._take()
                self._release(old)
                pairs.append((old, last.block_id))
            last.token_ids.append(token)
            if self.caching:
                self.touched.append(last.block_id)
        self.lengths[sequence.seq_id] += len(unseen)
        return pairs

    def get_block_table(self, sequence: GroupMember) -> list[int]:
        return [block.block_id for block in self.tables[sequence.seq_id]]

    def access_all_blocks_in_seq(self, sequence: GroupMember, now: float) -> None:
        if self.caching:
            self.accesses[sequence.seq_id] = now

    def mark_blocks_as_computed(self, group: Group, num_tokens: int) -> None:
        self.computed.update(self.touched)
        self.touched.clear()

    def get_common_computed_block_ids(self, sequences: list[GroupMember]) -> list[int]:
        common: list[int] = []
        for ids in zip(*map(self.get_block_table, sequences)):
            if len({*ids}) > 1 or ids[0] not in self.computed:
                break
            common.append(ids[0])
        return common

    def free(self, sequence: GroupMember) -> None:
        del self.lengths[sequence.seq_id]
        for block in reversed(self.tables.pop(sequence.seq_id)):
            self._release(block.block_id)

    def _blocks(self, group: Group, status: str) -> list[Block]:
        sequences = _with_status(group, status)
        return [block for each in sequences for block in self.tables[each.seq_id]]

    def swap_out(self, group: Group) -> list[tuple[int, int]]:
        moved: dict[int, int] = {}
        for block in self._blocks(group, "RUNNING"):
            old = block.block_id
            if old not in moved:
                moved[old] = self.free_pages.popleft()
            block.block_id = moved[old]
            self._release(old)
        return [*moved.items()]

    def swap_in(self, group: Group) -> list[tuple[int, int]]:
        moved: dict[int, int] = {}
        for block in self._blocks(group, "SWAPPED"):
            page = block.block_id
            if page in moved:
                self.refs[moved[page]] += 1
            else:
                moved[page] = self._take()
                self.free_pages.append(page)
            block.block_id = moved[page]
        return [*moved.items()]


def _with_status(group: Group, status: str) -> list[GroupMember]:
    return [sequence for sequence in group.get_seqs() if sequence.status == status]
