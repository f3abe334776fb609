"""Content keys and the KV made from them: fixed mixes, so that the KV of any token can be computed again.

All arithmetic is modulo 2**64. Multiplication and xor-shifts by odd constants are bijections: a mix
loses nothing before the last step cuts it to the wanted width.
"""

from __future__ import annotations

import numpy as np

VOCABULARY = 128_000  # the token ids of every workload are below this

_ROLL = np.uint64(0xD6E8FEB86659FD93)  # odd, so that it has an inverse modulo 2**64
_ROLL_INVERSE = np.uint64(pow(int(_ROLL), -1, 1 << 64))


def mix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014): uint64[...] to uint64[...]."""
    x = values + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def prefix_keys(token_ids: np.ndarray, before: int = 0) -> np.ndarray:
    """Content keys int64[n] of tokens behind a prefix whose last key is `before`; 0 for none.

    A rolling polynomial, key[i] = key[i - 1] * M + mix(token[i]): computed by segments it gives the
    same keys as computed at once, and equal keys of unequal prefixes are a 2**-64 accident. The
    recurrence is solved as M**i * (before + sum of mix(token[j]) / M**j), which numpy does in bulk.
    """
    n = len(token_ids)
    powers = np.cumprod(np.full(n, _ROLL))
    inverses = np.cumprod(np.full(n, _ROLL_INVERSE))
    sums = np.cumsum(mix64(token_ids.astype(np.uint64)) * inverses)
    keys = (sums + np.uint64(before % (1 << 64))) * powers
    return keys.view(np.int64)


def feature_factors(num_features: int) -> np.ndarray:
    """One odd multiplier per feature, uint64[num_features]."""
    return mix64(np.arange(num_features, dtype=np.uint64)) | np.uint64(1)


def kv_of_content(keys: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """int32[k, n, f]: the features of n tokens with these content keys, for factors uint64[k, f].

    `k` runs over K and V of every layer, `f` over heads and head elements.
    """
    mixed = mix64(keys.view(np.uint64))
    products = mixed[None, :, None] * factors[:, None, :]
    return (products >> np.uint64(32)).astype(np.uint32).view(np.int32)
