# SPDX-License-Identifier: Apache-2.0
"""kvcache's prefix cache makes the same decisions as SGLang's own tree, and changes no answer."""

import contextlib
import functools
import json
import os
import random
import types
from array import array

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.registry import TreeCacheBuildContext
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from kvcache_sglang.host_tier import HostTier, page_tensors
from kvcache_sglang.prefix_cache import SGLangPrefixCache, make_cache
from tests.machinery.sglang_engine import in_a_process

PAGES = 120
REQUESTS = int(os.environ.get("KVCACHE_REQUESTS", "1000"))  # in each comparison


class Side:
    """A prefix cache with its allocator, called as SGLang's scheduler calls it.

    Args:
        size: Tokens per page.
        core: SGLang's tree core, or an eviction policy of kvcache after "kvcache ".
        by_page: Whether a node of SGLang's tree has one page. A tree evicts whole nodes.
    """

    def __init__(self, size, core, by_page=True):
        self.size, self.by_page, self.is_ours = size, by_page, core.startswith("kvcache ")
        if size == 1:
            self.allocator = TokenToKVPoolAllocator(PAGES, torch.bfloat16, "cpu", None, False)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(
                PAGES * size, size, torch.bfloat16, "cpu", None, False
            )
        self.params = params = CacheInitParams(False, None, self.allocator, size)
        if self.is_ours:
            self.cache = SGLangPrefixCache(params, core.removeprefix("kvcache "))
        else:
            params.tree_components, params.tree_core_backend = (ComponentType.FULL,), core
            self.cache = UnifiedRadixCache(params)

    def match(self, tokens, salt):
        key = RadixKey(array("q", tokens), cache_salt=salt)
        found = self.cache.match_prefix(MatchPrefixParams(key))
        return found.device_prefix_len, found.last_device_node

    def begin(self, tokens, salt):
        """Return (hit tokens, lock, slots), or None if the request does not fit."""
        hit, node = self.match(tokens[: (len(tokens) - 1) // self.size * self.size], salt)
        lock, hit_slots = self.cache.lock(node), self.cache.path_device_indices(node)
        count = -(-(len(tokens) - hit) // self.size) * self.size
        if self.allocator.available_size() < count:
            self.evict(count - self.allocator.available_size())
        slots = self.allocator.alloc(count)
        if slots is None:
            self.cache.unlock(lock)
            return None
        return hit, lock, torch.cat([hit_slots, slots])

    def finish(self, tokens, salt, request):
        """Cache the request's whole pages, and free its other slots."""
        hit, lock, slots = request
        end = len(tokens) // self.size * self.size
        step = self.size if self.by_page and not self.is_ours else max(end, 1)
        for stop in range(step, end + 1, step):
            key = RadixKey(array("q", tokens[:stop]), cache_salt=salt)
            start = max(hit, stop - step)
            self.cache.insert(InsertParams(key, slots[:stop], prev_prefix_len=start))
        self.allocator.free(slots[end:])
        self.cache.unlock(lock)

    def abort(self, request):
        hit, lock, slots = request
        self.allocator.free(slots[hit:])
        self.cache.unlock(lock)

    def evict(self, num_tokens):
        self.cache.evict(EvictParams(num_tokens=num_tokens))

    def sizes(self):
        cache, free = self.cache, self.allocator.available_size()
        return free, cache.evictable_size(), cache.protected_size()


class Prompts:
    """Conversations, some of which share their first tokens, in pages of `size` tokens."""

    def __init__(self, seed, size):
        self.random, self.size = random.Random(seed), size
        self.shared = [self.tokens(self.random.randrange(1, 12)) for _ in range(3)]
        self.chats = []

    def tokens(self, num_pages):
        pages = self.random.choices(range(1, 1000), k=num_pages)
        tokens = [page for page in pages for _ in range(self.size)]
        return tokens + tokens[:1] * self.random.randrange(self.size)

    def next(self):
        if len(self.chats) < 4 or self.random.random() < 0.15:
            first = self.random.choice([[], *self.shared])
            first = first[: len(first) // self.size * self.size]
            self.chats = [*self.chats, first][-25:]
        number = self.random.randrange(len(self.chats))
        chat = self.chats[number]
        if len(chat) < 50 * self.size:
            turn = self.tokens(self.random.randrange(1, 8))
            self.chats[number] = chat[: len(chat) // self.size * self.size] + turn
        tokens = self.chats[number]
        if self.random.random() < 0.2:  # a fork
            tokens = tokens[: self.random.randrange(1, len(tokens) + 1)]
        return list(tokens), self.random.choice([None, None, "salt"])


def replay(sides, seed, size, num_requests, aborts):
    """Run the same requests on each side. Return per side the hits and sizes after each call."""
    prompts, running = Prompts(seed, size), []
    choices, seen = random.Random(seed + 1), [[] for _ in sides]
    for _ in range(num_requests):
        tokens, salt = prompts.next()
        begun = [side.begin(tokens, salt) for side in sides]
        for own, request in zip(seen, begun):
            own.append(None if request is None else request[0])
        if all(begun):
            running.append((tokens, salt, begun))
        else:
            for side, request in zip(sides, begun):
                if request is not None:
                    side.abort(request)
        while running and (len(running) > 4 or choices.random() < 0.4):
            tokens, salt, begun = running.pop(choices.randrange(len(running)))
            is_aborted = choices.random() < aborts
            for side, request in zip(sides, begun):
                side.abort(request) if is_aborted else side.finish(tokens, salt, request)
        if choices.random() < 0.1:
            tokens, salt = prompts.next()
            for side, own in zip(sides, seen):
                own.append(side.match(tokens, salt)[0])
        if choices.random() < 0.05:
            for side in sides:
                side.evict(3 * size)
        for side, own in zip(sides, seen):
            own.append(side.sizes())
    return seen


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("size", [1, 64])
@pytest.mark.parametrize(("eviction", "aborts"), [("lru", 0.0), ("last_access", 0.2)])
def test_hits_and_sizes_equal_those_of_sglangs_tree(size, core, eviction, aborts):
    """SGLang's nodes have one page here, so that both caches evict the same unit.

    SGLang orders nodes by their last access, and `lru` by their last release. Both are the same if
    every request that ends is cached, as in the scheduler; an aborted request is released later than it
    accessed its prefix.
    """
    seed = random.randrange(2**32)
    sides = [Side(size, core), Side(size, f"kvcache {eviction}")]
    theirs, ours = replay(sides, seed, size, REQUESTS, aborts)
    num_hits = sum(each for each in theirs if isinstance(each, int))
    differences = sum(map(lambda a, b: a != b, theirs, ours))
    print(f"seed {seed}: {num_hits} hit tokens, {differences} of {len(theirs)} values differ")
    assert num_hits > REQUESTS * size
    assert differences == 0


def test_loaded_pages_have_the_content_that_was_evicted():
    """Each slot holds its token, and each prefix that is hit is read."""
    size, seed = 4, random.randrange(2**32)
    prompts, choices = Prompts(seed, size), random.Random(seed)
    side = Side(size, "kvcache lru")
    tokens_of = torch.zeros((PAGES + 1) * size, 1, dtype=torch.int64)
    pages = tokens_of.unflatten(0, (PAGES + 1, size))
    side.cache = SGLangPrefixCache(side.params, host=HostTier([pages], 90, contextlib.nullcontext))
    num_loaded = num_refused = 0
    for _ in range(3000):
        tokens, salt = prompts.next()
        key = RadixKey(array("q", tokens[: (len(tokens) - 1) // size * size]), cache_salt=salt)
        found = side.cache.match_prefix(MatchPrefixParams(key))
        if found.host_hit_length:
            lock = side.cache.lock(found.last_device_node)
            if choices.random() < 0.2:
                side.evict(choices.randrange(PAGES * size))
            arguments = InitLoadBackParams(found.best_match_node, found.host_hit_length)
            loaded, node = side.cache.init_load_back(arguments)
            side.cache.unlock(lock)
            assert loaded in (0, found.host_hit_length)
            num_loaded += loaded
            num_refused += not loaded
            assert len(side.cache.path_device_indices(node)) == found.device_prefix_len + loaded
            assert torch.equal(
                tokens_of[side.cache.path_device_indices(node), 0], _ints(tokens, node)
            )
        request = side.begin(tokens, salt)
        if request is None:
            continue
        hit, _, slots = request
        assert torch.equal(tokens_of[slots[:hit], 0], _ints(tokens)[:hit])
        tokens_of[slots[hit : len(tokens)], 0] = _ints(tokens)[hit:]
        side.finish(tokens, salt, request)
        free, evictable, protected = side.sizes()
        assert (free + evictable, protected) == (PAGES * size, 0)
        side.cache.token_to_kv_pool_host.pool.check_invariants()
    print(f"seed {seed}: {num_loaded} tokens loaded, {num_refused} loads refused")
    assert num_loaded > 2000
    assert num_refused > 0


def _ints(tokens, node=None):
    return torch.tensor(tokens[: None if node is None else len(node.pages) * 4], dtype=torch.int64)


WORKS = [
    {"seed": 0},
    {"seed": 1, "chats": 9},
    {"seed": 2, "aborts": True},
    {"seed": 3, "keys": True},
]
HOST = {"enable_hierarchical_cache": True, "hicache_write_policy": "write_back"}
SMALL = {"max_total_tokens": 720, "dtype": "float32"}
TOKENS = {"page_size": 1, "disable_overlap_schedule": False, "schedule_policy": "lpm"}
# SGLang's options of both engines, and those of the engine with kvcache's prefix cache.
ENGINES = {
    "pages": ({}, {}),
    "tokens": (TOKENS, {"radix_eviction_policy_config": {"eviction": "learned"}}),
    "host": ({}, HOST),
}


@functools.lru_cache
def _serve(options, sanitize="0"):
    arguments = options, json.dumps(WORKS)
    return in_a_process("tests.machinery.sglang_engine", *arguments, KVCACHE_SANITIZE=sanitize)


@pytest.mark.parametrize("name", ENGINES)
def test_engines_generate_the_same_tokens_as_with_sglangs_tree(name):
    options, own = ENGINES[name]
    own = {**SMALL, **options, **own, "radix_cache_backend": "kvcache"}
    theirs = _serve(json.dumps(SMALL | options))
    ours = _serve(json.dumps(own), "0" if name == "host" else "stop")
    for work, a, b in zip(WORKS, theirs, ours):
        print(name, work, [(each["cached_tokens"], each["retractions"]) for each in (a, b)])
        assert b["error"] is None
        assert b["cached_tokens"] > 0
        if name != "host":
            assert b["findings"]["slots_compared"] > 0
            assert not b["found"]
        if "aborts" not in work:  # they depend on the number of steps, and thus on the hits
            assert sorted(a["outputs"]) == sorted(b["outputs"])
    if name == "host":
        assert sum(each["cached_tokens"] for each in ours) > 9000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"radix_eviction_policy": "slru"}, "does not support --radix-eviction-policy slru"),
        ({"speculative_algorithm": "EAGLE", "pp_size": 2}, "pp_size 2, speculative decoding"),
        ({"schedule_policy": "dfs-weight"}, "does not support --schedule-policy dfs-weight"),
        ({"strip_thinking_cache": True, "enable_flexkv": True}, "thinking-cache, --enable-flexkv"),
        (
            {"radix_eviction_policy_config": {"policy": "learned"}},
            "-config has policy: expected ev",
        ),
        ({"radix_eviction_policy_config": {"eviction": "best"}}, "eviction is 'best'"),
        (
            {"enable_hierarchical_cache": True},
            "--hicache-write-policy is write_through: expected wr",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(options, message):
    defaults = {
        **{"disable_radix_cache": False, "schedule_policy": "fcfs", "disaggregation_mode": "null"},
        **{"enable_streaming_session": False, "hicache_storage_backend": None},
        **{"hicache_write_policy": "write_through", "speculative_algorithm": None},
        **{"pp_size": 1, "dp_size": 1, "attn_cp_size": 1, "strip_thinking_cache": False},
        **{"enable_lmcache": False, "enable_flexkv": False},
    }
    params = Side(16, "kvcache lru").params
    params.eviction_policy = options.get("radix_eviction_policy", "lru")
    params.eviction_policy_config = options.get("radix_eviction_policy_config")
    context = TreeCacheBuildContext(
        types.SimpleNamespace(**defaults | options),
        params,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
        enable_hierarchical_cache=options.get("enable_hierarchical_cache", False),
        disable_radix_cache=False,
        tp_worker=None,
        model_config=None,
        tp_size=1,
        tp_rank=0,
        tp_group=None,
    )
    with pytest.raises(ValueError, match=message):
        make_cache(context)


def test_ids_of_images_are_tokens_like_others():
    """SGLang replaces the tokens of an image by ids of up to 62 bits."""
    wide = [1 << 61, (1 << 61) + 1, -1, 5 + (1 << 31)]
    for size in (1, 4):
        side = Side(size, "kvcache lru")
        for tokens in ([7, 8, 9, 5, *wide], [7, 8, 9, 5, *wide[::-1]], [7, 8, 9, 5, 5, 5, 5, 5]):
            assert side.match(tokens, None)[0] == (4 if side.cache.total_size() else 0)
            side.finish(tokens, None, side.begin([*tokens, 1], None))
            assert side.match(tokens, None)[0] == 8


def test_pools_that_are_not_copied_whole_are_refused():
    tensors = [torch.zeros(32, 2, 4)]
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.k_buffer = pool.v_buffer = tensors
    pool.kv_cache_layout = "nhd"
    assert [each.shape for each in page_tensors(pool, 8)] == [(4, 8, 2, 4)] * 2
    pool.kv_cache_layout = "hnd"
    with pytest.raises(ValueError, match="layout hnd: expected nhd"):
        page_tensors(pool, 8)
    pool.k_scale_buffer = tensors
    with pytest.raises(ValueError, match="KV pool with scales"):
        page_tensors(pool, 8)
