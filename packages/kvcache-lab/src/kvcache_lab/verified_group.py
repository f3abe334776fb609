# SPDX-License-Identifier: Apache-2.0
"""Verifies one cache group: compares the content of its pages with the expected content.

Content is read in two ways: through the block table and slot mapping, as it was written, and by
indexing the blocks that the manager reports. An error that affects writes and reads alike is
detected only by the second way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.kinds import KindProperties, checked_first_live_token
from kvcache.worker import GroupTable, KVStorage
from kvcache_lab.content import kv_of_content
from kvcache_lab.mismatch import Mismatch
from kvcache_lab.running import Span
from kvcache_lab.workload import WorkloadRequest

NOTHING_WRONG = (0, None)
Found = tuple[int, Mismatch | None]  # number of wrong tokens and the first wrong token


@dataclass
class VerifiedGroup:
    """A group whose pages hold tokens or states.

    Args:
        storage: The group's float32 view of the pages. The content consists of 32-bit integers,
            whose bits are moved unchanged.
        factors: uint64[2 * layers, features], different in each group, so that the content of another
            group is detected as wrong.
        index: Index of the group, reported in a mismatch if there are several groups.
    """

    index: int
    is_alone: bool
    kind: KindProperties
    storage: KVStorage
    table: GroupTable
    factors: np.ndarray
    chunk_tokens: int
    is_cached: bool = True

    def check_arrival(self, span: Span) -> Found:
        """Check the content that the plan had to move for these tokens, before the tokens are written."""
        return NOTHING_WRONG

    def _mismatch(
        self, span: Span, token: int, column: int, block_id: int, is_state: bool | None = None
    ) -> Mismatch:
        group = None if self.is_alone else self.index
        return Mismatch(span.request.index, token, column, block_id, group, is_state)

    def _content(self, request: WorkloadRequest, start: int, stop: int) -> np.ndarray:
        """Return K and V of each layer, interleaved: int32[2 * layers, n, heads, head_size]."""
        kv = kv_of_content(request.content[start:stop], self.factors)
        shape = (self.storage.num_kv_heads, self.storage.token_sizes[0])
        return kv.reshape(len(self.factors), stop - start, *shape)

    def _write(self, content: np.ndarray, slots: torch.Tensor) -> None:
        kv = torch.from_numpy(content).to(self.storage.device).view(torch.float32)
        for layer in range(self.storage.num_layers):
            self.storage.write(layer, kv[2 * layer], kv[2 * layer + 1], slots)

    def _wrong(
        self, expected: np.ndarray, slots: torch.Tensor, blocks: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return two bool[n]: the tokens that differ when read by slot, and those that differ when
        read by block.
        """
        layers = range(self.storage.num_layers)
        mapped = _differing(expected, [x for i in layers for x in self._gather(i, slots)])
        placed = _differing(expected, [x for i in layers for x in self._read(i, blocks, offsets)])
        return mapped, placed

    def _gather(self, layer: int, slots: torch.Tensor) -> list[np.ndarray]:
        """Read K and V of the tokens at these slots with the gather op."""
        return [tensor.cpu().numpy().view(np.int32) for tensor in self.storage.gather(layer, slots)]

    def _read(self, layer: int, blocks: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
        """Read K and V of the tokens at these block offsets, without slot mapping and ops."""
        caches = (self.storage.key_cache(layer), self.storage.value_cache(layer))
        if self.storage.device.type == "cpu":
            # NumPy is used because torch's threads wait milliseconds for each other on shared
            # cores.
            return [cache.numpy()[blocks, offsets].view(np.int32) for cache in caches]
        place = [torch.from_numpy(x).to(self.storage.device) for x in (blocks, offsets)]
        return [cache[tuple(place)].cpu().numpy().view(np.int32) for cache in caches]


class TokenGroup(VerifiedGroup):
    """A group whose pages hold KV.

    Each token reads all tokens from `first_needed_token` up to itself.
    """

    def check_arrival(self, span: Span) -> Found:
        """Check for zeros before the end of a hit.

        Applies if a hit in other groups ends inside a block of this group.
        """
        first = span.num_hit - span.num_hit % self.storage.block_size
        if self.is_cached or span.start != span.num_hit or first == span.num_hit:
            return NOTHING_WRONG
        zeros = np.zeros_like(self._content(span.request, first, span.num_hit))
        return self._compare(span, first, zeros)

    def write(self, span: Span) -> None:
        """Write the KV of the tokens."""
        for first, last in self._chunks(span.start, span.stop):
            slots = self._slots(span.row, first, last)
            self._write(self._content(span.request, first, last), slots)

    def check(self, span: Span) -> Found:
        """Read everything that the tokens attend to, including themselves. Raises KindError."""
        count, found = 0, None
        start = checked_first_live_token(self.kind, span.start, span.stop)
        if not self.is_cached:  # hits of other groups provide no content in this group
            start = max(start, span.num_hit)
        for first, last in self._chunks(start, span.stop):
            number, mismatch = self._compare(span, first, self._content(span.request, first, last))
            count, found = count + number, found or mismatch
        return count, found

    def _compare(self, span: Span, first: int, expected: np.ndarray) -> Found:
        """Read the tokens from `first` on, and compare them with the expected content."""
        last = first + expected.shape[1]
        columns, offsets = np.divmod(np.arange(first, last), self.storage.block_size)
        if self.table.shape.circular:
            columns %= self.table.shape.max_num_blocks
        slots = self._slots(span.row, first, last)
        blocks = span.block_ids[self.index][columns].astype(np.int64)
        mapped, placed = self._wrong(expected, slots, blocks, offsets)
        wrong = np.flatnonzero(mapped | placed)
        if not len(wrong):
            return NOTHING_WRONG
        at = int(wrong[0])
        block_id = int(slots[at]) // self.storage.block_size if mapped[at] else blocks[at]
        return len(wrong), self._mismatch(span, first + at, int(columns[at]), int(block_id))

    def _chunks(self, start: int, stop: int) -> list[tuple[int, int]]:
        starts = range(start, stop, self.chunk_tokens)
        return [(first, min(first + self.chunk_tokens, stop)) for first in starts]

    def _slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """Return int64[stop - start] on the device, valid until the next call."""
        n = stop - start
        self.table.compute_slot_mapping(np.full(n, row, np.int32), np.arange(start, stop))
        self.table.commit_slot_mapping(n)
        return self.table.slot_mapping.gpu[:n]


@dataclass
class FormatGroup(TokenGroup):
    """A group whose pages hold KV in a quantized format (`kvcache.formats`).

    The expected content is what a storage without block tables returns for the same tokens, because
    quantization changes them. It must be near the tokens.
    """

    def __post_init__(self) -> None:
        one = self.storage
        sizes = dict(zip(("head_size", "v_head_size"), one.token_sizes))
        self._plain = KVStorage(
            2,
            self.chunk_tokens,
            one.num_kv_heads,
            **sizes,
            num_layers=one.num_layers,
            device=one.device,
            kv_format=one.kv_format.name,
        )
        self._dtype = torch.bfloat16 if one.kv_format.is_row else torch.float32

    def _content(self, request: WorkloadRequest, start: int, stop: int) -> np.ndarray:
        return (super()._content(request, start, stop) >> 8).astype(np.float32) / 2**20

    def _write(
        self, content: np.ndarray, slots: torch.Tensor, storage: KVStorage | None = None
    ) -> None:
        kv = torch.from_numpy(content).to(self.storage.device, self._dtype)
        for layer in range(self.storage.num_layers):
            value = kv[2 * layer + 1, ..., : self.storage.token_sizes[1]]
            (storage or self.storage).write(layer, kv[2 * layer], value, slots)

    def _wrong(
        self, expected: np.ndarray, slots: torch.Tensor, blocks: np.ndarray, offsets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        plain = self._plain_slots(expected.shape[1])
        self._write(expected, plain, self._plain)
        layers = range(self.storage.num_layers)
        wanted = [x for i in layers for x in self._gather(i, plain, self._plain)]
        mapped = [x for i in layers for x in self._gather(i, slots)]
        placed = [x for i in layers for x in self._read(i, blocks, offsets)]
        is_lost = _far(expected, [each.view(np.float32) for each in wanted])
        return _differing(wanted, mapped) | is_lost, _differing(wanted, placed) | is_lost

    def _gather(
        self, layer: int, slots: torch.Tensor, storage: KVStorage | None = None
    ) -> list[np.ndarray]:
        found = (storage or self.storage).gather(layer, slots, self._dtype)
        return [tensor.float().cpu().numpy().view(np.int32) for tensor in found]

    def _read(self, layer: int, blocks: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
        """Copy the bytes of the tokens at these block offsets, and read the copy."""
        device = self.storage.device
        place = tuple(torch.from_numpy(x).to(device) for x in (blocks, offsets))
        names = ("key_cache", "value_cache", *(["scale_cache"] if self.storage.has_scales else []))
        for name in names:
            source, target = (getattr(x, name)(layer) for x in (self.storage, self._plain))
            source, target = source.view(torch.uint8), target.view(torch.uint8)
            target[1, : len(blocks)] = source[place]
        return self._gather(layer, self._plain_slots(len(blocks)), self._plain)

    def _plain_slots(self, n: int) -> torch.Tensor:
        return torch.arange(self.chunk_tokens, self.chunk_tokens + n, device=self.storage.device)


class StateGroup(VerifiedGroup):
    """A group whose pages hold states. The state after a token depends only on its content key.

    The storage has one token per page with the size of the state, so that block ids can be used as
    slots.
    """

    def check_arrival(self, span: Span) -> Found:
        """Check that the page updated by the step holds the previous state.

        The page must hold zeros if there is no previous state.
        """
        return self._check(span, span.start)

    def write(self, span: Span) -> None:
        """Write the state after the last token of the span."""
        slot = self._slot(span.row, self._column(span.stop))
        self._write(self._content(span.request, span.stop - 1, span.stop), slot)

    def check(self, span: Span) -> Found:
        """Check the state after the last token of the span."""
        return self._check(span, span.stop)

    def _check(self, span: Span, num_tokens: int) -> Found:
        """Check that the last token's page holds the state after `num_tokens` tokens."""
        first, column = max(num_tokens - 1, 0), self._column(span.stop)
        expected = self._content(span.request, first, first + 1)
        if num_tokens == 0:
            expected = np.zeros_like(expected)
        slot = self._slot(span.row, column)
        block = span.block_ids[self.index][column : column + 1].astype(np.int64)
        mapped, placed = self._wrong(expected, slot, block, np.zeros(1, np.int64))
        if not (mapped[0] or placed[0]):
            return NOTHING_WRONG
        block_id = int(slot[0] if mapped[0] else block[0])
        return 1, self._mismatch(span, first, column, block_id, is_state=True)

    def _column(self, num_tokens: int) -> int:
        """Return the column of the block that contains the last of `num_tokens` tokens."""
        return (num_tokens - 1) // self.table.block_size

    def _slot(self, row: int, column: int) -> torch.Tensor:
        return self.table.block_table.gpu[row, column : column + 1].long()


def _differing(expected: Sequence[np.ndarray], found: list[np.ndarray]) -> np.ndarray:
    """Return the tokens whose K or V differs from `expected` in any layer: bool[n]."""
    wrong = np.zeros(len(expected[0]), bool)
    for wanted, values in zip(expected, found):
        differs = values != wanted
        if differs.any():
            wrong |= differs.any(axis=(1, 2))
    return wrong


def _far(tokens: np.ndarray, found: list[np.ndarray]) -> np.ndarray:
    """Return the tokens from which the values of a head differ by more than any format rounds, a
    quarter of its largest magnitude: bool[n].
    """
    is_far = np.zeros(tokens.shape[1], bool)
    for token, values in zip(tokens, found):
        token = token[..., : values.shape[-1]]
        most = np.abs(token).max(axis=-1, keepdims=True, initial=0) / 4
        is_far |= ~(np.abs(values - token) <= most).all(axis=(1, 2))
    return is_far
