# SPDX-License-Identifier: Apache-2.0
"""Reports the work of an `Engine` to a `Sanitizer`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcache.allocator import Request
from kvcache.assembly import KVCache
from kvcache.checks import instance, shown
from kvcache.sanitizer import SanitizedGroup, Sanitizer
from kvcache.sanitizer.arguments import checked_mode
from kvcache.step import Status, StepReport
from kvcache_exchange.plugins.environment import options_from_environment
from kvcache_exchange.plugins.guard import ObserverGuard
from kvcache_serve.engine.batch import Batch
from kvcache_serve.engine.scheduler import ScheduledStep, Scheduler
from kvcache_serve.engine.sequence import Sequence, State

_KINDS = {
    "full_attention": "full",
    "sliding_window": "window",
    "chunked_local": "chunk",
    "circular_window": "circular",
    "recurrent": "state",
}


def observer_of(
    cache: KVCache, scheduler: Scheduler, sanitizer: Sanitizer | str | None
) -> EngineObserver | None:
    """Return the observer of an engine, or None if no sanitizer is enabled.

    Args:
        cache: The engine's cache.
        scheduler: The engine's scheduler.
        sanitizer: A sanitizer created for this cache (`sanitizer_of`), or the mode of a new sanitizer.
            None: use the environment variables (`kvcache_exchange.plugins.environment`).

    Raises:
        TypeError, ValueError: The mode is unknown, or the sanitizer has other groups or blocks.
    """
    if sanitizer is None:
        options = options_from_environment()
        if options is None:
            return None
        sanitizer = sanitizer_of(cache, **options)
    if isinstance(sanitizer, str):
        sanitizer = sanitizer_of(cache, mode=checked_mode(sanitizer, "sanitizer"))
    if not isinstance(sanitizer, Sanitizer):
        raise TypeError(f"sanitizer is {shown(sanitizer)}: expected a Sanitizer or a mode")
    return EngineObserver(cache, scheduler, sanitizer)


def sanitizer_of(cache: KVCache, **options: object) -> Sanitizer:
    """Return a sanitizer for a cache.

    Args:
        cache: The cache, as built by `attach` or `build`.
        options: Options of `Sanitizer`.

    Raises:
        TypeError: `cache` is not a `KVCache`.
        ValueError: A group's kind is not supported, for example because it is a custom kind.

    Example:
        >>> from kvcache_serve.engine.transformers import attach
        >>> from kvcache_serve.engine.transformers.tiny_models import tiny_model
        >>> paged = attach(tiny_model("llama"), "1MiB", max_model_len=128)
        >>> [group.kind for group in sanitizer_of(paged.cache).groups]
        ['full']
    """
    instance(cache, KVCache, "cache")
    host = cache.host_pages
    return Sanitizer(
        [_group(cache, g) for g in range(len(cache.plan.groups))],
        cache.pages.num_blocks,
        num_host_blocks=0 if host is None else host.num_blocks,
        **options,
    )


def _group(cache: KVCache, g: int) -> SanitizedGroup:
    spec = cache.plan.groups[g]
    if (
        spec.kind not in _KINDS
        or spec.tokens_per_block(cache.plan.context_parallel) != spec.block_size
    ):
        raise ValueError(
            f"group {g} has kind {spec.kind!r}: expected one of {', '.join(_KINDS)} on one "
            "context-parallel rank; the sanitizer supports no other"
        )
    options = dict(spec.options)
    return SanitizedGroup(
        _KINDS[spec.kind],
        spec.block_size,
        window=options.get("window", 0),
        chunk=options.get("chunk_size", 0),
        columns=-(-options.get("buffer", 0) // spec.block_size),
    )


class EngineObserver:
    """Observes the plans and batches of one engine. See `observer_of`."""

    def __init__(self, cache: KVCache, scheduler: Scheduler, sanitizer: Sanitizer) -> None:
        self.sanitizer, self._cache, self._scheduler = sanitizer, cache, scheduler
        self.guard = ObserverGuard(sanitizer)
        wanted = tuple(_group(cache, g) for g in range(len(cache.plan.groups)))
        if sanitizer.groups != wanted or sanitizer.num_blocks != cache.pages.num_blocks:
            raise ValueError("sanitizer has other groups or blocks: expected sanitizer_of(cache)")
        self._held: dict[int, tuple[Sequence, list[np.ndarray]]] = {}  # by row; blocks per group
        self._moves: dict[str, np.ndarray] = {}  # changes made by the worker in this step
        cache.worker.on_move = self._moved
        scheduler.hints.on_load = self._guest_loaded
        self._names: dict[Sequence, str] = {}
        # Number of tokens in the local hit, and number of tokens loaded earlier.
        self._loading: dict[Sequence, tuple[int, int]] = {}
        self._last: tuple[list[Sequence] | None, list[str]] = None, []

    def scheduled(self, step: ScheduledStep) -> None:
        """Observe a scheduled step before its plan is applied."""
        self.guard(self._scheduled, step)

    def applied(self, step: ScheduledStep, report: StepReport) -> None:
        """Observe the changes of a plan that the worker has applied."""
        self.guard(self._applied, step, report)

    def computes(self, step: ScheduledStep, batch: Batch) -> None:
        """Observe a batch's tokens, writes and reads, before the model computes the batch."""
        self.guard(self._computes, step, batch)

    def _scheduled(self, step: ScheduledStep) -> None:
        self.sanitizer.observe_step(step.plan.step_id)
        self._moves = {}
        if self._loading:
            self._observe_loads()
        for sequence in step.loading:
            stop = self._scheduler.manager.num_computed_tokens(sequence.request)
            hit = stop - sequence.num_external_tokens
            self._loading[sequence] = hit, sequence.num_loaded_tokens

    def _moved(self, section: str, pages: np.ndarray) -> None:
        self._moves[section] = pages.astype(np.int64)

    def _applied(self, step: ScheduledStep, report: StepReport) -> None:
        sanitizer = self.sanitizer
        if self._moves or not step.plan.is_empty or step.sequences is not self._last[0]:
            moves, self._moves = self._moves, {}
            if "swap_out" in moves:
                sanitizer.observe_copy(*moves["swap_out"].T, dst_medium="host")
            self._observe_rows(step)
            if "copy" in moves:
                sanitizer.observe_copy(*moves["copy"].T)
            if "zero" in moves:
                sanitizer.observe_clear(moves["zero"])
            if "swap_in" in moves:
                sanitizer.observe_copy(*moves["swap_in"].T, src_medium="host")
        if report.failed_pages:
            sanitizer.observe_clear(report.failed_pages)
        if report.failed_host_pages:
            sanitizer.observe_clear(report.failed_host_pages, medium="host")

    def _computes(self, step: ScheduledStep, batch: Batch) -> None:
        sanitizer, names = self.sanitizer, self._names_of(step)
        starts, counts, stops = batch.starts, batch.query_lens, batch.seq_lens
        tokens = step.token_ids
        tokens = tokens[:, 0] if isinstance(tokens, np.ndarray) else np.concatenate(tokens)
        sanitizer.observe_tokens(names, starts, counts, tokens)
        tables = {}
        for g, group in enumerate(sanitizer.groups):
            if group.kind == "state":
                self._observe_states(g, names, batch)
                continue
            tables[g] = self._table(g, batch.rows)
            slots = batch.slots(g).cpu().numpy()
            sanitizer.observe_write(g, names, starts, counts, slots, tables[g])
        for g, table in tables.items():
            sanitizer.observe_read(g, names, starts, stops, table)

    def _observe_loads(self) -> None:
        """Observe loaded content that has arrived, using the tables as they were before the plan."""
        rows = {sequence: row for row, (sequence, _) in self._held.items()}
        for sequence in [each for each in self._loading if each.state is not State.LOADING]:
            hit, before = self._loading.pop(sequence)
            stop = hit + sequence.num_loaded_tokens - before
            if stop == hit or sequence not in rows:
                continue
            for g, group in enumerate(self.sanitizer.groups):
                table, first = self._table(g, np.array([rows[sequence]])), hit
                if group.kind == "state":
                    table, first = table[:, (stop - 1) // group.block_size, None], stop - 1
                name = self._known(sequence, stop)
                self.sanitizer.observe_load(g, [name], [first], [stop], table)

    def _guest_loaded(self, request: Request, first: int, stop: int) -> None:
        """Observe the blocks that a source has loaded for a hint, before they are freed."""
        self.guard(self._observe_guest, request, first, stop)

    def _observe_guest(self, request: Request, first: int, stop: int) -> None:
        sanitizer, name = self.sanitizer, request.request_id
        sanitizer.observe_request(name, request.token_ids, salt=request.cache_salt)
        for g, group in enumerate(sanitizer.groups):
            table = self._scheduler.manager.block_ids(request, g)[None].astype(np.int64)
            start, column = first, first // group.block_size
            if group.kind == "state":
                start, column = stop - 1, (stop - 1) // group.block_size
                table = table[:, column, None]
                column = 0
            filled = table[0, column : -(-stop // group.block_size)]
            filled = filled[filled > 0]
            sanitizer.observe_allocation(name, filled, group=g)
            sanitizer.observe_load(g, [name], [start], [stop], table)
            sanitizer.observe_free(name, filled, group=g)
        sanitizer.finish(name)

    def _observe_rows(self, step: ScheduledStep) -> None:
        """Observe allocations and frees by comparing the table rows before and after the plan."""
        plan, manager = step.plan, self._scheduler.manager
        changed = {*plan.clear_rows.tolist(), *plan.append_rows.tolist()}
        for each in plan.replace:
            changed.update(each[:, 0].tolist())
        # Tables keep the entries of rows whose sequences are swapped out or have ended.
        leaving = plan.answers.swap_out
        left = set(leaving.rows[leaving.status == Status.SERVED].tolist())
        sequences = {
            manager.row(each.request): each
            for each in self._scheduler.admitted
            if each.state in (State.RUNNING, State.LOADING)
        }
        left.update(row for row, (old, _) in self._held.items() if sequences.get(row) is not old)
        before = {row: self._held.pop(row) for row in changed | left if row in self._held}
        after = {}
        for row in changed - (left - sequences.keys()):
            blocks = [self._held_blocks(g, row) for g in range(len(self.sanitizer.groups))]
            if row in sequences and any(map(len, blocks)):
                after[row] = sequences[row], blocks
        self._held.update(after)
        for row, (sequence, blocks) in before.items():
            self._compare(row, sequence, blocks, after, self.sanitizer.observe_free)
        for row, (sequence, blocks) in after.items():
            self._compare(row, sequence, blocks, before, self.sanitizer.observe_allocation)

    def _compare(
        self,
        row: int,
        sequence: Sequence,
        blocks: list[np.ndarray],
        others: dict[int, tuple[Sequence, list[np.ndarray]]],
        observe: Callable,
    ) -> None:
        """Pass a row's blocks to `observe`, except for blocks that the row also has in `others`."""
        other, kept = others.get(row, (None, None))
        for g, mine in enumerate(blocks):
            found = np.setdiff1d(mine, kept[g]) if other is sequence else mine
            if len(found):
                observe(self._name(sequence), found, group=g)

    def _held_blocks(self, g: int, row: int) -> np.ndarray:
        table = self._cache.tables[g]
        if row >= len(table.block_table.np):
            return np.zeros(0, np.int64)
        ids = table.block_table.np[row, : table.num_blocks_per_row[row]]
        blocks = np.unique(ids // table.blocks_per_kv_block)
        return blocks[blocks > 0].astype(np.int64)

    def _table(self, g: int, rows: np.ndarray) -> np.ndarray:
        table, ratio = self._cache.tables[g], self._cache.tables[g].blocks_per_kv_block
        ids = table.block_table.np[rows]
        return ids if ratio == 1 else ids[:, ::ratio] // ratio

    def _observe_states(self, g: int, names: list[str], batch: Batch) -> None:
        sanitizer, pages = self.sanitizer, batch.state_pages(g).astype(np.int64)
        sanitizer.observe_state_read(g, names, batch.starts, pages[:, 0])
        known = batch.seq_lens - batch.num_drafts
        sanitizer.observe_state_write(g, names, known, pages[:, 0])
        for draft in range(1, int(batch.num_drafts.max()) + 1):
            has = batch.num_drafts >= draft
            own = [name for name, mine in zip(names, has) if mine]
            sanitizer.observe_state_write(g, own, known[has] + draft, pages[has, draft])

    def _names_of(self, step: ScheduledStep) -> list[str]:
        """Begin and finish requests in the sanitizer, and return the names of a step's sequences."""
        if step.sequences is self._last[0]:
            return self._last[1]
        for sequence in [each for each in self._names if each.state is State.FINISHED]:
            self.sanitizer.finish(self._names.pop(sequence))
        names = [self._known(*each) for each in zip(step.sequences, step.starts.tolist())]
        self._last = step.sequences, names
        return names

    def _name(self, sequence: Sequence) -> str:
        name = self._names.get(sequence)
        if name is None:
            generation = getattr(sequence, "generation", None)
            name = sequence.request.request_id
            if generation is not None:
                name = f"{generation.request_id}/{name}"
            self._names[sequence] = name
            self._known(sequence, 1)
        return name

    def _known(self, sequence: Sequence, num_tokens: int) -> str:
        """Pass at least `num_tokens` tokens of a sequence to the sanitizer, and return its name."""
        name, request = self._name(sequence), sequence.request
        if self.sanitizer.num_tokens(name) < num_tokens:
            self.sanitizer.observe_request(name, request.token_ids, salt=request.cache_salt)
        return name
