# SPDX-License-Identifier: Apache-2.0
"""Tests of the identity of KV: KV from outside an engine is used only if it has the bytes that the
engine would compute.
"""

from __future__ import annotations

import sys

import pytest
import torch

from kvcache import ContextParallel, KVCacheManager, KVStorage, LayerSpec, Pages, build, plan_cache
from kvcache.kinds import kind_class, kind_names
from kvcache_exchange.store import StoreTier, fingerprint
from tests.machinery.identity_table import ACCEPTED, KINDS, TABLE, walked
from tests.machinery.stores import MemoryStore

TRIED = [name for name, row in TABLE.items() if row.changed is not None]


def test_table_has_exactly_one_row_per_field():
    assert sorted(walked()) == sorted(TABLE) and set(ACCEPTED) <= set(TRIED)
    assert all(row.same for row in TABLE.values() if row.changed is None)
    classes = {name: kind_class(name) for name in kind_names()}
    # Docstring examples and tests that ran earlier in this process may have registered other kinds.
    built_in = [
        name
        for name, each in classes.items()
        if each.__module__.startswith("kvcache.") and not name.startswith("test_")
        if getattr(sys.modules[each.__module__], each.__name__, None) is each
    ]
    assert sorted(built_in) == sorted(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_each_field_makes_loads_impossible_or_is_listed_as_irrelevant(name):
    row = TABLE[name]
    one, other = row.engines()
    assert (one.key is None) or (one.key == other.key) == bool(row.same), row.verdict
    if one.connector is None or other.connector is None:
        assert name not in ACCEPTED
        return
    for receiver, sender in ((one, other), (other, one)):
        reason = receiver.refuses(sender)
        assert (reason is None) == (name in ACCEPTED), reason


def manager_of(block_size=16, **options):
    return KVCacheManager(block_size, 9, 64, enable_events=True, **options)


def kv_tensors(*shape, order=(0, 1, 2, 3, 4)):
    """Return an engine's KV tensor with the given order of dimensions in memory."""
    sizes = [shape[d] for d in order]
    return torch.zeros(sizes).permute([order.index(d) for d in range(5)])


def test_raw_pages_are_rejected_by_name():
    for pages in (Pages.allocate(9, [[64]]), Pages.over([torch.zeros(9, 16, 2, 8)])):
        with pytest.raises(
            ValueError,
            match="contents is None, but the contents of the pages are unknown: expected",
        ):
            StoreTier(manager_of(), pages, MemoryStore(), model="m")


def test_storages_and_texts_describe_the_content_of_raw_pages():
    pages = Pages.allocate(9, [[4096]] * 2)
    layouts = [KVStorage.over(pages, 16, 2, 8, layout=layout) for layout in ("NHD", "HND")]
    found = {
        fingerprint(manager_of(), pages, model="m", contents=contents)
        for contents in ("NHD", "HND", layouts[:1], layouts[1:])
    }
    assert len(found) == 4


@pytest.mark.parametrize(
    ("contents", "error", "message"),
    [
        (3, TypeError, "contents is 3: expected a text, or the storages over the pages"),
        ([], ValueError, "contents has 0 storages: expected 1, one for"),
        (["a"], TypeError, r"contents\[0\] is 'a': expected a KVStorage"),
        ("\ud800", ValueError, "contents is .*: expected text that UTF-8 can hold"),
        ([KVStorage(9, 16, 2, 8)] * 2, ValueError, "contents has 2 storages: expected 1, one for"),
        ([KVStorage(9, 16, 2, 8)], ValueError, "expected storages over these pages"),
    ],
)
def test_invalid_contents_are_reported(contents, error, message):
    with pytest.raises(error, match=message):
        fingerprint(manager_of(), Pages.allocate(9, [[64]]), model="m", contents=contents)


def test_equal_numbers_of_tokens_and_heads_are_distinguished():
    """Both tensors have the same shape and memory order. The tokens dimension comes first in one
    backend, and the heads dimension in the other.
    """
    from kvcache.layouts import AttentionBackend

    found = set()
    for middle in (("token", "head"), ("head", "token")):
        backend = AttentionBackend("X", ("block", "kv", *middle, "element"))
        storage = KVStorage.from_tensors([kv_tensors(9, 2, 16, 16, 8)], backend=backend)
        found.add(fingerprint(manager_of(), storage.pages, model="m"))
    assert len(found) == 2


def test_tensors_and_storage_of_equal_bytes_have_equal_fingerprints():
    own = KVStorage(9, 16, 2, 8, dtype="float32", backend="FLASHINFER")
    theirs = KVStorage.from_tensors([kv_tensors(20, 2, 16, 2, 8)], backend="FLASHINFER")
    assert fingerprint(manager_of(), own.pages, model="m") == fingerprint(
        manager_of(), theirs.pages, model="m"
    )


def test_host_tier_has_the_fingerprint_of_the_device():
    pages = KVStorage(9, 16, 2, 8).pages
    assert pages.on_host(20).contents == pages.contents


def test_context_parallelism_needs_an_interleave():
    cp = ContextParallel(dcp_world_size=2)
    plan = plan_cache([LayerSpec("a", "full_attention", 16, 2, 64)], 2**20, max_model_len=256,
                      context_parallel=cp)  # fmt: skip
    pages = KVStorage.for_plan(plan)[0].pages
    manager = KVCacheManager.for_groups(plan.groups, plan.num_pages, 256, context_parallel=cp)
    with pytest.raises(ValueError, match="cp_kv_cache_interleave_size is None with context paral"):
        fingerprint(manager, pages, model="m")
    cache = build(plan, max_num_reqs=2, cp_kv_cache_interleave_size=4)
    given = fingerprint(manager, pages, model="m", cp_kv_cache_interleave_size=4)
    assert given == fingerprint(cache.manager, cache.pages, model="m")
    with pytest.raises(
        ValueError, match="cp_kv_cache_interleave_size is 2: expected 4, as in the pages"
    ):
        fingerprint(cache.manager, cache.pages, model="m", cp_kv_cache_interleave_size=2)
