# SPDX-License-Identifier: Apache-2.0
"""A manager's options: the dataclass, the keyword arguments named after its fields, and the native
structure.
"""

from __future__ import annotations

import gc
import pickle
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import get_type_hints

import pytest

from kvcache import CacheOptions, GroupSpec, KVCacheManager
from kvcache.allocator import CacheArguments
from kvcache.kinds import make_kind
from kvcache.native.load import core
from kvcache_lab import Replayer

# A non-default value for each option.
OTHERS = {
    "enable_caching": False,
    "retention_interval": 32,
    "num_preallocate_tokens": 5,
    "max_num_reqs": 7,
    "hash_block_size": 2,
    "watermark": 0.25,
    "fence_frees": True,
    "engine_copies_states": True,
    "enable_events": True,
    "prefault": False,
    "explain_misses": 8,
    "hash_seed": "other",
    "hash_algorithm": "engine:x",
    "hash_bytes": 16,
    "num_hash_lookahead_tokens": 2,
    "eviction": "learned",
    "eviction_options": {},
    "num_host_blocks": 11,
    "host_eviction": "learned",
    "host_eviction_options": {},
    "host_write": "through",
    "min_gain_to_write": 0.25,
}
ELSEWHERE = {"hash_seed", "hash_algorithm", "hash_bytes", "num_hash_lookahead_tokens"}
ELSEWHERE |= {"eviction_options", "host_eviction_options"}
FULL = GroupSpec("full_attention", 4)
WINDOW = GroupSpec("sliding_window", 4, {"window": 8})


def native_of(options):
    kind = make_kind("full_attention", {})
    return options.native_of([(kind, 4, False, True, True)], num_gpu_blocks=40, max_model_len=64)


def test_arguments_equal_the_fields():
    positional = {"enable_caching", "num_preallocate_tokens"}
    hints = get_type_hints(CacheOptions)
    assert get_type_hints(CacheArguments) == {
        name: hint for name, hint in hints.items() if name not in positional
    }
    assert set(OTHERS) == set(hints)


@pytest.mark.parametrize("name", sorted(set(OTHERS) - ELSEWHERE))
def test_each_field_reaches_the_native_options(name):
    learned = {"num_host_blocks": 11, "eviction": "learned"}
    needed = {
        "host_eviction": learned,
        "min_gain_to_write": {**learned, "host_eviction": "learned"},
    }
    needed = needed.get(name, {})
    default, other = CacheOptions(), CacheOptions(**{name: OTHERS[name]}, **needed)
    assert getattr(default, name) != OTHERS[name] == getattr(other, name)
    name = {"watermark": "watermark_blocks", "host_write": "writes_through"}.get(name, name)
    before, after = getattr(native_of(default), name), getattr(native_of(other), name)
    if isinstance(before, core.Eviction):
        before, after = before.policy, after.policy
    assert before != after


def test_eviction_options_reach_the_policy():
    options = CacheOptions(eviction="priority", eviction_options={"default_priority": 50})
    assert native_of(options).eviction.options == {"default_priority": 50}


def test_defaults_equal_the_native_defaults():
    native, default = native_of(CacheOptions()), core.ManagerOptions()
    differ = {"groups", "num_gpu_blocks", "max_model_len", "num_preallocate_tokens"}
    for name in dir(default):
        if name.startswith("_") or name in {*differ, "check_optional"}:
            continue
        ours, theirs = getattr(native, name), getattr(default, name)
        if isinstance(ours, core.Eviction):
            ours, theirs = (ours.policy, ours.options), (theirs.policy, theirs.options)
        assert ours == theirs, name


def test_all_managers_accept_the_options():
    one = KVCacheManager(4, 40, 64, None, False, 5, max_num_reqs=7)
    assert one.options == CacheOptions(
        enable_caching=False, num_preallocate_tokens=5, max_num_reqs=7
    )
    several = KVCacheManager.for_groups([FULL, WINDOW], 40, 64, **OTHERS)
    assert several.options == CacheOptions(**OTHERS)
    replayer = Replayer(num_blocks=40, block_size=4, eviction="learned", hash_block_size=2)
    assert replayer.manager.options == CacheOptions(
        num_preallocate_tokens=0, eviction="learned", hash_block_size=2
    )


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        *(
            (name, 1, TypeError, f"{name} is 1: expected True or False")
            for name, default in vars(CacheOptions).items()
            if isinstance(default, bool)
        ),
        *(
            (name, "x", TypeError, f"{name} is 'x': expected an integer")
            for name, value in OTHERS.items()
            if type(value) is int
        ),
        ("max_num_reqs", 0, ValueError, "max_num_reqs is 0: expected 1 to"),
        ("hash_block_size", 0, ValueError, "hash_block_size is 0: expected 1 to"),
        ("retention_interval", -1, ValueError, "retention_interval is -1: expected 0 to"),
        ("num_host_blocks", 2**31, ValueError, "num_host_blocks is 2147483648: expected 2 to"),
        ("watermark", True, TypeError, "watermark is True: expected a fraction from 0 to 1"),
        (
            "watermark",
            float("nan"),
            ValueError,
            "watermark is nan: expected a fraction from 0 to 1",
        ),
        ("eviction_options", {"share": "x"}, TypeError, r"\['share'\] is 'x': expected a number"),
        ("host_write", "up", ValueError, "host_write is 'up': expected 'back' or 'through'"),
    ],
)
def test_invalid_value_is_reported_at_construction(name, value, error, message):
    with pytest.raises(error, match=message):
        CacheOptions(**{name: value})


def test_options_are_immutable_comparable_and_picklable():
    options = CacheOptions(**OTHERS)
    assert pickle.loads(pickle.dumps(options)) == options
    with pytest.raises(FrozenInstanceError):
        options.hash_bytes = 1


@pytest.mark.parametrize("num_host_blocks", [0, 200_000])
def test_prefault_commits_the_memory_of_all_pools(num_host_blocks):
    def growth_in_kib(prefault):
        gc.collect()
        before = resident_kib()
        manager = KVCacheManager(
            16, 200_000, 64, num_host_blocks=num_host_blocks, prefault=prefault
        )
        grown = resident_kib() - before
        del manager
        return grown

    # A block has at least 84 bytes of metadata.
    least = (200_000 + num_host_blocks) * 84 / 1024 * 0.9
    assert growth_in_kib(False) < least / 2 and growth_in_kib(True) > least


def resident_kib():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    (kib,) = [int(line.split()[1]) for line in lines if line.startswith("Rss:")]
    return kib


@pytest.mark.parametrize("options", [
    {"eviction": "\ud800"},
    {"num_host_blocks": 5, "host_eviction": "\ud800"},
    {"eviction_options": {"\ud800": 1.0}},
])  # fmt: skip
def test_names_that_utf8_cannot_hold_are_named(options):
    with pytest.raises(ValueError, match=r"eviction.* is .*: expected text that UTF-8 can hold"):
        KVCacheManager(4, 9, 64, **options)
