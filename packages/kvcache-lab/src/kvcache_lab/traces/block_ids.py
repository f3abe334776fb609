# SPDX-License-Identifier: Apache-2.0
"""Derives the tokens and content keys of prompts in traces that contain only block ids.

Blocks with equal ids have equal content and equal prefixes.
"""

from __future__ import annotations

import functools

import numpy as np

from kvcache_lab.content import VOCABULARY, mix64
from kvcache_lab.workload import WorkloadRequest

MAX_BLOCK_ID = VOCABULARY**2 - 1  # two tokens encode an id
MAX_PROMPT_TOKENS = 2**24  # expanding a prompt takes about 60 bytes per token


def request_of_ids(
    index: int,
    arrival_ms: int,
    num_tokens: int,
    output_length: int,
    ids: np.ndarray,
    tokens_per_id: int,
) -> WorkloadRequest:
    """Return a request whose prompt has the blocks int64[k]. The last block may be partial."""
    tokens = block_tokens(ids, tokens_per_id).reshape(-1)[:num_tokens]
    content = block_content(ids, tokens_per_id).reshape(-1)[:num_tokens]
    return WorkloadRequest(index, arrival_ms, tokens, output_length, content, tokens_per_id)


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
    keys = ids[:, None] * num_tokens + np.arange(num_tokens)
    before = np.append(0, ids[:-1] + 1)
    keys[:, 0] = -1 - (before * VOCABULARY + ids % VOCABULARY)
    return keys


@functools.cache
def _mixed_offsets(num_tokens: int) -> np.ndarray:
    return mix64(np.arange(num_tokens, dtype=np.uint64))
