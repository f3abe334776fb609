"""The block tables of a model with several cache groups."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index

import numpy as np
import torch

from kvcache.checks import flag, integer, listed, num_entries, shown
from kvcache.kinds import make_kind
from kvcache.specs import ContextParallel, GroupSpec, checked_context_parallel, checked_groups
from kvcache.step import NO_IDS, NO_REPLACE, StepPlan
from kvcache.worker.tables.block_table import BlockTable
from kvcache.worker.tables.table_layout import (
    check_by_keyword,
    checked_candidates,
    kernel_size_of,
    layout_of,
)
from kvcache.worker.tables.table_set import Ids, checked_device, make_table_set

# Where other engines pass them by position.
BY_KEYWORD = "num_speculative_tokens, max_num_blocks, kernel_sizes"


class MultiGroupBlockTable:
    """One block table per cache group, in one memory: each call serves all groups at once.

    `[g]` is group g's `BlockTable`. Widths are `max(ceil(max_model_len / (block_size * world size)),
    1 + num_speculative_tokens)` allocation blocks, or `max_num_blocks[g]`. Per group: `kernel_sizes`
    (a list of candidates; one list serves all groups), `slot_mapping=False` (recurrent state has no
    slots), `num_speculative_blocks` (so many columns more, for states after drafts), `replicated=True`
    (held whole by every context-parallel worker), `windows` (tokens that a query sees, None for all),
    `encoder=True` (holds an encoder's tokens, for cross-attention: calls for all groups leave its slots
    alone), `circular=True` (its columns, `max_num_blocks[g]`, are written round: the token at position p
    is in column `p // block_size % columns`). Everything else as for `BlockTable`.

    `for_groups` takes all of these from the groups of a plan. Pass arguments by keyword: engines order
    them differently.

    >>> tables = MultiGroupBlockTable(
    ...     max_num_reqs=4, max_model_len=64, max_num_batched_tokens=32, pin_memory=False,
    ...     device="cpu", block_sizes=[16, 32], kernel_block_sizes=[16, 16],
    ... )
    >>> tables.add_row(([5, 6], [2]), 0)
    >>> tables.compute_slot_mapping(np.array([0, 0]), np.array([1, 17]))
    >>> tables[0].slot_mapping.np[:2], tables[1].slot_mapping.np[:2]
    (array([81, 97]), array([65, 81]))
    """

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device | str,
        block_sizes: Sequence[int],
        kernel_block_sizes: Sequence[int] | None = None,
        num_speculative_tokens: int = 0,
        cp_kv_cache_interleave_size: int = 1,
        *others: object,
        kernel_sizes: Sequence[Sequence[int] | None] | None = None,
        context_parallel: ContextParallel | None = None,
        max_num_blocks: Sequence[int] | None = None,
        num_speculative_blocks: Sequence[int] | None = None,
        slot_mapping: Sequence[bool] | None = None,
        replicated: Sequence[bool] | None = None,
        windows: Sequence[int | None] | None = None,
        encoder: Sequence[bool] | None = None,
        circular: Sequence[bool] | None = None,
        slot_mapping_dtype: torch.dtype = torch.int64,
        pcp_padding: bool = False,
    ) -> None:
        check_by_keyword(others, 9, BY_KEYWORD)
        if not _is_list(block_sizes):
            raise TypeError(
                f"block_sizes is {shown(block_sizes)}: expected a list, one size per group"
            )
        if kernel_block_sizes is not None and not _is_list(kernel_block_sizes):
            raise TypeError(
                f"kernel_block_sizes is {shown(kernel_block_sizes)}: expected a list, one size per "
                f"group; pass {BY_KEYWORD} by keyword"
            )
        if _is_list(num_speculative_tokens):
            raise TypeError(
                f"num_speculative_tokens is {shown(num_speculative_tokens)}: expected an integer; "
                f"pass {BY_KEYWORD} by keyword"
            )
        num_speculative_tokens = integer(num_speculative_tokens, "num_speculative_tokens")
        num_groups = len(block_sizes)
        if num_groups == 0:
            raise ValueError("block_sizes is empty: expected one size per group")
        if kernel_sizes is not None and _is_list(kernel_sizes) and len(kernel_sizes) == 1:
            kernel_sizes = list(kernel_sizes) * num_groups

        def per_group(values: Sequence | None, name: str, default: object) -> Sequence:
            if values is None:
                return [default] * num_groups
            if not _is_list(values):
                raise TypeError(f"{name} is {shown(values)}: expected a list, one entry per group")
            if len(values) != num_groups:
                raise ValueError(
                    f"{name} has {len(values)} entries, block_sizes has {num_groups}: "
                    "expected as many"
                )
            return values

        single = per_group(kernel_block_sizes, "kernel_block_sizes", None)
        candidates = per_group(kernel_sizes, "kernel_sizes", None)
        widths = per_group(max_num_blocks, "max_num_blocks", None)
        spare = per_group(num_speculative_blocks, "num_speculative_blocks", 0)
        with_slots = per_group(slot_mapping, "slot_mapping", True)
        whole = per_group(replicated, "replicated", False)
        seen = per_group(windows, "windows", None)
        encoders = per_group(encoder, "encoder", False)
        rounds = per_group(circular, "circular", False)
        max_model_len = integer(max_model_len, "max_model_len", least=1)
        cp = checked_context_parallel(context_parallel)
        layouts = []
        for g, block_size in enumerate(block_sizes):
            spread = ContextParallel() if flag(whole[g], f"replicated[{g}]") else cp
            block_size = integer(block_size, f"block_sizes[{g}]", least=1)
            tokens = block_size * spread.world_size
            derived = max(-(-max_model_len // tokens), 1 + num_speculative_tokens)
            width = derived if widths[g] is None else widths[g]
            num_spare = integer(spare[g], f"num_speculative_blocks[{g}]")
            layouts.append(
                layout_of(
                    block_size,
                    kernel_size_of(block_size, single[g], candidates[g], f"kernel_sizes[{g}]"),
                    integer(width, f"max_num_blocks[{g}]", least=1) + num_spare,
                    spread,
                    cp_kv_cache_interleave_size,
                    seen[g],
                    with_slots[g],
                    encoders[g],
                    rounds[g],
                    num_spare,
                )
            )
        self._tables = make_table_set(
            layouts,
            cp,
            max_num_reqs,
            max_num_batched_tokens,
            num_speculative_tokens,
            pin_memory,
            device,
            slot_mapping_dtype,
            pcp_padding,
        )
        self.block_tables = [BlockTable._of(self._tables, g) for g in range(num_groups)]

    @classmethod
    def for_groups(
        cls,
        groups: Sequence[GroupSpec],
        *,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        device: torch.device | str = "cpu",
        pin_memory: bool | None = None,
        kernel_sizes: Sequence[int] | None = None,
        context_parallel: ContextParallel | None = None,
        max_encoder_tokens: int | None = None,
        num_speculative_tokens: int = 0,
        cp_kv_cache_interleave_size: int = 1,
        slot_mapping_dtype: torch.dtype = torch.int64,
        pcp_padding: bool = False,
    ) -> MultiGroupBlockTable:
        """The tables of a manager's groups (`CachePlan.groups`), in their order.

        Block sizes, windows, slot mappings and replication follow from the groups and their kinds.
        `kernel_sizes`: candidates for all groups that have slots. `pin_memory` None: on a GPU.
        `max_encoder_tokens`: the most encoder tokens of a request (`CachePlan.max_encoder_tokens`), by
        default `max_model_len`. The others as of the constructor. Raises TypeError or ValueError.

        >>> groups = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 32, {"window": 64})]
        >>> tables = MultiGroupBlockTable.for_groups(
        ...     groups, max_num_reqs=4, max_model_len=64, max_num_batched_tokens=32
        ... )
        >>> [(table.block_size, table.layout.window) for table in tables.block_tables]
        [(16, 0), (32, 64)]
        """
        groups = checked_groups(groups)
        cp = checked_context_parallel(context_parallel)
        device = checked_device(device)
        if kernel_sizes is not None:
            kernel_sizes = checked_candidates(kernel_sizes, "kernel_sizes")
        kinds = [make_kind(group.kind, group.options) for group in groups]
        has_slots = [kind.pages != "state" for kind in kinds]
        is_encoder = [kind.pages == "encoder" for kind in kinds]
        is_circular = [kind.pages == "circular" for kind in kinds]
        widths: list[int | None] = [None] * len(groups)
        if max_encoder_tokens is not None:
            most = integer(max_encoder_tokens, "max_encoder_tokens", least=1)
            if not any(is_encoder):
                raise ValueError(
                    f"max_encoder_tokens is {most}: expected None, as no group's kind has an encoder"
                )
            widths = [
                -(-most // group.tokens_per_block(cp)) if encoder else None
                for group, encoder in zip(groups, is_encoder)
            ]
        for g, (group, kind) in enumerate(zip(groups, kinds)):
            if is_circular[g]:
                tokens = min(integer(max_model_len, "max_model_len", least=1), kind.buffer)
                widths[g] = -(-tokens // group.tokens_per_block(cp))
        return cls(
            max_num_reqs,
            max_model_len,
            max_num_batched_tokens,
            device.type == "cuda" if pin_memory is None else pin_memory,
            device,
            [group.block_size for group in groups],
            kernel_sizes=[kernel_sizes if slots else None for slots in has_slots],
            context_parallel=cp,
            max_num_blocks=widths,
            num_speculative_blocks=[kind.num_speculative_blocks for kind in kinds],
            slot_mapping=has_slots,
            replicated=[group.replicated for group in groups],
            windows=[None if kind.pages == "circular" else kind.window for kind in kinds],
            encoder=is_encoder,
            circular=is_circular,
            num_speculative_tokens=num_speculative_tokens,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
            slot_mapping_dtype=slot_mapping_dtype,
            pcp_padding=pcp_padding,
        )

    def __getitem__(self, group: int) -> BlockTable:
        try:
            return self.block_tables[index(group)]
        except IndexError:
            raise IndexError(f"group is {shown(group)}: expected 0 to {len(self) - 1}") from None
        except TypeError:
            raise TypeError(f"group is {shown(group)}: expected an integer") from None

    def __len__(self) -> int:
        return len(self.block_tables)

    def apply(self, plan: StepPlan, num_blocks: int = -1) -> None:
        """The table part of a step's plan, for all rows and groups in one native call.

        ValueError, with nothing changed, on a row, column or width that is not there, or an id outside
        [0, num_blocks) (where that is given).
        """
        self._tables.apply(plan, num_blocks)

    def append_row(self, block_ids: Sequence[Ids], row: int) -> None:
        """Adds block_ids[g] to a row of each group g; an overflow in one changes none."""
        self._tables.apply(self._row_plan(block_ids, row, clear=False))

    def add_row(self, block_ids: Sequence[Ids], row: int) -> None:
        """Sets a row of each group g to block_ids[g]; an overflow in one changes none."""
        self._tables.apply(self._row_plan(block_ids, row, clear=True))

    def clear_row(self, row: int) -> None:
        """Empties a row in all groups."""
        self._tables.clear_rows([row])

    def clear_rows(self, rows: Ids) -> None:
        """Empties rows in all groups, in one call."""
        self._tables.clear_rows(rows)

    def move_row(self, src: int, tgt: int) -> None:
        """Row `tgt` takes over what `src` holds in all groups, and `src` is cleared."""
        self._tables.move_rows([src], [tgt])

    def move_rows(self, src: Ids, tgt: Ids) -> None:
        """`move_row` for pairs of rows, one after the other, in one call."""
        self._tables.move_rows(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        """Exchanges two rows in all groups."""
        self._tables.swap_rows([src], [tgt])

    def swap_rows(self, src: Ids, tgt: Ids) -> None:
        """`swap_row` for pairs of rows, one after the other, in one call."""
        self._tables.swap_rows(src, tgt)

    def commit_updates(self) -> None:
        """Brings the device up to date: what changed, in one copy and one launch for all groups."""
        self._tables.commit_updates()

    def commit_block_table(self, num_reqs: int) -> None:
        """Uploads the first `num_reqs` rows of every group whole."""
        for group in range(len(self)):
            self._tables.commit_rows(group, num_reqs)

    def compute_slot_mapping(
        self,
        req_indices: np.ndarray | torch.Tensor | None = None,
        positions: np.ndarray | torch.Tensor | None = None,
        *,
        query_start_loc: np.ndarray | torch.Tensor | None = None,
    ) -> None:
        """Slots of all groups that have them, in one call (on a GPU one launch); see `BlockTable`.

        Circular groups take a launch each: their positions go round.

        Groups of an encoder's tokens are left out: their positions are others. Call `[g]`'s own
        `compute_slot_mapping` and `commit_slot_mapping` where an encoder's output is written.
        """
        self._tables.compute_slots(req_indices, positions, query_start_loc)

    def commit_slot_mapping(self, num_tokens: int) -> None:
        """Uploads the slot mappings that `compute_slot_mapping` fills, in one copy."""
        self._tables.commit_slots(num_tokens)

    def gather(
        self,
        idx_mapping: torch.Tensor,
        num_computed_tokens: torch.Tensor | None = None,
        max_num_tokens: int | None = None,
    ) -> list[torch.Tensor]:
        """Rows in batch order, on the device: per group int32[n, width], by one launch for all.

        idx_mapping: int32[n] on the device, the row of each request of the batch, -1 for a padded one,
        whose row is all null. num_computed_tokens: int32[n], tokens before each request's first query:
        entries that have left a group's window become the null block (kernels that read masked tiles
        would meet other requests' NaN there). max_num_tokens: how long rows can be; by default as long
        as they are now, but give `max_model_len` (or the encoder's tokens, if they are more) where a CUDA
        graph is captured. The result is at one
        address, and is overwritten by the next call.
        """
        return self._tables.gather(idx_mapping, num_computed_tokens, max_num_tokens)

    def clear(self) -> None:
        """Zeroes all ids and counts, on the host and on the device."""
        self._tables.clear()

    def _row_plan(self, block_ids: Sequence[Ids], row: int, clear: bool) -> StepPlan:
        row = integer(row, "row")
        groups = listed(block_ids, "block_ids")
        if len(groups) != len(self):
            raise ValueError(
                f"block_ids has {len(groups)} groups: expected {len(self)}, one per table"
            )
        rows = [row]
        return StepPlan(
            step_id=-1,
            rows=rows,
            status=NO_IDS,
            num_computed_tokens=NO_IDS,
            clear_rows=rows if clear else NO_IDS,
            append_rows=rows,
            append_splits=[
                [0, num_entries(ids, f"block_ids[{g}]")] for g, ids in enumerate(groups)
            ],
            append_ids=groups,
            replace=[NO_REPLACE] * len(self),
        )


def _is_list(values: object) -> bool:
    return isinstance(values, Sequence | np.ndarray) and not isinstance(values, str)
