# SPDX-License-Identifier: Apache-2.0
"""Reports the steps of a vLLM worker to a `Sanitizer`.

The observer reads what the model runner hands to the layers: the tokens and positions of the batch, and
each layer's slot mapping, block table and lengths. It compares them with the scheduler's output, and
observes copies of blocks and recurrent states, and blocks that a connector has filled.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvcache.sanitizer import SanitizedGroup, Sanitizer
from kvcache_exchange.plugins.environment import options_from_environment
from kvcache_exchange.plugins.guard import ObserverGuard
from kvcache_vllm.sanitizer.block_bytes import BlockBytes, has_host_tier
from kvcache_vllm.sanitizer.checks import StepChecks
from kvcache_vllm.sanitizer.holds import Holds
from kvcache_vllm.sanitizer.runners import StepInputs, as_array, runner_of, tokens_of

_log = logging.getLogger("kvcache.sanitizer")
_SPECS = (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)


def observe(worker: Any, sanitizer: Sanitizer | None = None) -> WorkerObserver:
    """Observe the model runner of a worker whose KV cache is allocated.

    Args:
        worker: A worker of vLLM, on a CPU or a GPU.
        sanitizer: The sanitizer. None: a sanitizer with options from the environment.

    Returns:
        The observer, which is also stored in `worker.model_runner.kvcache_sanitizer`.

    Raises:
        ValueError: The model runner or its cache layout is not supported.

    Example:
        >>> import os
        >>> os.environ["KVCACHE_SANITIZE"] = "1"  # before vLLM starts, instead of a call
    """
    observer = WorkerObserver(worker.model_runner, sanitizer)
    observer.install()
    return observer


def _checked_group(spec: KVCacheSpec, is_drafting: bool) -> SanitizedGroup | str:
    """Return a group, or the reason why it is not checked."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        each = [_checked_group(one, is_drafting) for one in spec.kv_cache_specs.values()]
        return each[0] if all(one == each[0] for one in each) else "its layers differ in kind"
    if isinstance(spec, MambaSpec):
        if is_drafting:
            return "states of draft tokens are copied by a kernel that is not observed"
        return SanitizedGroup("state", 1)  # one state per page, regardless of the number of tokens
    if type(spec) not in _SPECS:  # subclasses may read other tokens
        return f"{type(spec).__name__} is not supported"
    size, chunk = spec.block_size, getattr(spec, "attention_chunk_size", None)
    if chunk is not None:
        return SanitizedGroup("chunk", size, chunk=chunk)
    window = getattr(spec, "sliding_window", None)
    return (
        SanitizedGroup("full", size)
        if window is None
        else SanitizedGroup("window", size, window=window)
    )


