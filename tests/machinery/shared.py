# SPDX-License-Identifier: Apache-2.0
"""Helpers used by several tests: files outside the project, samples of values, and managers."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import numpy as np
import pytest

from kvcache import GroupSpec, KVCacheManager
from tests.machinery.roots import REPO

SHARED = REPO.parent / "shared"


def shared_file(name: str) -> Path:
    """Return the path of a file in `../shared`, or skip the test if the file is missing."""
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"{name} is missing: it belongs in a folder 'shared' next to the project")
    return path


def sampled(values, num_first: int = 1) -> list:
    """Return values for `parametrize`. If it has several names, the values are tuples.

    All values except the first are marked exhaustive.
    """
    each = [value if isinstance(value, tuple) else (value,) for value in values]
    rest = [pytest.param(*value, marks=pytest.mark.exhaustive) for value in each[num_first:]]
    return [*(pytest.param(*value) for value in each[:num_first]), *rest]


def spread(values, num: int) -> list:
    """Like `sampled`, but leave `num` evenly spaced values unmarked."""
    values = list(values)
    first = [values[i * len(values) // num] for i in range(num)]
    return sampled([*first, *(value for value in values if value not in first)], num)


def manager_of(
    *groups: GroupSpec, num_blocks: int = 41, max_model_len: int = 64, **options
) -> KVCacheManager:
    """Return a manager for these groups, by default without preallocation."""
    options = {"num_preallocate_tokens": 0, **options}
    return KVCacheManager.for_groups(groups, num_blocks, max_model_len, **options)


def seed_of_test() -> int:
    """Return a seed derived from the test's name, so that failures reproduce.

    KVCACHE_TEST_SEED=<number> changes the seed.
    """
    test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
    return zlib.crc32(f"{os.environ.get('KVCACHE_TEST_SEED', '')}{test}".encode())


def run_seeds(run, seeds):
    """Call `run` with each seed. Prints the seeds, and the call that repeats a failure."""
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    for seed in seeds:
        try:
            run(seed)
        except BaseException:
            print(f"found by {run.__name__}({seed})")
            raise


def context_of(cache, layer_name, rows, num_tokens):
    """Return (key, value) of each row's first tokens, concatenated."""
    of = np.repeat(np.array(rows, np.int32), num_tokens)
    positions = np.concatenate([np.arange(n) for n in num_tokens])
    slots = cache.tables[cache.group(layer_name)].slots_of(of, positions)
    return cache.gather(layer_name, slots)
