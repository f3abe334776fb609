# SPDX-License-Identifier: Apache-2.0
"""Derives the tokens and content keys of prompts in traces that contain only block ids.

Blocks with equal ids have equal content and equal prefixes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from kvcache_lab.content import VOCABULARY, mix64
from kvcache_lab.workload import WorkloadRequest

MAX_BLOCK_ID = VOCABULARY**2 - 1  # two tokens encode an id
MAX_PROMPT_TOKENS = 2**24  # expanding a prompt takes about 60 bytes per token


class BlockIdRequest(NamedTuple):
    """A request from a trace with block ids, before the ids are expanded to tokens."""

    index: int
    arrival_ms: int
    num_tokens: int
    output_length: int
    ids: np.ndarray  # int64[k]; the last block may be partial
    tokens_per_id: int

    def expanded(self) -> WorkloadRequest:
        """Return the request with its tokens."""
        size, length = self.tokens_per_id, self.num_tokens
        tokens = block_tokens(self.ids, size).reshape(-1)[:length]
        content = block_content(self.ids, size).reshape(-1)[:length]
        return WorkloadRequest(self.index, self.arrival_ms, tokens, self.output_length, content)

    def block_keys(self, block_size: int) -> np.ndarray:
        """Return int64[num_tokens // block_size], one key per full block of this size.

        Keys are equal if and only if the prefixes up to and including the blocks are equal.
        """
        size, num_full = self.tokens_per_id, self.num_tokens // block_size
        if size == block_size:
            return self.ids[:num_full]
        last = np.arange(block_size - 1, num_full * block_size, block_size)
        return _keys_at(self.ids, size, last)


def block_tokens(ids: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the tokens int32[k, num_tokens] of blocks int64[k], all below `VOCABULARY`.

    The first two tokens encode the id, so blocks with different ids always have different tokens.
    The other tokens are computed by mixing the id and the offset.
    """
    mixed = mix64(ids.astype(np.uint64))[:, None] ^ _mixed_offsets(num_tokens)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed >>= np.uint64(32)
    mixed *= np.uint64(VOCABULARY)  # from [0, 2**32) to [0, VOCABULARY) without a division
    mixed >>= np.uint64(32)
    tokens = mixed.astype(np.int32)
    tokens[:, 0] = ids % VOCABULARY
    tokens[:, 1] = ids // VOCABULARY
    return tokens


def block_content(ids: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return content keys int64[k, num_tokens] of the blocks int64[k] of one prompt, from id and offset.

    A block's first token does not encode the whole block id, so two different blocks that follow
    the same block may start with the same token. If the cache uses blocks of one token, or blocks
    that extend beyond the trace's block boundaries, a hit on this token is correct. The key of a
    first token is therefore derived from the previous block and the token itself. It is negative,
    unlike all other keys.
    """
    return _keys_at(ids, num_tokens, np.arange(len(ids) * num_tokens)).reshape(-1, num_tokens)


def _keys_at(ids: np.ndarray, num_tokens: int, at: np.ndarray) -> np.ndarray:
    """Return the content keys of the tokens `at` of a prompt, int64[n]."""
    block, offset = np.divmod(at, num_tokens)
    keys = ids[block] * num_tokens + offset
    is_first = offset == 0
    block = block[is_first]
    before = np.where(block > 0, ids[block - 1] + 1, 0)
    keys[is_first] = -1 - (before * VOCABULARY + ids[block] % VOCABULARY)
    return keys


@functools.cache
def _mixed_offsets(num_tokens: int) -> np.ndarray:
    return mix64(np.arange(num_tokens, dtype=np.uint64))
