# SPDX-License-Identifier: Apache-2.0
"""Baseline implementations that execute one Python step per block, as in serving engines."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque

import cbor2


def hash_blocks(token_ids: list[int], block_size: int, seed: str = "vllm-none-hash") -> list[bytes]:
    """Hash blocks one by one, using libraries for SHA-256 and canonical CBOR."""
    parent = hashlib.sha256(cbor2.dumps(seed, canonical=True)).digest()
    hashes = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    return hashlib.sha256(cbor2.dumps([parent, token_ids, None], canonical=True)).digest()


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
            tokens = sequence.tokens[start : start + block_size]
            block_hash = hash_block(sequence.hashes[-1], tokens)
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
