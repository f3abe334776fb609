"""Verification: real storage behind the replayed manager, every token's KV checked by its content.

The KV of a token is a fixed mix of its content key, so whatever a request reads is known
beforehand: a hit on the wrong block, a wrong slot or a block handed out while still held shows up
as a difference. It is read along two paths. Through block table and slot mapping, as it was written;
and from the very place where the manager's blocks say it is, by plain indexing: what writing and
reading get wrong alike, only the second path can see.
"""

from __future__ import annotations

import os

import numpy as np
import torch

from kvcache.plan import StepPlan
from kvcache.replay.content import feature_factors, kv_of_content
from kvcache.replay.report import Mismatch
from kvcache.replay.workload import WorkloadRequest
from kvcache.worker import BlockTable, KVStorage, Worker


class KVVerifier:
    """Storage and block table behind a manager; writes each request's new KV and reads all of it.

    `num_blocks` counts the null block. `chunk_tokens` bounds the working memory, not the length of
    a request: 4,096 to 131,072 were equally fast within noise on the development machine. Raises
    MemoryError when the device has no room.
    """

    def __init__(
        self,
        *,
        block_size: int,
        num_blocks: int,
        max_num_reqs: int = 1,
        device: str = "cpu",
        num_kv_heads: int = 2,
        head_size: int = 2,
        num_layers: int = 1,
        layout: str = "NHD",
        chunk_tokens: int = 16_384,
    ) -> None:
        self.block_size = block_size
        self.chunk_tokens = chunk_tokens
        self._kv_shape = (num_kv_heads, head_size)
        self._num_layers = num_layers
        features = num_kv_heads * head_size
        self._factors = feature_factors(2 * num_layers * features).reshape(-1, features)
        num_slots = num_blocks * block_size
        _check_memory(
            4 * (2 * num_layers * features * num_slots + max_num_reqs * num_blocks), device
        )
        self.storage = KVStorage(
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            num_layers=num_layers,
            dtype=torch.int32,
            device=device,
            layout=layout,
        )
        # A request holds at most every block but the null one: no row can overflow.
        self.table = BlockTable(
            block_size, max_num_reqs, num_blocks - 1, chunk_tokens, False, device, block_size
        )
        self.worker = Worker(self.storage, self.table)

    def apply(self, plan: StepPlan) -> None:
        """Brings the block table to what the plan says; every plan, in order."""
        self.worker.apply(plan)

    def write(self, request: WorkloadRequest, row: int, num_computed_tokens: int) -> None:
        """Writes the KV of the tokens from `num_computed_tokens` on; the others were found."""
        for start, stop in self._chunks(num_computed_tokens, request.num_tokens):
            slots = self._slots(row, start, stop)
            kv = torch.from_numpy(self._expected(request, start, stop)).to(self.storage.device)
            for layer in range(self._num_layers):
                self.storage.write(layer, kv[2 * layer], kv[2 * layer + 1], slots)

    def check(
        self, request: WorkloadRequest, row: int, block_ids: np.ndarray
    ) -> tuple[int, Mismatch | None]:
        """Reads the KV of all tokens back: number of wrong tokens, and the first of them.

        `row` is read through block table and slot mapping, `block_ids` int32[k], the manager's, by
        position alone. A token is right when both give exactly its K and V.
        """
        count, first, layers = 0, None, range(self._num_layers)
        for start, stop in self._chunks(0, request.num_tokens):
            expected = self._expected(request, start, stop)
            columns, offsets = np.divmod(np.arange(start, stop), self.block_size)
            slots = self._slots(row, start, stop)
            blocks = block_ids[columns].astype(np.int64)
            mapped = self._wrong(expected, [x for i in layers for x in self._gather(i, slots)])
            placed = self._wrong(
                expected, [x for i in layers for x in self._read(i, blocks, offsets)]
            )
            wrong = np.flatnonzero(mapped | placed)
            if len(wrong) and first is None:
                at = int(wrong[0])
                block_id = int(slots[at]) // self.block_size if mapped[at] else int(blocks[at])
                first = Mismatch(request.index, start + at, int(columns[at]), block_id)
            count += len(wrong)
        return count, first

    def _chunks(self, start: int, stop: int) -> list[tuple[int, int]]:
        starts = range(start, stop, self.chunk_tokens)
        return [(first, min(first + self.chunk_tokens, stop)) for first in starts]

    def _slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        """int64[stop - start] on the device; valid until the next call."""
        n = stop - start
        self.table.compute_slot_mapping(np.full(n, row, np.int32), np.arange(start, stop))
        self.table.commit_slot_mapping(n)
        return self.table.slot_mapping.gpu[:n]

    def _expected(self, request: WorkloadRequest, start: int, stop: int) -> np.ndarray:
        """int32[2 * layers, n, heads, head_size]: K and V of each layer in turn."""
        kv = kv_of_content(request.content[start:stop], self._factors)
        return kv.reshape(len(self._factors), stop - start, *self._kv_shape)

    def _read(self, layer: int, blocks: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
        """Key and value of the tokens at these places, without slot mapping and without our ops."""
        caches = (self.storage.key_cache(layer), self.storage.value_cache(layer))
        if self.storage.device.type == "cpu":
            # Not by torch: where cores are shared, its threads wait milliseconds for each other.
            return [cache.numpy()[blocks, offsets] for cache in caches]
        place = [torch.from_numpy(x).to(self.storage.device) for x in (blocks, offsets)]
        return [cache[tuple(place)].cpu().numpy() for cache in caches]

    def _gather(self, layer: int, slots: torch.Tensor) -> list[np.ndarray]:
        """Key and value of the tokens at these slots, by the op."""
        return [tensor.cpu().numpy() for tensor in self.storage.gather(layer, slots)]

    @staticmethod
    def _wrong(expected: np.ndarray, found: list[np.ndarray]) -> np.ndarray:
        """bool[n]: the tokens of which any layer's K or V, in turn, differs from `expected`."""
        wrong = np.zeros(expected.shape[1], bool)
        for wanted, values in zip(expected, found):
            differs = values != wanted
            if differs.any():
                wrong |= differs.any(axis=(1, 2))
        return wrong


def _check_memory(num_bytes: int, device: str) -> None:
    """Refuses what would not fit instead of letting the system kill the process half-way."""
    if torch.device(device).type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if num_bytes > available:
        raise MemoryError(
            f"verification needs {num_bytes / 2**30:,.1f} GiB on {device}: "
            f"expected at most the {available / 2**30:,.1f} GiB there are"
        )
