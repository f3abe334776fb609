# SPDX-License-Identifier: Apache-2.0
"""Replays a sample of a workload with a pool that is scaled down by the same factor.

This method works with any eviction policy (miniature simulation, Waldspurger et al., USENIX
ATC'17). The manager's own pool and policies are used. If all blocks are sampled, the pool receives
the same calls as from a manager that serves one request at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from kvcache.native.load import core
from kvcache_lab.content import mix64
from kvcache_lab.sampling import BlockSample

# Ensures that a policy that samples by hash does not use the hashes of `BlockSampler`.
_SALT = np.uint64(0x5851F42D4C957F2D)


class Miniature:
    """Replays one sample at different pool sizes."""

    def __init__(self, sample: BlockSample) -> None:
        self._sample = sample

    def hit_rate(self, eviction: str, options: Mapping[str, float], num_blocks: int) -> float:
        """Return the token hit rate of a pool of `num_blocks` blocks, without the null block."""
        sample = self._sample
        served = slice(0, num_blocks + 1)  # larger requests are rejected
        num_tokens = int(sample.tokens_of[served].sum())
        if num_tokens == 0:
            return 0.0
        capacity = max(round(num_blocks * sample.rate), 1)
        pool = core.BlockPool(capacity + 1, eviction, dict(options))
        num_hits, num_hittable = core.replay_requests(
            pool, self._requests, self._hashes, self._ends, num_blocks
        )
        # A few blocks account for most uses and are usually hits. If the number of sampled uses
        # differs from the expected number, the difference is corrected as if all of these uses were
        # hits (SHARDS-adj).
        missing = int(sample.hittable_of[served].sum()) - num_hittable / sample.rate
        hit_tokens = (num_hits / sample.rate + missing) * sample.block_size
        return min(max(hit_tokens / num_tokens, 0.0), 1.0)

    @cached_property
    def _hashes(self) -> np.ndarray:
        hashes = np.zeros((len(self._sample.keys), 4), np.uint64)
        hashes[:, 0] = mix64(self._sample.keys ^ _SALT)
        return hashes.view(np.uint8)

    @cached_property
    def _ends(self) -> np.ndarray:
        return (self._sample.columns + 1) * self._sample.block_size

    @cached_property
    def _requests(self) -> np.ndarray:
        """Return int64[r, 9]: the fields of `ReplayedRequest` (csrc/core/pool/pool_replay.h)."""
        sample, size = self._sample, self._sample.block_size
        num, request_of_use = len(sample.num_tokens), sample.request_of_use()
        num_full = np.bincount(request_of_use[sample.is_full()], minlength=num)
        is_hittable = (
            sample.columns < (np.maximum(sample.num_tokens - 1, 0) // size)[request_of_use]
        )
        fields = (
            -(-sample.num_tokens // size),
            sample.starts[:-1],
            np.diff(sample.starts),
            num_full,
            np.bincount(request_of_use[is_hittable], minlength=num),
            sample.num_output_tokens,
            sample.start_ms,
            sample.end_ms,
            self._tokens_per_added_block(num_full),
        )
        return np.ascontiguousarray(np.stack(fields, axis=1).astype(np.int64))

    def _tokens_per_added_block(self, num_full: np.ndarray) -> np.ndarray:
        """Return, for each request, the number of added tokens per added sampled block.

        The number of added sampled blocks times this value is the number of tokens that the whole
        prompt adds to the earlier request that it continues or forks. The average,
        `block_size / rate`, would be wrong for short additions.
        """
        sample, size = self._sample, self._sample.block_size
        if sample.rate >= 1:
            return np.full(len(num_full), size)
        lengths = (sample.num_tokens // size).tolist()
        columns, keys = sample.columns.tolist(), sample.keys.tolist()
        ended: dict[int, int] = {}  # last block of a request -> number of its full blocks
        found = []
        for length, start, num in zip(
            lengths, sample.starts[:-1].tolist(), num_full.tolist(), strict=True
        ):
            stop = known = start + num
            while known > start and keys[known - 1] not in ended:
                known -= 1
            num_known = 0
            if known > start:
                num_known = max(ended[keys[known - 1]], columns[known - 1] + 1)
            num_added = max(length - num_known, 0)
            found.append(max(round(num_added * size / (stop - known)), 1) if stop > known else size)
            ended.update(dict.fromkeys(keys[known:stop], 0))
            if num:
                ended[keys[stop - 1]] = length
        return np.array(found, np.int64)
