# SPDX-License-Identifier: Apache-2.0
"""Reports the forward passes of an SGLang scheduler to a `Sanitizer`.

The observer reads the inputs of the model runner: the tokens of the batch, the slots of their KV,
the rows of `req_to_token` and the sequence lengths. It also observes HiCache's copies between host
and device.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from kvcache.sanitizer import SanitizedGroup, Sanitizer
from kvcache_exchange.plugins.environment import options_from_environment
from kvcache_exchange.plugins.guard import ObserverGuard
from kvcache_exchange.plugins.wrapping import wrap_once
from kvcache_sglang.compatibility import SANITIZER, check_version
from kvcache_sglang.prefix_cache import SGLangPrefixCache
from kvcache_sglang.sanitizer.pages import HandedOutPages

_log = logging.getLogger("kvcache.sanitizer")
_MODES = (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE)
_POOLS = (
    memory_pool.MHATokenToKVPool,
    memory_pool.MLATokenToKVPool,
    memory_pool.HybridLinearKVPool,
    SWAKVPool,
)
_LOADS = "HiCache loads"  # name under which the pages filled by these loads are held


def observe(scheduler: Any, sanitizer: Sanitizer | None = None) -> SchedulerObserver:
    """Observe the model runner, allocator and HiCache of an initialized scheduler.

    Args:
        scheduler: A scheduler of SGLang, on a CPU or a GPU.
        sanitizer: The sanitizer. None: a sanitizer with options from the environment.

    Returns:
        The observer, which is also stored in `scheduler.kvcache_sanitizer`.

    Raises:
        ValueError: The version of SGLang, its cache layout or one of its options is not supported.

    Example:
        >>> import os
        >>> os.environ["KVCACHE_SANITIZE"] = "1"  # before SGLang starts, instead of a call
    """
    check_version(SANITIZER)
    arguments, tree, outer = (
        scheduler.server_args,
        scheduler.tree_cache,
        scheduler.token_to_kv_pool_allocator,
    )
    pool = outer.get_kvcache()
    unsupported = {
        "speculative decoding": not scheduler.spec_algorithm.is_none(),
        "prefill/decode disaggregation": scheduler.disaggregation_mode.value != "null",
        "a storage backend of HiCache": arguments.hicache_storage_backend,
        "an external cache linker": arguments.enable_unified_cache_external_linker,
        "streaming sessions": arguments.enable_streaming_session,
        "prefill/decode multiplexing": arguments.enable_pdmux,
        "sparse attention with a host tier": arguments.enable_hisparse,
        "a page size that depends on parallelism": outer.page_size != scheduler.page_size,
        "the host tier of kvcache's prefix cache": isinstance(tree, SGLangPrefixCache)
        and tree.token_to_kv_pool_host is not None,
        f"radix cache {type(tree).__name__}": type(tree)
        not in (UnifiedRadixCache, SGLangPrefixCache),
        f"KV pool {type(pool).__name__}": type(pool) not in _POOLS,
        f"allocator {type(outer).__name__}": type(outer)
        not in (TokenToKVPoolAllocator, PagedTokenToKVPoolAllocator, SWATokenToKVPoolAllocator),
    }
    if found := [name for name, is_used in unsupported.items() if is_used]:
        raise ValueError(f"SGLang uses {', '.join(found)}: not supported")
    observer = SchedulerObserver(scheduler, sanitizer)
    observer.install()
    return observer


class SchedulerObserver:
    """Observes one scheduler and its model runner. See `observe`."""

    def __init__(self, scheduler: Any, sanitizer: Sanitizer | None = None) -> None:
        outer = scheduler.token_to_kv_pool_allocator
        self._scheduler, self._runner = scheduler, scheduler.tp_worker.model_runner
        self._size = outer.page_size
        self._controller = scheduler.tree_cache.cache_controller
        self.unchecked: dict[str, str] = {}
        allocators, groups = [outer], [SanitizedGroup("full", self._size)]
        self._to_window: torch.Tensor | None = (
            None  # maps each slot to its slot in the window group
        )
        if isinstance(outer, SWATokenToKVPoolAllocator):
            allocators = [outer.full_attn_allocator]
            if self._controller is not None or outer.swa_req_ring:
                self._leave_out("sliding-window layers", "HiCache or ring buffers hold them")
            else:
                allocators.append(outer.swa_attn_allocator)
                # SGLang's window size excludes the query token itself.
                window = scheduler.sliding_window_size + 1
                groups.append(SanitizedGroup("window", self._size, window=window))
                self._to_window = outer.full_to_swa_index_mapping
        if scheduler.is_hybrid_ssm:
            self._leave_out("Mamba states", "their copies are not observed")
        counts = [each.size // self._size + 1 for each in allocators]
        num_host = 0
        if self._controller is not None:
            num_host = self._controller.mem_pool_host.size // self._size + 1
        if sanitizer is None:
            options = options_from_environment() or {}
            sanitizer = Sanitizer(groups, sum(counts), num_host_blocks=num_host, **options)
        elif sanitizer.groups != tuple(groups):
            raise ValueError(f"sanitizer has groups {sanitizer.groups}: expected {tuple(groups)}")
        self.sanitizer = sanitizer
        self._guard = ObserverGuard(sanitizer)
        self._pages = [
            HandedOutPages(sanitizer, self._guard, g, each, counts[g], sum(counts[:g]))
            for g, each in enumerate(allocators)
        ]
        self._requests: dict[str, weakref.ref] = {}  # requests known to the sanitizer
        self._batch: Any = None  # the scheduler's running batch
        self._num_loaded = 0

    def _leave_out(self, part: str, reason: str) -> None:
        self.unchecked[part] = reason
        _log.warning("The KV cache sanitizer does not check %s: %s", part, reason)

    def install(self) -> None:
        """Wrap methods of the scheduler, its model runner, its allocators and HiCache."""
        self._scheduler.kvcache_sanitizer = self
        wrap_once(self._scheduler, "run_batch", self._run_batch)
        wrap_once(self._runner, "forward", self._forward)
        for pages in self._pages:
            pages.install()
        if self._controller is not None:
            wrap_once(self._controller, "start_writing", self._start_writing)
            wrap_once(self._controller, "start_loading", self._start_loading)

    def findings(self) -> dict[str, object]:
        """See `kvcache_sglang.sanitizer.findings`."""
        return self._guard.findings() | {
            "unchecked": self.unchecked,
            "pages_loaded": self._num_loaded,
        }

    # Hooks --------------------------------------------------------------------------------------------

    def _run_batch(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def run_batch(batch: Any, *arguments: Any, **options: Any) -> Any:
            self._batch = batch
            try:
                return original(batch, *arguments, **options)
            finally:
                self._batch = None

        return run_batch

    def _forward(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def forward(batch: Any, *arguments: Any, **options: Any) -> Any:
            if self._batch is not None:  # not a warm-up
                self._guard(self._computes, batch)
            return original(batch, *arguments, **options)

        return forward

    def _start_writing(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def start_writing() -> None:
            self._guard(self._observe_copies, self._controller.write_queue, "host")
            original()

        return start_writing

    def _start_loading(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def start_loading() -> int:
            self._guard(self._observe_copies, self._controller.load_queue, "device")
            return original()

        return start_loading

    def _observe_copies(self, operations: list[Any], target: str) -> None:
        """Observe HiCache's copies of whole pages."""
        if self._controller.storage_backend is not None:
            raise ValueError("a storage backend fills pages of HiCache: not supported")
        for each in operations:
            host = _array(each.host_indices)[:: self._size].astype(np.int64) // self._size
            slots = _array(each.device_indices)
            device = self._pages[0].blocks(slots[:: self._size])
            if target == "host":
                self.sanitizer.observe_copy(device, host, dst_medium="host")
            else:
                self._pages[0].take(_LOADS, slots)
                self.sanitizer.observe_copy(host, device, src_medium="host")
                self._num_loaded += len(host)

    # A forward pass -----------------------------------------------------------------------------------

    def _computes(self, batch: Any) -> None:
        """Observe the tokens, writes and reads of a forward pass, before the model computes it."""
        mode, sanitizer = batch.forward_mode, self.sanitizer
        if mode is ForwardMode.IDLE:
            return
        if mode not in _MODES:
            raise ValueError(f"the forward mode {mode.name} is not supported")
        if batch.input_embeds is not None or batch.replace_embeds is not None:
            raise ValueError("a request has input embeddings, which are not supported")
        sanitizer.observe_step(self._scheduler.forward_ct)
        requests = self._batch.reqs
        names = [request.rid for request in requests]
        if names != batch.rids:
            sanitizer.reject("forward", f"the model runner computes {batch.rids}: expected {names}")
            return
        if len(batch.req_pool_indices) != len(names):
            raise ValueError("a batch has rows of beams, which are not supported")
        self._finish_ended(names)
        stops = _array(batch.seq_lens).astype(np.int64)
        if mode is ForwardMode.DECODE:
            # The sequence length may be wrong, whereas the number of tokens computed so far is
            # reliable.
            starts = [sanitizer.num_tokens(name) for name in names]
            starts = np.array([stop - 1 if n < 0 else n for n, stop in zip(starts, stops.tolist())])
            counts = np.ones_like(starts)
        else:
            prefixes = batch.extend_prefix_lens_cpu
            starts = np.array([self._begin(*each) for each in zip(requests, prefixes)], np.int64)
            counts = np.array(batch.extend_seq_lens_cpu, np.int64)
        tokens = _array(batch.input_ids).astype(np.int64)
        sanitizer.observe_tokens(names, starts, counts, tokens)
        written = batch.out_cache_loc_virtual
        written = _array(batch.out_cache_loc if written is None else written).astype(np.int64)
        width = int(np.maximum(stops, starts + counts).max())
        rows = self._runner.req_to_token_pool.req_to_token[:, : width : self._size]
        read = _array(rows[batch.req_pool_indices])
        accesses = [(written, read)]
        if self._to_window is not None:
            mapping = _array(self._to_window)
            accesses.append((mapping[written], mapping[read]))
        tables = []
        for g, (pages, (written, read)) in enumerate(zip(self._pages, accesses)):
            for name, own in zip(names, np.split(written, np.cumsum(counts)[:-1])):
                pages.take(name, own)
            tables.append(pages.blocks(read))
            slots = pages.slots(written)
            sanitizer.observe_write(g, names, starts, counts, slots, tables[-1])
        for g, table in enumerate(tables):
            sanitizer.observe_read(g, names, starts, stops, table)

    def _begin(self, request: Any, num_computed: int) -> int:
        """Observe a request that computes prompt tokens or resumes after a retraction.

        Returns the number of preceding tokens: the tokens of a prefix hit or of earlier chunks or,
        in a mixed batch, all tokens computed so far.
        """
        name, known = request.rid, self._requests.get(request.rid)
        is_new = known is None or known() is not request
        if is_new:
            self.sanitizer.finish(name)
            self._requests[name] = weakref.ref(request)
        if is_new or self.sanitizer.num_tokens(name) != num_computed:
            tokens = np.array([*request.origin_input_ids, *request.output_ids], np.int64)
            salt = (request.extra_key, request.cache_salt)
            self.sanitizer.observe_request(
                name, tokens[:num_computed], adapter=request.lora_id, salt=salt
            )
        return self.sanitizer.num_tokens(name)

    def _finish_ended(self, names: list[str]) -> None:
        """End requests that have finished.

        With overlap scheduling, one more step is computed for a request after it has finished.
        """
        for name in self._requests.keys() - set(names):
            request = self._requests[name]()
            if request is None or request.finished():
                del self._requests[name]
                self.sanitizer.finish(name)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy()
