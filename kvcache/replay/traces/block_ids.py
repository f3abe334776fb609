# SPDX-License-Identifier: Apache-2.0
"""Tokens and content of prompts in traces that contain only block ids.

Equal ids mean equal content and equal prefixes. The tokens are derived from the ids.
"""

from __future__ import annotations

import functools

import numpy as np

from kvcache.replay.content import VOCABULARY, mix64

MAX_BLOCK_ID = VOCABULARY**2 - 1  # two tokens encode an id


def block_tokens(ids: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the tokens int32[k, num_tokens] of blocks int64[k], all below `VOCABULARY`.

    The first two tokens encode the id, so different ids always give different blocks, in every allocation
    block that starts at the same token. The other tokens are a mix of id and offset.
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

    The first token does not encode the whole id of its block. Two blocks after the same block may start
    with the same token, and a cache whose blocks have one token, or straddle these blocks, correctly hits
    there. The key of a first token is therefore derived from the previous block and the token. It is
    negative, unlike all other keys.
    """
    keys = ids[:, None] * num_tokens + np.arange(num_tokens, dtype=np.int64)
    before = np.concatenate([[0], ids[:-1] + 1])
    keys[:, 0] = -1 - (before * VOCABULARY + ids % VOCABULARY)
    return keys


@functools.cache
def _mixed_offsets(num_tokens: int) -> np.ndarray:
    return mix64(np.arange(num_tokens, dtype=np.uint64))
