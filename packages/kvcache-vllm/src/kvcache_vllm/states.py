# SPDX-License-Identifier: Apache-2.0
"""Additional bookkeeping for the blocks of recurrent states (Mamba) in vLLM."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from kvcache import allocator
from kvcache.allocator import KVCacheManager
from kvcache.kinds import kind_class
from kvcache.specs import GroupSpec
from kvcache.step import StepReport
from kvcache_vllm.refusals import refused


class StateGroups:
    """The state groups of a model, and the state blocks that the current step uses.

    The worker copies a state at the start of a step and writes it at the end. Therefore, a state
    written in a step can be hit only from the next step on, and the source page of a copy is not
    reused before the next step. Models with states also require new attention blocks to be cleared.

    Attributes:
        any: Whether the methods must be called.
        are_copied: Whether the worker copies states between pages.
        has_drafts: Whether the states after drafts are kept in separate pages.
        are_final: Whether the manager cannot go back to an earlier token.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        groups: Sequence[GroupSpec],
        enable_caching: bool,
        hash_block_size: int,
    ) -> None:
        specs = [group.kv_cache_spec for group in config.kv_cache_groups]
        are_states = [isinstance(spec, MambaSpec) for spec in specs]
        self.any = any(are_states) or config.needs_kv_cache_zeroing
        # Groups whose states the worker copies between pages.
        self._copied = [
            g for g, spec in enumerate(specs) if getattr(spec, "mamba_cache_mode", "") == "align"
        ]
        self.are_copied = bool(self._copied)
        self.has_drafts = any(getattr(spec, "num_speculative_blocks", 0) for spec in specs)
        self.are_final = self.are_copied and not self.has_drafts
        self._cached = [g for g, is_state in enumerate(are_states) if is_state and enable_caching]
        self._sizes = [group.block_size for group in groups]
        self._zeroed = [
            g
            for g, is_state in enumerate(are_states)
            if config.needs_kv_cache_zeroing
            and not is_state
            and not kind_class(groups[g].kind).pages.wraps
        ]
        self._filled: set[int] = set()  # blocks whose states are computed in the current step
        self._new: list[int] = []
        self._step_id: int | None = None
        finer = [self._sizes[g] for g in self._copied if self._sizes[g] != hash_block_size]
        if finer and enable_caching:
            raise refused(
                "fine hashes",
                f"each hash covers {hash_block_size} tokens, but blocks of states {finer[0]}",
            )

    def begin_step(self, native: KVCacheManager) -> None:
        """Start a step. The previous step has been sent to the workers."""
        self._filled.clear()
        self.release_left(native)

    def release_left(self, native: KVCacheManager) -> None:
        """Release the pages that states have left so far.

        Pages that they leave later remain held.
        """
        if not self._copied:
            return
        plan = native.step()
        if self._step_id is not None:
            native.report(StepReport(self._step_id, completed=True))
        self._step_id = plan.step_id

    def note_filled(
        self, native: KVCacheManager, request: allocator.Request, start: int, stop: int
    ) -> None:
        """Record that the current step computes the request's tokens [`start`, `stop`)."""
        for group in self._cached:
            first, last = start // self._sizes[group], stop // self._sizes[group]
            if last > first:
                self._filled.update(native.block_ids(request, group)[first:last].tolist())

    def are_fresh(self, hits: Sequence[np.ndarray]) -> bool:
        """Return whether the current step computes a state at the end of these hits."""
        return any(len(hits[g]) and int(hits[g][-1]) in self._filled for g in self._cached)

    def last_of(self, hits: Sequence[np.ndarray] | None) -> list[tuple[int, int, int]]:
        """Return the (group, column, block) of each state that is copied from a hit."""
        if not hits:
            return []
        return [(g, len(hits[g]) - 1, int(hits[g][-1])) for g in self._copied if len(hits[g])]

    def last_held(
        self, native: KVCacheManager, request: allocator.Request, num_computed: int
    ) -> list[tuple[int, int, int]]:
        """Return the (group, column, block) of each of the request's states after `num_computed`
        tokens.
        """
        if num_computed == 0:
            return []
        columns = [(g, (num_computed - 1) // self._sizes[g]) for g in self._copied]
        return [(g, at, int(native.block_ids(request, g)[at])) for g, at in columns]

    def note_new(self, ids: Sequence[list[int]], skipped: Sequence[int] = ()) -> None:
        """Record newly allocated blocks by group. Groups in `skipped` need no clearing."""
        if ids:
            self._new += self.zeroed_of(ids, skipped)

    def zeroed_of(self, ids: Sequence[list[int]], skipped: Sequence[int] = ()) -> list[int]:
        """Return the blocks in the groups whose new blocks are cleared."""
        return [
            each for group in self._zeroed if group not in skipped for each in ids[group] if each
        ]

    def take_new(self) -> list[int]:
        """Return the blocks to clear, each once."""
        new, self._new = self._new, []
        return new
