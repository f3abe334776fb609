# SPDX-License-Identifier: Apache-2.0
"""Block tables of vLLM's NPU variant (`vllm_ascend/worker/block_table.py`), over `kvcache.BlockTables`.

A caller replaces `from vllm_ascend.worker.block_table import` by
`from kvcache.compat.ascend_block_table import`.

| there | here |
|---|---|
| `BlockTable(..., device, kernel_sizes, cp_kv_cache_interleave_size, num_speculative_tokens, kv_cache_group)` | the same |
| `MultiGroupBlockTable(..., block_sizes, num_speculative_tokens, max_num_blocks, kernel_sizes, cp_kv_cache_interleave_size, kv_cache_groups)` | the same |
| `compute_slot_mapping(num_reqs, query_start_loc, positions)`, or in older versions `(req_indices, positions)` | the same |
| `compute_slot_mapping_draft(req_indices, positions)` uploads the slots | the same, with every candidate of `kernel_sizes`, not only the first one |
| `physical_block_size`, `logical_block_size`, `blocks_per_phys_block` | the same |
| `slot_mapping` is int32, and longer than `max_num_batched_tokens` | the same: `2 * pcp_world_size * max_num_reqs` more entries |
| a group whose spec is a `MambaSpec` has no slots, and with DCP rows for the blocks of all ranks | the same, or `slot_mapping=False` and `replicated=True` |
| rows of a group with a `compress_ratio` are shorter | not shorter: pass `max_num_blocks` |
| `use_fused_slot_mapping`, `enable_multistream_slot_mapping` | accepted, and not needed: all groups are computed in one call |
| `slot_mapping_cpu`, `block_table_np` and the like of older versions | `slot_mapping.cpu`, `block_table.np`, as in newer versions |
| `get_dcp_group()`, a global of the process | `context_parallel=ContextParallel(...)`: a library has no such global |
| with DCP and a kernel block below the block size, slots of a whole block are interleaved | interleaved within a kernel block, as in vLLM |

>>> table = BlockTable(128, 4, 8, 64, False, "cpu", [96, 64], 1, 0)
>>> table.add_row([7], 0)
>>> table.compute_slot_mapping(1, np.array([0, 2], np.int32), np.array([3, 70]))
>>> table.logical_block_size, table.slot_mapping.np[:3]
(64, array([899, 966,  -1], dtype=int32))
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvcache.checks import flag, integer, listed
from kvcache.compat import vllm_block_table as vllm
from kvcache.compat.vllm_block_table import Tokens, check_one_per_group
from kvcache.specs import ContextParallel, checked_context_parallel


class AscendBlockTable(vllm.BlockTable):
    """The block table of one group, as in vLLM's NPU variant.

    Arguments that are not listed here are those of `vllm_block_table.BlockTable`.

    Args:
        kernel_sizes: Candidates for the kernel block size. None or [0]: `block_size`.
        num_speculative_tokens: Maximum number of draft tokens of a request in a step.
        kv_cache_group: An object with `kv_cache_spec`. If the spec is a `MambaSpec`, the group has no
            slots, and every context-parallel rank stores its states.
        **options: `kernel_block_size`, `context_parallel`, `slot_mapping` and other keywords of
            `vllm_block_table.BlockTable`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        block_size: int,
        max_num_reqs: int,
        max_num_blocks_per_req: int,
        max_num_batched_tokens: int,
        pin_memory: bool = False,
        device: torch.device | str = "cpu",
        kernel_sizes: Sequence[int] | None = None,
        cp_kv_cache_interleave_size: int = 1,
        num_speculative_tokens: int = 0,
        kv_cache_group: object | None = None,
        **options: Any,
    ) -> None:
        if _has_states(kv_cache_group):
            options = {"slot_mapping": False, "replicated": True, **options}
            cp = checked_context_parallel(options.get("context_parallel"))
            count = integer(max_num_blocks_per_req, "max_num_blocks_per_req", 1)
            max_num_blocks_per_req = count * cp.world_size
        super().__init__(
            block_size,
            max_num_reqs,
            max_num_blocks_per_req,
            max_num_batched_tokens,
            pin_memory,
            device,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
            kernel_sizes=kernel_sizes,
            num_speculative_tokens=num_speculative_tokens,
            **{"slot_mapping_dtype": torch.int32, "pcp_padding": True, **options},
        )

    @property
    def physical_block_size(self) -> int:
        """Tokens per allocation block."""
        return self.shape.block_size

    @property
    def logical_block_size(self) -> int:
        """Tokens per block of the attention kernel."""
        return self.block_size

    @property
    def blocks_per_phys_block(self) -> int:
        """Kernel blocks per allocation block."""
        return self.blocks_per_kv_block

    @property
    def is_mamba_group(self) -> bool:
        """Whether the group has no slots."""
        return not self.shape.slot_mapping

    def compute_slot_mapping_draft(self, req_indices: Tokens, positions: Tokens) -> None:
        """Compute and upload the slots of tokens, given the row of each."""
        self.compute_slot_mapping(req_indices, positions)
        self.commit_slot_mapping(len(positions))


