# SPDX-License-Identifier: Apache-2.0
"""What differs between vLLM's two model runners: the hooks, and where a step's inputs are.

All access to private names of the runners is in this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
import vllm
from vllm.v1.worker import gpu_model_runner, mamba_utils

from kvcache_exchange.plugins.wrapping import wrap_once

try:
    from vllm.v1.worker.gpu import model_runner as second_model_runner
except ImportError:  # this version has only the first runner
    second_model_runner = None

_current: Runner | None = None  # the runner that is executing


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step, in the order of the batch.

    `splits`: int64[n + 1], the first token of each request (`query_start_loc`). `positions` and
    `tokens`: int64[splits[-1]].
    """

    names: list[str]
    splits: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray

    @cached_property
    def starts(self) -> np.ndarray:
        """int64[n], the position of each request's first token."""
        return self.positions[self.splits[:-1]]

    @cached_property
    def counts(self) -> np.ndarray:
        """int64[n], the number of each request's tokens."""
        return np.diff(self.splits)

    @cached_property
    def row_of(self) -> dict[str, int]:
        """The row of each request."""
        return {name: row for row, name in enumerate(self.names)}


class Observer(Protocol):
    """The calls that a runner's hooks make, in this order."""

    def begins(self, output: Any) -> None: ...
    def clears(self, block_ids: list[int]) -> None: ...
    def copies(self, pairs: Any) -> None: ...
    def computes(self, metadata: Any, slot_mappings: Any) -> None: ...
    def runs_dummy(self, slot_mappings: Any) -> None: ...


def runner_of(runner: Any) -> Runner:
    """Return the adapter of a model runner.

    Raises:
        ValueError: The runner is unknown, lacks a hook, or spreads blocks over ranks.
    """
    if isinstance(runner, gpu_model_runner.GPUModelRunner):
        found: Runner = FirstRunner(runner)
    elif second_model_runner and isinstance(runner, second_model_runner.GPUModelRunner):
        found = SecondRunner(runner)
    else:
        raise ValueError(
            f"the model runner is {type(runner).__module__}.{type(runner).__qualname__}: expected one "
            "of vLLM's GPUModelRunner classes"
        )
    missing = [
        name
        for owner, names in found.hooks.items()
        for name in names
        if not hasattr(found.owner(owner), name)
    ]
    if missing:
        raise ValueError(f"the model runner of vLLM {vllm.__version__} has no {', '.join(missing)}")
    parallel = runner.vllm_config.parallel_config
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        raise ValueError("decode context parallelism spreads a block over ranks: not supported")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise ValueError("prefill context parallelism splits a batch over ranks: not supported")
    if getattr(parallel, "use_ubatching", False):
        raise ValueError("microbatches (enable_dbo) split a batch: not supported")
    return found


