# SPDX-License-Identifier: Apache-2.0
"""Samples the blocks of a workload by content in one pass, in bounded memory.

A block is sampled if the hash of its content is below a threshold, so either all or none of its
uses are sampled (SHARDS, Waldspurger et al., FAST'15). If a fraction R of all blocks is sampled, a
pool of R * C blocks that serves only the sampled blocks behaves like a pool of C blocks that serves
all blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from kvcache.allocator import hash_blocks
from kvcache.checks import shown
from kvcache_lab.content import mix64
from kvcache_lab.traces.block_ids import BlockIdRequest
from kvcache_lab.workload import WorkloadRequest

_BATCH_BLOCKS = 2**18  # number of blocks hashed at once
# Size limits of a sample with an automatically chosen rate. Replaying a sample takes about 1 us per
# request and 0.1 us per block use.
MOST_REQUESTS, MOST_USES = 2**20, 2**22


@dataclass(frozen=True, eq=False)
class BlockSample:
    """The sampled blocks of a workload, and exact totals of the workload.

    A partial last block occupies space and is sampled like a full block, but is never cached.
    Per-request arrays have one entry for each request that contains a sampled block.
    """

    rate: float
    block_size: int
    keys: np.ndarray  # uint64[u], hashed content of each use
    columns: np.ndarray  # int64[u], position of the block in its prompt
    starts: np.ndarray  # int64[r + 1]: the uses of request i are [starts[i], starts[i + 1])
    num_tokens: np.ndarray  # int64[r]
    num_output_tokens: np.ndarray  # int64[r]
    start_ms: np.ndarray  # int64[r]
    end_ms: np.ndarray  # int64[r]; as in `Replayer`, when the next request starts
    # Totals over all requests that need n blocks, indexed by n.
    requests_of: np.ndarray
    tokens_of: np.ndarray
    hittable_of: np.ndarray  # blocks that can be hits; the last token is always computed

    @property
    def num_requests(self) -> int:
        """Number of requests in the workload."""
        return int(self.requests_of.sum())

    @property
    def num_blocks(self) -> int:
        """Number of block uses in the workload, including partial blocks."""
        return int((self.requests_of * np.arange(len(self.requests_of))).sum())

    @property
    def num_distinct(self) -> int:
        """Estimated number of distinct full blocks."""
        return round(len(np.unique(self.keys[self.is_full()])) / self.rate)

    def request_of_use(self) -> np.ndarray:
        """Return, for each use, the index of its request."""
        return np.repeat(np.arange(len(self.num_tokens)), np.diff(self.starts))

    def is_full(self) -> np.ndarray:
        """Return, for each use, whether the block is full."""
        return self.columns < (self.num_tokens // self.block_size)[self.request_of_use()]


class BlockSampler:
    """Collects a sample of the requests that are added.

    Args:
        block_size: Tokens per block.
        rate: Fraction of blocks to sample. None: initially 1, and halved whenever the sample
            exceeds `MOST_REQUESTS` or `MOST_USES`.
    """

    def __init__(self, block_size: int, rate: float | None) -> None:
        self._block_size = block_size
        self._is_automatic = rate is None
        self._rate = 1.0 if rate is None else rate
        self._now_ms = 0
        self._num_requests = 0
        self._batch: list[tuple[np.ndarray, int, int, int]] = []
        self._num_in_batch = 0
        self._uses: list[np.ndarray] = []  # [3, n]: key, column, request
        self._features: list[np.ndarray] = []  # [5, n]: request, tokens, output tokens, start, end
        self._num_uses = self._num_sampled = 0
        self._totals = np.zeros((3, 0), np.int64)

    def add(self, request: WorkloadRequest | BlockIdRequest) -> None:
        """Add the next request."""
        # As in `Replayer`, workloads without times have one request per second.
        self._now_ms = max(request.arrival_ms, self._now_ms + 1000 * (request.arrival_ms == 0))
        if self._num_in_batch >= _BATCH_BLOCKS:
            self._flush()
        keys = _block_keys(request, self._block_size)
        self._batch.append((keys, request.num_tokens, request.output_length, self._now_ms))
        self._num_in_batch += len(keys) + 1

    def sample(self) -> BlockSample:
        """Return the sample of the requests so far."""
        self._flush()
        keys, columns, requests = self._all_uses()
        numbers, *features = self._all_features()
        starts = np.searchsorted(requests, np.append(numbers, self._num_requests))
        return BlockSample(
            self._rate,
            self._block_size,
            keys.view(np.uint64),
            columns,
            starts,
            *features,
            *self._totals,
        )

    def _flush(self) -> None:
        if not self._batch:
            return
        chains, *of_requests = zip(*self._batch, strict=True)
        num_tokens, num_output_tokens, start_ms = (np.array(each, np.int64) for each in of_requests)
        end_ms = np.append(start_ms[1:], self._now_ms)
        num_blocks = -(-num_tokens // self._block_size)
        self._add_totals(num_blocks, num_tokens)
        num_full = np.array([*map(len, chains)])
        numbers = self._num_requests + np.arange(len(num_full))
        self._num_requests += len(num_full)
        self._batch, self._num_in_batch = [], 0
        # Partial blocks are appended, each with unique content.
        has_part = num_blocks > num_full
        keys = mix64(np.concatenate(chains).astype(np.int64).view(np.uint64))
        parts = mix64(keys.dtype.type(1 << 63) + numbers[has_part].astype(np.uint64))
        of_full, of_parts = self._is_sampled(keys), self._is_sampled(parts)
        requests = np.repeat(numbers, num_full)[of_full]
        columns = (np.arange(len(keys)) - np.repeat(np.cumsum(num_full) - num_full, num_full))[
            of_full
        ]
        uses = np.stack([keys[of_full].view(np.int64), columns, requests])
        more = [parts.view(np.int64), num_full[has_part], numbers[has_part]]
        uses = np.concatenate([uses, np.stack(more)[:, of_parts]], axis=1)
        uses = uses[:, np.argsort(uses[2], kind="stable")]
        is_kept = np.isin(numbers, uses[2])
        features = np.stack([numbers, num_tokens, num_output_tokens, start_ms, end_ms])[:, is_kept]
        self._uses.append(uses)
        self._features.append(features)
        self._num_uses += uses.shape[1]
        self._num_sampled += features.shape[1]
        while self._is_automatic and (
            self._num_uses > MOST_USES or self._num_sampled > MOST_REQUESTS
        ):
            self._halve()

    def _is_sampled(self, keys: np.ndarray) -> np.ndarray:
        if self._rate >= 1:
            return np.ones(len(keys), bool)
        return keys < np.uint64(int(self._rate * 2**64))

    def _halve(self) -> None:
        self._rate /= 2
        uses, features = self._all_uses(), self._all_features()
        uses = uses[:, self._is_sampled(uses[0].view(np.uint64))]
        features = features[:, np.isin(features[0], uses[2])]
        self._uses, self._features = [uses], [features]
        self._num_uses, self._num_sampled = uses.shape[1], features.shape[1]

    def _all_uses(self) -> np.ndarray:
        return np.concatenate([np.zeros((3, 0), np.int64), *self._uses], axis=1)

    def _all_features(self) -> np.ndarray:
        return np.concatenate([np.zeros((5, 0), np.int64), *self._features], axis=1)

    def _add_totals(self, num_blocks: np.ndarray, num_tokens: np.ndarray) -> None:
        size = max(int(num_blocks.max()) + 1, self._totals.shape[1])
        totals = np.zeros((3, size), np.int64)
        totals[:, : self._totals.shape[1]] = self._totals
        for i, each in enumerate(
            (1, num_tokens, np.maximum(num_tokens - 1, 0) // self._block_size)
        ):
            np.add.at(totals[i], num_blocks, each)
        self._totals = totals


def sampled(
    workload: Iterable[WorkloadRequest | BlockIdRequest],
    block_size: int,
    rate: float | None,
    on_request: Callable[[], None] | None = None,
) -> BlockSample:
    """Return a sample of the workload; see `BlockSampler`."""
    sampler = BlockSampler(block_size, rate)
    if not isinstance(workload, Iterable):
        raise TypeError(f"workload is {shown(workload)}: expected requests")
    for i, request in enumerate(workload):
        if not isinstance(request, WorkloadRequest | BlockIdRequest):
            raise TypeError(f"workload[{i}] is {shown(request)}: expected WorkloadRequest")
        sampler.add(request)
        if on_request is not None:
            on_request()
    return sampler.sample()


def _block_keys(request: WorkloadRequest | BlockIdRequest, block_size: int) -> np.ndarray:
    """Return one key per full block, int64[num_full].

    Equal keys mean that the prefixes, including the blocks themselves, are equal.
    """
    if isinstance(request, BlockIdRequest):
        return request.block_keys(block_size)
    num_full = request.num_tokens // block_size
    if len(request.content):
        return request.content[block_size - 1 :: block_size]
    if num_full == 0:
        return np.zeros(0, np.int64)
    hashes = hash_blocks(request.token_ids, block_size)
    return np.ascontiguousarray(hashes[:, :8]).view(np.int64)[:, 0]
