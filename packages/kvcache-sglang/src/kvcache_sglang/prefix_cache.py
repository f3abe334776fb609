# SPDX-License-Identifier: Apache-2.0
"""kvcache's pool, index and eviction as SGLang's prefix cache:

    sglang serve MODEL --page-size 64 --radix-cache-backend kvcache \\
        --radix-eviction-policy-config '{"eviction": "learned"}'

SGLang's allocator keeps the free pages. A page of the KV pool is the block with the same number: while
the page is cached, the block is published under the hash of the page's tokens. All other blocks are
held, so that the pool evicts cached pages only.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    BasePrefixCache,
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.radix_cache import RadixKey

from kvcache import BlockPool, hash_blocks
from kvcache_sglang.compatibility import PREFIX_CACHE, check_version
from kvcache_sglang.host_tier import HostTier, page_tensors
from kvcache_sglang.options import BACKEND, resolved

_OPTIONS = ("eviction", "eviction_options")
_TOKEN_BITS = 31  # of the token ids that `hash_blocks` takes
_log = logging.getLogger("kvcache.sglang")


def make_cache(context: Any) -> SGLangPrefixCache:
    """Return the prefix cache of a scheduler.

    Args:
        context: SGLang's `TreeCacheBuildContext`.

    Raises:
        ValueError: The version of SGLang, one of its options or the model is not supported.
    """
    check_version(PREFIX_CACHE)
    params, arguments = context.params, context.server_args
    allocator = params.token_to_kv_pool_allocator

    def given(name: str) -> Any:
        return resolved(arguments, name)

    sizes = {name: given(name) for name in ("pp_size", "dp_size", "attn_cp_size")}
    unsupported = {f"{name} {size}": size != 1 for name, size in sizes.items()}
    unsupported |= {
        "--disable-radix-cache": context.disable_radix_cache,
        "--hicache-storage-backend": given("hicache_storage_backend") is not None,
        "sliding windows": context.is_hybrid_swa,
        "states": context.is_hybrid_ssm,
        "speculative decoding": given("speculative_algorithm") is not None,
        "a page size that depends on parallelism": allocator.page_size != params.page_size,
        "KV events": params.enable_kv_cache_events,
        f"--radix-eviction-policy {params.eviction_policy}": params.eviction_policy != "lru",
        "--schedule-policy dfs-weight": given("schedule_policy") == "dfs-weight",
        "--disaggregation-mode": given("disaggregation_mode") != "null",
        "streaming sessions": given("enable_streaming_session"),
        "--strip-thinking-cache": given("strip_thinking_cache"),
        "--enable-lmcache": given("enable_lmcache"),
        "--enable-flexkv": given("enable_flexkv"),
        f"allocator {type(allocator).__name__}": type(allocator)
        not in (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator),
    }
    if found := [name for name, is_used in unsupported.items() if is_used]:
        raise ValueError(f"--radix-cache-backend {BACKEND} does not support {', '.join(found)}")
    options = dict(params.eviction_policy_config or {})
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise ValueError(
            f"--radix-eviction-policy-config has {', '.join(unknown)}: expected "
            f"{' or '.join(_OPTIONS)} with --radix-cache-backend {BACKEND}"
        )
    host = None
    if context.enable_hierarchical_cache:
        if (policy := given("hicache_write_policy")) != "write_back":
            raise ValueError(
                f"--hicache-write-policy is {policy}: expected write_back "
                f"with --radix-cache-backend {BACKEND}, which copies pages when it evicts them"
            )
        host = _host_tier(context)
    # Ranks make the same evictions only if their clocks agree.
    cache = SGLangPrefixCache(params, **options, has_clock=context.tp_size == 1, host=host)
    num_host_tokens = 0 if host is None else host.logical_size
    _log.info(
        "kvcache manages the prefix cache: eviction %s, %s tokens, %s tokens on the host",
        *(cache.eviction, allocator.size, num_host_tokens),
    )
    return cache


def _host_tier(context: Any) -> HostTier:
    arguments, runner = context.server_args, context.tp_worker.model_runner
    allocator, size = context.params.token_to_kv_pool_allocator, context.params.page_size
    tensors = page_tensors(allocator.get_kvcache(), size)
    num_bytes, ratio = (resolved(arguments, f"hicache_{name}") for name in ("size", "ratio"))
    if num_bytes > 0:
        num_pages = int(num_bytes * 1e9) // sum(each[0].nbytes for each in tensors)
    else:
        num_pages = int(allocator.size * ratio) // size
    if num_pages < 1:
        raise ValueError(
            f"--hicache-size is {num_bytes} and --hicache-ratio {ratio}: expected the size of at "
            "least one page"
        )
    if resolved(arguments, "disable_overlap_schedule"):  # forward passes run on the current stream
        return HostTier(tensors, num_pages, nullcontext)
    streams = torch.get_device_module(tensors[0].device)
    return HostTier(tensors, num_pages, lambda: streams.StreamContext(runner.forward_stream))


class _Path(NamedTuple):
    """Cached pages from the first page of a prompt on: SGLang's handle of a prefix.

    The pages after the device's `pages` are on the host.
    """

    hashes: np.ndarray
    pages: np.ndarray
    num_hits: int = -1  # pages that the request hit; -1: it has not begun


class SGLangPrefixCache(BasePrefixCache):
    """SGLang's prefix cache with full attention, on a `BlockPool`.

    Args:
        params: SGLang's pools and sizes.
        eviction: Name of the eviction policy.
        eviction_options: Options of the policy.
        has_clock: Whether policies see the time, not only the order of the requests.
        host: Keeps evicted pages. None: evicted pages are lost.
    """

    # SGLang asks whether copies are in progress. Here, they are complete when a call returns.
    ongoing_write_through = ongoing_load_back = ()
    enable_storage = False

    def __init__(
        self,
        params: Any,
        eviction: str = "lru",
        eviction_options: dict[str, float] | None = None,
        has_clock: bool = True,
        host: HostTier | None = None,
    ) -> None:
        self.req_to_token_pool = params.req_to_token_pool
        self.token_to_kv_pool_allocator = params.token_to_kv_pool_allocator
        self.page_size, self.disable, self.sliding_window_size = params.page_size, False, None
        self.eviction, self._eviction_options = eviction, eviction_options or {}
        self._has_clock, self.token_to_kv_pool_host = has_clock, host
        self._num_pages = params.token_to_kv_pool_allocator.size // params.page_size
        self._offsets = torch.arange(
            params.page_size, device=params.token_to_kv_pool_allocator.device
        )
        if params.enable_metrics:
            self.init_metrics_collector()
        self.reset()

    def reset(self) -> None:
        """Forget all pages. SGLang clears its allocator."""
        self.pool = BlockPool(self._num_pages + 1, self.eviction, self._eviction_options)
        self.pool.allocate(self._num_pages)
        self._is_cached = np.zeros(self._num_pages + 1, bool)
        self._hash_of = np.zeros((self._num_pages + 1, 32), np.uint8)
        if self.token_to_kv_pool_host is not None:
            self.token_to_kv_pool_host.reset()
        self._num_uses = self._num_releases = 0
        self.root_node = self._path(np.zeros((0, 32), np.uint8))

    # Lookups

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Return the longest prefix that is cached on the device, and how much follows on the host."""
        hashes = self._hashes(params.key)
        path = self._path(hashes)
        if self.eviction != "learned":  # which learns from the hits of requests only
            self.pool.retain(path.pages)
            self._release(path.pages)
        best, num_pages = path, len(path.pages)
        if self.token_to_kv_pool_host is not None:
            num_host = len(self.token_to_kv_pool_host.find(hashes[num_pages:]))
            best = path._replace(hashes=hashes[: num_pages + num_host])
        num_host = len(best.hashes) - num_pages
        size = self.page_size
        return MatchResult(num_pages * size, path, best, best, host_hit_length=num_host * size)

    def touch_prefix(self, key: RadixKey) -> None:
        self.match_prefix(MatchPrefixParams(key))

    def path_device_indices(self, node: _Path) -> torch.Tensor:
        """Return the slots of a prefix."""
        return self._slots(node.pages)

    def root_node_handle(self, extra_key: str | None = None) -> _Path:
        return self.root_node

    # Changes

    def insert(self, params: InsertParams) -> InsertResult:
        """Cache pages, and free those after `prev_prefix_len` tokens whose content is cached already."""
        hashes = self._hashes(params.key)
        path, num_found = self._hold(hashes, params.value, params.prev_prefix_len)
        self._release(path.pages)
        return InsertResult(num_found * self.page_size, last_device_node=path)

    def checkpoint(self, req: Any, *, up_to: int) -> None:
        """Cache the whole pages of a request's first tokens, and lock them for the request."""
        key = RadixKey(
            req.full_untruncated_fill_ids[:up_to], req.extra_key, cache_salt=req.cache_salt
        )
        hashes, matched = self._hashes(key), req.last_node
        row, kv = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx], req.kv
        end, start = len(hashes) * self.page_size, kv.cache_protected_len
        if start >= end + self.page_size:
            raise RuntimeError(
                f"request {req.rid} has {start} cached tokens: expected at most {end}, as SGLang caches"
            )
        if matched.num_hits < 0:
            self.pool.hit(matched.pages)
            matched = matched._replace(num_hits=len(matched.pages))
        path, _ = self._hold(hashes, row[:end], start)
        slots = self._slots(path.pages[start // self.page_size :]).to(row.dtype)
        self.req_to_token_pool.write((kv.req_pool_idx, slice(start, end)), slots)
        kv.cache_protected_len, kv.cache_inserted_len = end, max(kv.cache_inserted_len, end)
        self.unlock(req.lock)
        path = path._replace(num_hits=matched.num_hits)
        req.lock, req.last_node = TreeLock(path, DecLockRefParams()), path
        if req.finished():
            self._notify_release(path, len(req.output_ids))

    def init_load_back(self, params: InitLoadBackParams) -> tuple[int, _Path]:
        """Load pages from the host. Return the number of tokens, all or 0, and the prefix's handle."""
        path, host = params.best_match_node, self.token_to_kv_pool_host
        own = path._replace(hashes=path.hashes[: len(path.pages)])
        hashes = path.hashes[len(path.pages) :]
        copies = host.find(hashes)
        if len(copies) < len(hashes):  # dropped since the lookup
            return 0, own
        host.pool.retain(copies)
        num_tokens, allocator = len(hashes) * self.page_size, self.token_to_kv_pool_allocator
        allocator.evict_to_free_tokens(self, num_tokens)
        slots = allocator.alloc(num_tokens)
        if slots is not None:
            pages = (slots[:: self.page_size] // self.page_size).cpu().numpy()
            host.read(copies, pages)
            before = self._slots(path.pages).to(slots.dtype)
            own, _ = self._hold(path.hashes, torch.cat([before, slots]), len(before))
            self._release(own.pages)
        host.pool.release(copies[::-1])
        return 0 if slots is None else num_tokens, own

    def check_hicache_events(self) -> None:
        pass

    def clear_storage_backend(self) -> bool:
        return False  # there is no storage

    def ready_to_load_host_cache(self) -> int:
        return -1  # no layer of the next forward pass has to wait

    def evict(self, params: EvictParams) -> EvictResult:
        """Free at least this number of tokens, or all pages that no request uses."""
        start = time.perf_counter()
        pages = self.pool.allocate(min(-(-params.num_tokens // self.page_size), self.pool.num_free))
        self._is_cached[pages] = False
        if self.token_to_kv_pool_host is not None:
            self.token_to_kv_pool_host.write(pages, self._hash_of[pages])
        self.token_to_kv_pool_allocator.free_segment(self._slots(pages), start_pos=0)
        num_tokens = len(pages) * self.page_size
        self.update_eviction_metrics(num_tokens, start)
        return EvictResult(num_tokens)

    def inc_lock_ref(self, node: _Path) -> IncLockRefResult:
        if not np.array_equal(self.pool.lookup(node.hashes), node.pages):
            raise RuntimeError("a prefix was locked after it was evicted: expected a new lookup")
        self.pool.retain(node.pages)
        return IncLockRefResult()

    def dec_lock_ref(self, node: _Path, params: DecLockRefParams | None = None) -> DecLockRefResult:
        self.pool.release(node.pages[::-1])
        return DecLockRefResult()

    # Sizes in tokens

    def evictable_size(self) -> int:
        return self.pool.num_free * self.page_size

    full_evictable_size = evictable_size

    def protected_size(self) -> int:
        return self.total_size() - self.evictable_size()

    full_protected_size = protected_size

    def total_size(self) -> int:
        return self.pool.num_cached * self.page_size

    def all_values_flatten(self) -> torch.Tensor:
        return self._slots(np.flatnonzero(self._is_cached))

    def pretty_print(self) -> None:
        print(f"{self.total_size()} tokens are cached, {self.protected_size()} of them are in use")

    # Parts

    def _hashes(self, key: RadixKey) -> np.ndarray:
        tokens = np.array(key.raw_token_ids(), np.int64)
        seed, extra_keys = repr((key.extra_key, key.cache_salt)), None
        if (high := tokens >> _TOKEN_BITS).any():  # SGLang's ids for images have up to 62 bits
            num_pages = len(tokens) // self.page_size
            pages = high[: num_pages * self.page_size].reshape(num_pages, self.page_size)
            extra_keys = [
                [("high bits", each.tobytes().hex())] if each.any() else None for each in pages
            ]
        low = tokens & ((1 << _TOKEN_BITS) - 1)
        return hash_blocks(low, self.page_size, extra_keys=extra_keys, seed=seed)

    def _path(self, hashes: np.ndarray) -> _Path:
        pages = self.pool.lookup(hashes)
        count = int(np.count_nonzero(pages >= 0))
        return _Path(hashes[:count], pages[:count])

    def _hold(self, hashes: np.ndarray, slots: torch.Tensor, num_owned: int) -> tuple[_Path, int]:
        """Cache pages and hold them once. Return them and how many of them were cached before.

        Of the latter, the slots after the first `num_owned` ones are freed.
        """
        size = self.page_size
        found = self.pool.lookup(hashes)
        count = int(np.count_nonzero(found >= 0))
        new = (slots[count * size : len(hashes) * size : size] // size).cpu().numpy()
        parent = hashes[count - 1].tobytes() if count else None
        self.pool.publish(new.astype(np.int32), hashes[count:], parent=parent)
        self._is_cached[new], self._hash_of[new] = True, hashes[count:]
        self.token_to_kv_pool_allocator.free_segment(
            slots[num_owned : count * size], start_pos=num_owned
        )
        pages = np.concatenate([found[:count], new]).astype(np.int32)
        self.pool.retain(pages[:count])
        return _Path(hashes, pages), count

    def _release(self, pages: np.ndarray) -> None:
        self._num_uses += 1
        self.pool.access(pages, self._num_uses)
        self.pool.release(pages[::-1])

    def _slots(self, pages: np.ndarray) -> torch.Tensor:
        first = torch.from_numpy(pages.astype(np.int64) * self.page_size).to(self._offsets.device)
        return (first[:, None] + self._offsets).flatten()

    def _notify_release(self, path: _Path, num_output_tokens: int) -> None:
        """Tell the policy about a request before its pages are released."""
        self._num_releases += 1
        if self._has_clock:
            self.pool.set_now(time.monotonic())
        self.pool.notify_release(
            path.pages[::-1],
            np.arange(len(path.pages), 0, -1) * self.page_size,
            tokens_per_block=self.page_size,
            num_prefix_tokens=path.num_hits * self.page_size,
            num_new_blocks=len(path.pages) - path.num_hits,
            num_output_tokens=num_output_tokens,
            logical_time=self._num_releases,
            wall_ms=round(time.monotonic() * 1000) if self._has_clock else 0,
        )
