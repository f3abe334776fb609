"""Tokens and content of prompts of which a trace has ids of blocks alone.

Equal ids mean equal content and equal prefix. The tokens are made from the ids.
"""

from __future__ import annotations

import functools

import numpy as np

from kvcache.replay.content import VOCABULARY, mix64

MAX_BLOCK_ID = VOCABULARY**2 - 1  # two tokens spell an id


def block_tokens(ids: np.ndarray, num_tokens: int) -> np.ndarray:
    """int32[k, num_tokens]: the tokens of the blocks int64[k], all below `VOCABULARY`.

    The first two spell the id, so different ids give different blocks, for certain and for every
    allocation block that begins where they do; the others are a mix of id and offset.
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
    """int64[k, num_tokens]: content keys of the blocks int64[k] of one prompt: id and offset.

    The first token alone does not spell its block's id: two blocks behind the same one may both
    begin with it, and a cache whose blocks have one token, or straddle, rightly hits there. Its key
    is therefore made of the block before and the token, and is negative, unlike all others.
    """
    keys = ids[:, None] * num_tokens + np.arange(num_tokens, dtype=np.int64)
    before = np.concatenate([[0], ids[:-1] + 1])
    keys[:, 0] = -1 - (before * VOCABULARY + ids % VOCABULARY)
    return keys


@functools.cache
def _mixed_offsets(num_tokens: int) -> np.ndarray:
    return mix64(np.arange(num_tokens, dtype=np.uint64))