class Runner:
    """A model runner with hooks."""

    module: Any  # the module from which the runner calls functions
    # Names of methods, by attribute of the runner; "" is the runner itself.
    hooks: ClassVar[dict[str, tuple[str, ...]]]

    def __init__(self, runner: Any) -> None:
        self.runner = runner
        self.is_async = bool(runner.vllm_config.scheduler_config.async_scheduling)
        self._observer: Observer | None = None
        self._is_computing = False
        layers = runner.compilation_config.static_forward_context
        shared = "kv_sharing_target_layer_name"
        self._layers = [
            [name for name in group.layer_names if getattr(layers.get(name), shared, None) is None]
            for group in runner.kv_cache_config.kv_cache_groups
        ]

    def owner(self, attribute: str) -> Any:
        """Return the object with the hooks of an attribute."""
        return getattr(self.runner, attribute) if attribute else self.runner

    def install(self, observer: Observer) -> None:
        """Wrap the hooks."""
        self._observer = self.runner.kvcache_sanitizer = observer
        for attribute, names in self.hooks.items():
            owner = self.owner(attribute)
            for name in names:
                setattr(owner, name, getattr(self, f"_{name.lstrip('_')}")(getattr(owner, name)))
        wrap_once(self.module, "set_forward_context", _forwards)
        wrap_once(self.module, "copy_kv_cache_blocks_inplace", _copies)

    def layers_of(self, gid: int) -> list[str]:
        """Return the names of a group's layers, without those that read another layer's KV: they may
        compute only a part of the batch.
        """
        return self._layers[gid]

    def batch(self) -> StepInputs:
        """Return the inputs of the current step."""
        raise NotImplementedError

    def recorded(self, name: str, first: int, stop: int) -> np.ndarray:
        """Return the tokens [first, stop) of a request as the runner has recorded them. -1: unknown."""
        raise NotImplementedError

    def sampled(self) -> dict[str, int]:
        """Return, for each request, the token that was sampled last, if it is only on the device."""
        return {}

    def table(self, gid: int, num_rows: int) -> np.ndarray:
        """Return the runner's block table of a group, int32[num_rows, width], in blocks of the
        allocator.
        """
        table, size = self._table(gid, num_rows)
        return self._in_blocks(gid, as_array(table), size)

    def table_of_layer(self, seen: Any, gid: int, num_rows: int) -> np.ndarray | None:
        """Return the block table in a layer's metadata in the form of `table`. None: it has another
        form.
        """
        ours, size = self._table(gid, num_rows)
        if not isinstance(seen, torch.Tensor) or seen.ndim != 2 or len(seen) < num_rows:
            return None
        ratio = seen.shape[1] // ours.shape[1]
        if ratio * ours.shape[1] != seen.shape[1] or size % max(ratio, 1):
            return None
        return self._in_blocks(gid, as_array(seen[:num_rows]), size // ratio)

    def _in_blocks(self, gid: int, table: np.ndarray, size: int) -> np.ndarray:
        """Convert entries for blocks of `size` tokens to blocks of the allocator."""
        spec = self.runner.kv_cache_config.kv_cache_groups[gid].kv_cache_spec
        ratio = spec.block_size // size
        return table if ratio == 1 else table[:, ::ratio] // ratio

    def _table(self, gid: int, num_rows: int) -> tuple[torch.Tensor, int]:
        """Return the runner's block table of a group, and the tokens per block of its entries."""
        raise NotImplementedError

    @contextmanager
    def _running(self, is_computing: bool) -> Iterator[None]:
        global _current
        before, _current = (_current, self._is_computing), self
        self._is_computing = is_computing
        try:
            yield
        finally:
            _current, self._is_computing = before

    def _execute_model(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def execute_model(scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
            is_dummy = options.get("dummy_run", False)
            if not is_dummy:
                self._observer.begins(scheduler_output)
            with self._running(is_computing=not is_dummy):
                return original(scheduler_output, *arguments, **options)

        return execute_model

    def _zero_block_ids(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def zero_block_ids(block_ids: list[int]) -> None:
            original(block_ids)
            self._observer.clears(block_ids)

        return zero_block_ids

    def forwards(self, metadata: Any, slot_mappings: Any) -> None:
        """Observe a forward pass."""
        if self._is_computing:
            self._observer.computes(metadata, slot_mappings)
        else:
            self._observer.runs_dummy(slot_mappings)

    def copied(self, pairs: Any) -> None:
        """Observe copies of blocks."""
        self._observer.copies(pairs)


class FirstRunner(Runner):
    """vLLM's first model runner, `vllm.v1.worker.gpu_model_runner`."""

    module = gpu_model_runner
    hooks: ClassVar = {"": ("execute_model", "_dummy_run", "_zero_block_ids")}

    def install(self, observer: Observer) -> None:
        super().install(observer)
        wrap_once(mamba_utils, "collect_mamba_copy_meta", _copies_state)

    def batch(self) -> StepInputs:
        runner = self.runner
        names = list(runner.input_batch.req_ids)
        splits = runner.query_start_loc.np[: len(names) + 1].astype(np.int64)
        total = int(splits[-1])
        positions = as_array(runner.positions[:total]).astype(np.int64)
        return StepInputs(
            names, splits, positions, as_array(runner.input_ids.gpu[:total]).astype(np.int64)
        )

    def recorded(self, name: str, first: int, stop: int) -> np.ndarray:
        batch = self.runner.input_batch
        row = batch.req_id_to_index[name]
        stop = min(stop, max(int(batch.num_tokens_no_spec[row]), first))
        return batch.token_ids_cpu[row, first:stop].astype(np.int64)

    def sampled(self) -> dict[str, int]:
        batch = self.runner.input_batch
        tokens, rows = batch.prev_sampled_token_ids, batch.prev_req_id_to_index
        if tokens is None or not rows or tokens.shape[1] != 1:  # several after accepted drafts
            return {}
        tokens = as_array(tokens)[:, 0]
        return {name: int(tokens[row]) for name, row in rows.items()}

    def _table(self, gid: int, num_rows: int) -> tuple[torch.Tensor, int]:
        table = self.runner.input_batch.block_table[gid]
        return table.get_device_tensor(num_rows), table.block_size

    def _dummy_run(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def dummy_run(*arguments: Any, **options: Any) -> Any:
            with self._running(is_computing=False):
                return original(*arguments, **options)

        return dummy_run


class SecondRunner(Runner):
    """vLLM's second model runner, `vllm.v1.worker.gpu.model_runner`."""

    module = second_model_runner
    hooks: ClassVar = {"": ("execute_model",), "model_state": ("prepare_attn", "preprocess_state")}

    def install(self, observer: Observer) -> None:
        super().install(observer)
        if (zeroer := self.runner.kv_block_zeroer) is not None:
            zeroer.zero_block_ids = self._zero_block_ids(zeroer.zero_block_ids)

    def batch(self) -> StepInputs:
        given = self._inputs
        splits = as_array(given.query_start_loc[: given.num_reqs + 1]).astype(np.int64)
        total = int(splits[-1])
        return StepInputs(
            list(given.req_ids),
            splits,
            as_array(given.positions[:total]).astype(np.int64),
            as_array(given.input_ids[:total]).astype(np.int64),
        )

    def recorded(self, name: str, first: int, stop: int) -> np.ndarray:
        states = self.runner.req_states
        row = states.req_id_to_index[name]
        stop = min(stop, max(int(states.total_len.gpu[row]), first))
        return as_array(states.all_token_ids.gpu[row, first:stop]).astype(np.int64)

    def _table(self, gid: int, num_rows: int) -> tuple[torch.Tensor, int]:
        return self._tables[gid][:num_rows], self.runner.block_tables.block_sizes[gid]

    def _prepare_attn(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def prepare_attn(
            inputs: Any, mode: Any, tables: Any, slot_mappings: Any, *arguments: Any, **options: Any
        ) -> Any:
            metadata = original(inputs, mode, tables, slot_mappings, *arguments, **options)
            self._inputs, self._tables = inputs, tables
            if mode.name == "FULL":  # a graph replay does not set a forward context
                config = self.runner.kv_cache_config
                self.forwards(
                    metadata, self.module.build_slot_mappings_by_layer(slot_mappings, config)
                )
            return metadata

        return prepare_attn

    def _preprocess_state(self, original: Callable) -> Callable:
        @functools.wraps(original)
        def preprocess_state(inputs: Any, tables: Any, *arguments: Any) -> None:
            original(inputs, tables, *arguments)
            state = self.runner.model_state
            if not getattr(state, "_align_mode", False) or not inputs.num_reqs:
                return
            rows = inputs.idx_mapping
            src, dst = (
                as_array(each[rows]).astype(np.int64)
                for each in (state._mamba_src_col_gpu, state._mamba_state_idx_gpu)
            )
            moved = np.flatnonzero((src >= 0) & (src != dst))
            for gid in state._mamba_group_ids:
                table = as_array(tables[gid])
                self.copied(list(zip(table[moved, src[moved]], table[moved, dst[moved]])))

        return preprocess_state


def _forwards(original: Callable) -> Callable:
    @functools.wraps(original)
    def set_forward_context(metadata: Any, *arguments: Any, **options: Any) -> Any:
        if _current is not None:
            _current.forwards(metadata, options.get("slot_mapping"))
        return original(metadata, *arguments, **options)

    return set_forward_context


def _copies(original: Callable) -> Callable:
    @functools.wraps(original)
    def copy_blocks(kv_caches: Any, num_blocks: int, copies: Any) -> None:
        original(kv_caches, num_blocks, copies)
        if _current is not None:
            _current.copied(copies)

    return copy_blocks


def _copies_state(original: Callable) -> Callable:
    @functools.wraps(original)
    def collect(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options)
        if _current is not None:
            gids, src, dst, bias, request = arguments[3:8]
            for blocks in (request.block_ids[gid] for gid in gids):
                _current.copied([(blocks[src + bias], blocks[dst])])

    return collect


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the values of a tensor on the CPU."""
    return tensor.cpu().numpy()


def tokens_of(request: Any) -> list[int] | None:
    """Return the tokens that the scheduler sends with a new request. Those of a resumed request include
    its output.
    """
    tokens = getattr(request, "prefill_token_ids", None)
    return request.prompt_token_ids if tokens is None else tokens