class AscendMultiGroupBlockTable(vllm.MultiGroupBlockTable):
    """The block tables of all groups, as in vLLM's NPU variant. Lists have one entry per group.

    Arguments that are not listed here are those of `vllm_block_table.MultiGroupBlockTable`.

    Args:
        num_speculative_tokens: Maximum number of draft tokens of a request in a step.
        max_num_blocks: Allocation blocks per row. None: see `vllm_block_table.MultiGroupBlockTable`.
        kernel_sizes: Lists of candidates for the kernel block size. A single list applies to all groups.
        kv_cache_groups: See `BlockTable`.
        **options: Other keywords of `vllm_block_table.MultiGroupBlockTable`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range, or a list has the wrong length.

    Example:
        >>> tables = MultiGroupBlockTable(4, 64, 32, False, "cpu", [16, 32], 0, [5, 3], [[16]])
        >>> [table.blocks_per_phys_block for table in tables.block_tables]
        [1, 2]
    """

    _table_type = AscendBlockTable
    block_tables: list[AscendBlockTable]

    if TYPE_CHECKING:

        def __getitem__(self, group: int) -> AscendBlockTable: ...

    def __init__(
        self,
        max_num_reqs: int,
        max_model_len: int,
        max_num_batched_tokens: int,
        pin_memory: bool,
        device: torch.device | str,
        block_sizes: Sequence[int],
        num_speculative_tokens: int = 0,
        max_num_blocks: Sequence[int | None] | None = None,
        kernel_sizes: Sequence[Sequence[int] | None] | None = None,
        cp_kv_cache_interleave_size: int = 1,
        kv_cache_groups: Sequence[object] | None = None,
        *,
        context_parallel: ContextParallel | None = None,
        use_fused_slot_mapping: bool = True,
        enable_multistream_slot_mapping: bool = False,
        **options: Any,
    ) -> None:
        flag(use_fused_slot_mapping, "use_fused_slot_mapping")
        flag(enable_multistream_slot_mapping, "enable_multistream_slot_mapping")
        if kv_cache_groups is not None:
            groups = listed(kv_cache_groups, "kv_cache_groups")
            check_one_per_group(groups, len(listed(block_sizes, "block_sizes")), "kv_cache_groups")
            has_states = [*map(_has_states, groups)]
            slots = [not each for each in has_states]
            options = {"slot_mapping": slots, "replicated": has_states, **options}
            if max_num_blocks is not None:
                max_num_blocks = listed(max_num_blocks, "max_num_blocks")
                world_size = checked_context_parallel(context_parallel).world_size
                for g, (count, whole) in enumerate(zip(max_num_blocks, has_states)):
                    if whole and count is not None:
                        count = integer(count, f"max_num_blocks[{g}]", 1)
                        max_num_blocks[g] = count * world_size
        super().__init__(
            max_num_reqs,
            max_model_len,
            max_num_batched_tokens,
            pin_memory,
            device,
            block_sizes,
            num_speculative_tokens=num_speculative_tokens,
            cp_kv_cache_interleave_size=cp_kv_cache_interleave_size,
            kernel_sizes=kernel_sizes,
            max_num_blocks=max_num_blocks,
            context_parallel=context_parallel,
            **{"slot_mapping_dtype": torch.int32, "pcp_padding": True, **options},
        )

    def compute_slot_mapping(
        self,
        req_indices: Tokens | int | None = None,
        *others: Any,
        positions_compressed_list: Sequence[np.ndarray] | None = None,
        req_indices_compressed_list: Sequence[np.ndarray] | None = None,
        **named: Any,
    ) -> None:
        """Compute the slots of all groups. See `vllm_block_table.BlockTable`. The two lists, which may
        also follow three positional arguments, are those of `compute_slot_mapping_draft`, which is
        called if both are given.
        """
        lists = (positions_compressed_list, req_indices_compressed_list)
        if len(others) > 2:
            if len(others) > 4 or lists != (None, None):
                raise TypeError(
                    f"{1 + len(others)} positional arguments: expected (num_reqs, query_start_loc, "
                    "positions, positions_compressed_list, req_indices_compressed_list), each once"
                )
            lists = (*others[2:], None)[:2]
        rows = self._compressed(*lists)
        if rows is not None:
            self._compute_drafts(*rows)
        else:
            super().compute_slot_mapping(req_indices, *others[:2], **named)

    def compute_slot_mapping_draft(
        self,
        req_indices: Tokens,
        positions: Tokens,
        positions_compressed_list: Sequence[np.ndarray] | None = None,
        req_indices_compressed_list: Sequence[np.ndarray] | None = None,
    ) -> None:
        """Compute and upload the slots of tokens, given the row of each.

        Args:
            req_indices: int32[n]. The row of each token, for all groups.
            positions: int64[n]. Token positions within their requests.
            positions_compressed_list: One array of positions per group, instead of `positions`.
            req_indices_compressed_list: One array of rows per group, instead of `req_indices`.
        """
        rows = self._compressed(positions_compressed_list, req_indices_compressed_list)
        if rows is None:
            self._compute_drafts([positions] * len(self), [req_indices] * len(self))
        else:
            self._compute_drafts(*rows)

    def _compute_drafts(self, positions: Sequence[Any], req_indices: Sequence[Any]) -> None:
        for table, where, rows in zip(self.block_tables, positions, req_indices):
            if not table.is_mamba_group:
                table.compute_slot_mapping_draft(rows, where)

    def _compressed(
        self, positions: Sequence[np.ndarray] | None, req_indices: Sequence[np.ndarray] | None
    ) -> tuple[list[np.ndarray], list[np.ndarray]] | None:
        """Return both lists. None unless both have entries."""
        names = ("positions_compressed_list", "req_indices_compressed_list")
        found = [listed(each or (), name) for each, name in zip((positions, req_indices), names)]
        if not all(found):
            return None
        for each, name in zip(found, names):
            check_one_per_group(each, len(self), name)
        return found[0], found[1]


# The names of the interface.
BlockTable = AscendBlockTable
MultiGroupBlockTable = AscendMultiGroupBlockTable


def _has_states(group: object | None) -> bool:
    """Return whether the spec of an engine's group is a `MambaSpec`, whichever class that is."""
    spec = getattr(group, "kv_cache_spec", None)
    return any(each.__name__ == "MambaSpec" for each in type(spec).__mro__)
