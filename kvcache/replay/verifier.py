"""Verification: real storage behind the replayed manager, every token's KV checked by its content.

The KV of a token is a fixed mix of its content key, so whatever a request reads is known
beforehand: a hit on the wrong block, a wrong slot or a block handed out while still held shows up
as a difference.
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
            kv = self._expected(request, start, stop)
            for layer in range(self._num_layers):
                self.storage.write(layer, kv[2 * layer], kv[2 * layer + 1], slots)

    def check(self, request: WorkloadRequest, row: int) -> tuple[int, Mismatch | None]:
        """Reads the KV of all tokens back: number of wrong tokens, and the first of them."""
        count, first = 0, None
        for start, stop in self._chunks(0, request.num_tokens):
            slots = self._slots(row, start, stop)
            wrong = self._wrong_tokens(self._expected(request, start, stop), slots)
            if len(wrong) and first is None:
                token = start + int(wrong[0])
                block_id = int(slots[wrong[0]]) // self.block_size
                first = Mismatch(request.index, token, token // self.block_size, block_id)
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

    def _expected(self, request: WorkloadRequest, start: int, stop: int) -> torch.Tensor:
        """int32[2 * layers, n, heads, head_size] on the device: K and V of each layer in turn."""
        kv = kv_of_content(request.content[start:stop], self._factors)
        kv = torch.from_numpy(kv).to(self.storage.device)
        return kv.view(len(self._factors), stop - start, *self._kv_shape)

    def _wrong_tokens(self, expected: torch.Tensor, slots: torch.Tensor) -> np.ndarray:
        wrong = np.zeros(len(slots), bool)
        for layer in range(self._num_layers):
            for i, found in enumerate(self.storage.gather(layer, slots)):
                if not torch.equal(found, expected[2 * layer + i]):
                    differs = (found != expected[2 * layer + i]).flatten(1).any(1)
                    wrong |= differs.cpu().numpy()
        return np.flatnonzero(wrong)


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
