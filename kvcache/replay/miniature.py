# SPDX-License-Identifier: Apache-2.0
"""Replays a sample of a workload with a pool that is smaller by the same factor.

For any eviction policy (miniature simulation, Waldspurger et al., USENIX ATC'17). The pool and the policy are
those of the manager. With all blocks sampled, the replay makes the same calls as a manager that serves one
request at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from kvcache.native.load import core
from kvcache.replay.content import mix64
from kvcache.replay.sampling import Sample

_SALT = np.uint64(0x5851F42D4C957F2D)  # the pool must not sample by the hash of the sampler


class _Request(NamedTuple):
    num_blocks: int  # of the whole prompt
    hashes: np.ndarray  # uint8[k, 32] of the sampled full blocks
    num_hittable: int  # sampled blocks that can be hits
    num_uses: int  # sampled blocks, with a partial last block
    ends: np.ndarray  # int32[num_uses], tokens up to the end of each block, last block first
    num_output_tokens: int
    start_ms: int
    end_ms: int
    tokens_per_block: (
        int  # that the policy multiplies by the number of blocks that the request added
    )


class Miniature:
    """Replays of one sample."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def hit_rate(self, eviction: str, options: Mapping[str, float], num_blocks: int) -> float:
        """Return the token hit rate of a pool of `num_blocks` blocks, without the null block."""
        sample = self._sample
        served = slice(0, num_blocks + 1)  # larger requests are rejected
        num_tokens = int(sample.tokens_of[served].sum())
        if num_tokens == 0:
            return 0.0
        num_hits, num_uses = self._replay(eviction, options, num_blocks)
        # A few blocks have most uses and are usually hits. If more or fewer of their uses were sampled
        # than expected, the difference is corrected as if all of these uses were hits (SHARDS-adj).
        missing = int(sample.hittable_of[served].sum()) - num_uses / sample.rate
        blocks = num_hits / sample.rate + missing
        return min(max(blocks * sample.block_size / num_tokens, 0.0), 1.0)

    def _replay(
        self, eviction: str, options: Mapping[str, float], num_blocks: int
    ) -> tuple[int, int]:
        """Return the hits among the sampled blocks, and how many could be hits."""
        capacity = max(round(num_blocks * self._sample.rate), 1)
        pool = core.BlockPool(capacity + 1, eviction, dict(options))
        has_policy = pool.has_policy
        num_hits = num_uses = num_releases = 0
        for request in self._requests:
            if request.num_blocks > num_blocks:
                continue
            num_uses += request.num_hittable
            hashes, num_held = request.hashes, request.num_uses
            if num_held > capacity:  # only in a sample
                num_held = capacity
                hashes = hashes[:capacity]
            if has_policy:
                pool.set_now(request.start_ms / 1000)
            found = pool.lookup(hashes[: request.num_hittable])
            num_found = int(np.count_nonzero(found >= 0))
            held = found[:num_found]
            if num_found:
                pool.retain(held)
                if has_policy:
                    pool.hit(held)
                num_hits += num_found
            new = pool.allocate(num_held - num_found)
            num_full = len(hashes)
            if num_full > num_found:
                pool.publish(
                    new[: num_full - num_found],
                    hashes[num_found:],
                    parent=hashes[num_found - 1].tobytes() if num_found else None,
                )
            held = np.concatenate([held, new])[::-1]
            if has_policy:
                num_releases += 1
                pool.set_now(request.end_ms / 1000)
                ends = request.ends[len(request.ends) - num_held :]
                pool.notify_release(
                    held,
                    ends,
                    tokens_per_block=request.tokens_per_block,
                    num_prefix_tokens=int(ends[-num_found]) if num_found else 0,
                    num_new_blocks=num_held - num_found,
                    num_output_tokens=request.num_output_tokens,
                    logical_time=num_releases,
                    wall_ms=request.end_ms,
                )
            pool.release(held)
        return num_hits, num_uses

    @cached_property
    def _requests(self) -> list[_Request]:
        sample, size = self._sample, self._sample.block_size
        requests = sample.request_of_use()
        is_full = sample.is_full()
        hittable = np.maximum(sample.num_tokens - 1, 0) // size
        is_hittable = sample.columns < hittable[requests]
        num = len(sample.num_tokens)
        num_full = np.bincount(requests[is_full], minlength=num).tolist()
        num_hittable = np.bincount(requests[is_hittable], minlength=num).tolist()
        hashes = np.zeros((len(sample.keys), 4), np.uint64)
        hashes[:, 0] = mix64(sample.keys ^ _SALT)
        hashes = hashes.view(np.uint8)
        ends = ((sample.columns + 1) * size).astype(np.int32)
        num_blocks = (-(-sample.num_tokens // size)).tolist()
        outputs = sample.num_output_tokens.tolist()
        start_ms, end_ms = sample.start_ms.tolist(), sample.end_ms.tolist()
        starts, added = sample.starts.tolist(), self._tokens_per_added_block(num_full)
        return [
            _Request(
                num_blocks[i],
                hashes[start : start + num_full[i]],
                num_hittable[i],
                stop - start,
                ends[start:stop][::-1],
                outputs[i],
                start_ms[i],
                end_ms[i],
                added[i],
            )
            for i, (start, stop) in enumerate(zip(starts, starts[1:], strict=False))
        ]

    def _tokens_per_added_block(self, num_full: list[int]) -> list[int]:
        """Return for each request the tokens that it added per sampled block that it added.

        A policy that counts the added blocks then sees the tokens that the whole prompt added to the
        earlier request that it continues, or to the fork. The average, `block_size / rate`, would be
        wrong for short additions.
        """
        sample, size = self._sample, self._sample.block_size
        lengths = (sample.num_tokens // size).tolist()
        columns, keys = sample.columns.tolist(), sample.keys.tolist()
        ended: dict[
            int, int
        ] = {}  # by last sampled block: full blocks of the request, or -1: inside
        found = []
        for i, start in enumerate(sample.starts[:-1].tolist()):
            stop = start + num_full[i]
            known = stop
            while known > start and keys[known - 1] not in ended:
                known -= 1
            num_known = 0
            if known > start:
                num_known = max(ended[keys[known - 1]], columns[known - 1] + 1)
            num_added = max(lengths[i] - num_known, 0)
            num_sampled = stop - known
            found.append(max(round(num_added * size / num_sampled), 1) if num_sampled else size)
            for use in range(known, stop):
                ended[keys[use]] = -1
            if stop > start:
                ended[keys[stop - 1]] = lengths[i]
        return found
