# SPDX-License-Identifier: Apache-2.0
"""Computes content keys, and derives KV from them with a fixed mix, so that any token's KV can be
recomputed.

All arithmetic is modulo 2**64. Multiplications by odd constants and xor-shifts are bijections, so a
mix loses no information until its last step truncates the value.
"""

from __future__ import annotations

import numpy as np

VOCABULARY = 128_000  # all token ids in workloads are smaller

_ROLL = np.uint64(0xD6E8FEB86659FD93)  # odd, and therefore invertible modulo 2**64
_ROLL_INVERSE = np.uint64(pow(int(_ROLL), -1, 1 << 64))


def mix64(values: np.ndarray) -> np.ndarray:
    """Apply the finalizer of SplitMix64 (Steele et al., OOPSLA 2014) to uint64[...]."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def prefix_keys(token_ids: np.ndarray, before: int = 0) -> np.ndarray:
    """Return content keys int64[n] of tokens after a prefix with last key `before` (0 for no prefix).

    The keys are a rolling polynomial, key[i] = key[i - 1] * M + mix(token[i]). Computing them
    segment by segment produces the same keys as computing them at once. Two different prefixes have
    equal keys with probability 2**-64. The recurrence is solved in bulk as M**i * (before + sum of
    mix(token[j]) / M**j).
    """
    n = len(token_ids)
    powers = np.cumprod(np.full(n, _ROLL))
    inverses = np.cumprod(np.full(n, _ROLL_INVERSE))
    sums = np.cumsum(mix64(token_ids.astype(np.uint64)) * inverses)
    keys = (sums + np.uint64(before % (1 << 64))) * powers
    return keys.view(np.int64)


def feature_factors(num_features: int) -> np.ndarray:
    """Return one odd multiplier per feature, uint64[num_features]."""
    return mix64(np.arange(num_features, dtype=np.uint64)) | np.uint64(1)


def kv_of_content(keys: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the features int32[k, n, f] of the n tokens with these content keys, for factors
    uint64[k, f].

    `k` enumerates K and V of every layer, and `f` enumerates heads and head elements.
    """
    mixed = mix64(keys.view(np.uint64))
    products = mixed[None, :, None] * factors[:, None, :]
    return (products >> np.uint64(32)).astype(np.uint32).view(np.int32)