class WorkerObserver:
    """Observes one model runner. See `observe`."""

    def __init__(self, runner: Any, sanitizer: Sanitizer | None = None) -> None:
        self._runner = runner_of(runner)
        config = runner.kv_cache_config
        is_drafting = runner.speculative_config is not None
        self.unchecked: dict[int, str] = {}
        self._gids: list[int] = []  # vLLM's number of each sanitized group
        groups = []
        for gid, group in enumerate(config.kv_cache_groups):
            checked = _checked_group(group.kv_cache_spec, is_drafting)
            if isinstance(checked, str):
                self.unchecked[gid] = checked
                _log.warning("The KV cache sanitizer does not check group %d: %s", gid, checked)
                continue
            self._gids.append(gid)
            groups.append(checked)
        if not groups:
            raise ValueError("no cache group can be checked")
        if sanitizer is None:
            sanitizer = Sanitizer(groups, config.num_blocks, **(options_from_environment() or {}))
        elif sanitizer.groups != tuple(groups):
            raise ValueError(f"sanitizer has groups {sanitizer.groups}: expected {tuple(groups)}")
        self.sanitizer = sanitizer
        specs = [config.kv_cache_groups[gid].kv_cache_spec for gid in self._gids]
        self._sizes = [spec.block_size for spec in specs]
        self._holds = Holds(sanitizer, self._gids, self._sizes)
        self._arguments: dict[str, dict[str, object]] = {}  # arguments for `observe_request`
        self._loaded: set[str] = set()  # requests for which a connector loaded blocks
        self._bytes: BlockBytes | None = None
        # Number of tokens of each request that are certain after the last step, without drafts.
        self._verified: dict[str, int] = {}
        # For each request with drafts in the last step, the position of its first token.
        self._drafted: dict[str, int] = {}
        self._has_sync_loads = False
        self._guard = ObserverGuard(sanitizer)
        self._checks = StepChecks(sanitizer, self._runner, self._gids)

    def install(self) -> None:
        """Wrap the hooks of the model runner."""
        self._runner.install(self)
        if has_kv_transfer_group():
            connector = get_kv_transfer_group()
            if has_host_tier(connector):
                self._bytes = BlockBytes(self._runner.runner, self.sanitizer, self._gids)
                self.unchecked |= self._bytes.unchecked
            name = "get_transfer_results"  # name of the method in later versions
            name = name if hasattr(connector, name) else "get_finished"
            setattr(connector, name, self._get_finished(getattr(connector, name)))

    def findings(self) -> dict[str, object]:
        """See `kvcache_vllm.sanitizer.findings`."""
        return self._guard.findings() | {
            "unchecked": self.unchecked,
            "blocks_loaded": 0 if self._bytes is None else self._bytes.num_loaded,
            "loads_checked": 0 if self._bytes is None else self._bytes.num_checked,
        }

    # Calls of the model runner ------------------------------------------------------------------------

    def begins(self, output: Any) -> None:
        """Observe the scheduler's output, before the runner acts on it."""
        self._guard(self._begin, output)

    def computes(self, metadata: Any, slot_mappings: Any) -> None:
        """Observe a forward pass of the batch, with what each layer receives."""
        self._guard(self._computes, metadata, slot_mappings)

    def runs_dummy(self, slot_mappings: Any) -> None:
        """Observe a forward pass without requests."""
        self._guard(self._checks.check_dummy, slot_mappings)

    def clears(self, block_ids: list[int]) -> None:
        """Observe blocks that were zeroed."""
        self._guard(self.sanitizer.observe_clear, block_ids)

    def copies(self, pairs: Any) -> None:
        """Observe copies of blocks, (source, destination)."""
        self._guard(self._observe_copies, pairs)

    def _get_finished(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def get_finished(finished_req_ids: set[str]) -> Any:
            result = original(finished_req_ids)
            self._guard(self._observe_loaded, result)
            return result

        return get_finished

    def _observe_loaded(self, result: Any) -> None:
        self._loaded.update(
            (result[1] if isinstance(result, tuple) else result.finished_recving) or ()
        )

    def _observe_copies(self, copies: Any) -> None:
        pairs = np.array([tuple(each) for each in copies], np.int64).reshape(-1, 2)
        self.sanitizer.observe_copy(pairs[:, 0], pairs[:, 1])

    # A step -------------------------------------------------------------------------------------------

    def _begin(self, output: Any) -> None:
        """Observe the scheduler's decisions before the worker acts on them."""
        sanitizer, holds = self.sanitizer, self._holds
        self._output = output
        self._checks.begin(output)
        if self._bytes is not None:
            for name, num_tokens in self._verified.items():
                self._bytes.observe(name, holds.of(name), num_tokens)
            self._verified = {}
        sanitizer.observe_step()
        self._has_sync_loads = getattr(output, "has_sync_kv_loads", has_kv_transfer_group())
        for name in output.finished_req_ids:
            holds.release(name)
            sanitizer.finish(name)
            self._arguments.pop(name, None)
            self._loaded.discard(name)
            if self._bytes is not None:
                self._bytes.finish(name)
        for name in output.preempted_req_ids or ():
            holds.release(name)
        cached = output.scheduled_cached_reqs
        holds.scheduled = output.num_scheduled_tokens.keys()
        holds.leave(cached.req_ids, self._num_computed(cached))
        begun = []
        for request in output.scheduled_new_reqs:
            name, tokens = request.req_id, tokens_of(request)
            if tokens is None or request.prompt_embeds is not None:
                raise ValueError(f"{name!r} has prompt embeddings, which are not supported")
            images = [
                (each.mm_position.offset, each.mm_position.length, each.identifier)
                for each in request.mm_features
            ]
            lora = None if request.lora_request is None else request.lora_request.lora_name
            self._arguments[name] = {"adapter": lora, "images": images}
            begun.append((name, tokens, request.block_ids, request.num_computed_tokens))
        for name, blocks, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
        ):
            if name in cached.resumed_req_ids:
                begun.append((name, cached.all_token_ids[name], blocks, num_computed))
            elif blocks is not None:
                holds.take(name, blocks, 0)
        for name, *_ in begun:
            holds.release(name)
        # Begin requests with loads first, because other requests of the step may hit loaded blocks.
        for each in sorted(begun, key=lambda each: each[0] not in self._loaded):
            self._begin_request(*each)

    def _num_computed(self, cached: Any) -> list[int]:
        """Return, for each request, the number of tokens that are certain to be computed."""
        if not (self._runner.is_async and self._drafted):
            return cached.num_computed_tokens
        # The scheduler counts all drafts of the previous step, although some may be rejected.
        return [
            min(count, self._drafted.get(name, count) + 1)
            for name, count in zip(cached.req_ids, cached.num_computed_tokens)
        ]

    def _begin_request(
        self, name: str, tokens: list[int], blocks: tuple[list[int], ...], num_computed: int
    ) -> None:
        """Observe a new or resumed request, with `num_computed` tokens from prefix hits and loads."""
        sanitizer = self.sanitizer
        sanitizer.observe_request(name, tokens[:num_computed], **self._arguments[name])
        self._holds.take(name, blocks, num_computed)
        is_loaded = num_computed > 0 and (name in self._loaded or self._has_sync_loads)
        self._loaded.discard(name)
        for g, gid in enumerate(self._gids) if is_loaded else ():
            table, first = np.array([self._holds.exclusive(name, g, blocks[gid])], np.int64), 0
            if sanitizer.groups[g].kind == "state":
                first = num_computed - 1
                table = table[:, first // self._sizes[g], None]
            sanitizer.observe_load(g, [name], [first], [num_computed], table)
        if self._bytes is not None:
            self._bytes.begin(name, self._holds.of(name), num_computed, is_loaded)

    def _computes(self, metadata: Any, slot_mappings: Any) -> None:
        """Observe the tokens, writes and reads of a step, before the model computes it."""
        sanitizer, batch = self.sanitizer, self._runner.batch()
        names, starts, counts = batch.names, batch.starts, batch.counts
        stops = starts + counts
        self._checks.check_batch(batch, self._drafted)
        self._observe_accepted(batch)
        sanitizer.observe_tokens(names, starts, counts, batch.tokens)
        tables = {}
        if self._bytes is not None:
            ends = zip(names, starts.tolist(), stops.tolist())
            self._verified = {
                name: start + 1 if name in self._drafted else stop for name, start, stop in ends
            }
        for g, gid in enumerate(self._gids):
            if sanitizer.groups[g].kind == "state":
                table = self._runner.table(gid, len(names))
                self._observe_states(g, names, starts, stops, table)
                self._observe_checkpoints(g, names, starts, self._layer_metadata(metadata, gid))
                continue
            table, lengths = self._checks.rows(g, gid, batch, metadata)
            tables[g] = table, lengths
            slots = self._checks.slots(gid, batch, slot_mappings, metadata)
            sanitizer.observe_write(g, names, starts, counts, slots, table)
        for g, (table, seq_lens) in tables.items():
            sanitizer.observe_read(g, names, starts, seq_lens, table)

    def _observe_accepted(self, batch: StepInputs) -> None:
        """Observe which drafts of the previous step were accepted."""
        for name, first in self._drafted.items():
            row = batch.row_of.get(name)
            if row is None or batch.starts[row] <= first:
                continue
            tokens = self._runner.recorded(name, first, int(batch.starts[row]))
            if tokens.min() >= 0:  # otherwise, the counts are still on the device
                self.sanitizer.observe_tokens([name], [first], [len(tokens)], tokens)
        drafts = self._output.scheduled_spec_decode_tokens
        self._drafted = {
            name: int(batch.starts[i]) for i, name in enumerate(batch.names) if name in drafts
        }

    def _observe_states(
        self, g: int, names: list[str], starts: np.ndarray, stops: np.ndarray, table: np.ndarray
    ) -> None:
        sanitizer, size = self.sanitizer, self._sizes[g]
        rows, mode = np.arange(len(names)), self._runner.runner.cache_config.mamba_cache_mode
        first = last = np.zeros_like(starts)
        if mode != "none":
            last = (stops - 1) // size
            first = last if mode == "align" else np.maximum(starts - 1, 0) // size
        sanitizer.observe_state_read(g, names, starts, table[rows, first].astype(np.int64))
        if mode == "all":  # a state at the end of each block
            for i, name in enumerate(names):
                ends = np.arange(starts[i] // size + 1, (stops[i] - 1) // size + 1)
                if len(ends):
                    pages = table[i, ends - 1].astype(np.int64)
                    sanitizer.observe_state_write(g, [name] * len(ends), ends * size, pages)
        sanitizer.observe_state_write(g, names, stops, table[rows, last].astype(np.int64))

    def _observe_checkpoints(
        self, g: int, names: list[str], starts: np.ndarray, layer: Any
    ) -> None:
        """Observe states that a prompt chunk writes at positions inside the chunk."""
        found = getattr(layer, "checkpoint_meta", None) or getattr(layer, "checkpoint", None)
        if found is None:
            return
        rows, offsets = as_array(found.request_rows), np.array(found.offsets, np.int64)
        rows, pages = rows[offsets > 0], as_array(found.state_indices)[offsets > 0].astype(np.int64)
        counts = starts[rows] + offsets[offsets > 0]
        self.sanitizer.observe_state_write(g, [names[row] for row in rows], counts, pages)

    def _layer_metadata(self, metadata: Any, gid: int) -> Any:
        """Return the metadata of the first layer of a group, or None if there is none."""
        return None if metadata is None else metadata.get(self._runner.layers_of(gid)[0])
