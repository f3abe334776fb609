# SPDX-License-Identifier: Apache-2.0
"""Builds a batch's metadata for attention kernels from the block tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn

import numpy as np
import torch

from kvcache.checks import MAX_INT64, flag, instance, integer, listed, shown
from kvcache.worker.tables.block_tables import BlockTables
from kvcache.worker.tables.buffer import HostDeviceBuffer
from kvcache.worker.tables.group_table import GroupTable
from kvcache.worker.tables.table_set import host_tensor, is_on_device
from kvcache.worker.tables.table_shape import TableShape

Lengths = Sequence[int] | np.ndarray | torch.Tensor
MAX_CACHED_VIEWS = 64  # maximum number of batch sizes with cached views, which are costly to create
# What a tensor that is not always built requires.
_REQUIRED = {
    "query_start_loc_cpu": "lengths on the host",
    "block_table": "flash_attn=True",
    "paged_kv_indptr": "flashinfer=True",
    "paged_kv_indices": "flashinfer=True",
    "paged_kv_last_page_len": "flashinfer=True",
    "paged_kv_indptr_cpu": "flashinfer=True, and lengths on the host",
    "paged_kv_last_page_len_cpu": "flashinfer=True, and lengths on the host",
}


class _Optional:
    """Reading a tensor that was not built raises an AttributeError that says what it requires."""

    __slots__ = ()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            if name not in _REQUIRED or name not in self.__slots__:
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            raise AttributeError(
                f"{name} was not built: expected a metadata builder with {_REQUIRED[name]}"
            )


@dataclass(slots=True)
class GroupMetadata(_Optional):
    """Attention metadata for one cache group. All tensors are int32, on the tables' device.

    N is the number of requests, including padding. FlashAttention uses `seqused_k`, `block_table` and
    `max_seqlen_k`. FlashInfer uses the three `paged_kv_*` tensors. FlashInfer's `plan` reads the host
    copies of these tensors (`*_cpu`), which exist only if the lengths came from the host. Reading a
    tensor that was not built, for example because of `flashinfer=False`, raises AttributeError.
    """

    block_size: int  # attention kernel's block size in tokens on one rank; FlashInfer's page_size
    window: int | None  # number of tokens that a query attends to, including itself; None: all
    max_seqlen_k: int  # upper bound of seqused_k
    seqused_k: torch.Tensor  # [N] number of tokens on this context-parallel rank; 0 for padding
    # [N, columns]; null block for padding and outside the window
    block_table: torch.Tensor = field(init=False, repr=False)
    # [N + 1] start of each request in paged_kv_indices
    paged_kv_indptr: torch.Tensor = field(init=False, repr=False)
    # [pages], or [N * columns] for device lengths
    paged_kv_indices: torch.Tensor = field(init=False, repr=False)
    # [N] 1 to block_size; 0 without pages
    paged_kv_last_page_len: torch.Tensor = field(init=False, repr=False)
    paged_kv_indptr_cpu: torch.Tensor = field(init=False, repr=False)
    paged_kv_last_page_len_cpu: torch.Tensor = field(init=False, repr=False)


@dataclass(slots=True)
class AttentionMetadata(_Optional):
    """Metadata for one batch, built by `AttentionMetadataBuilder`. `batch[g]` is the metadata for
    group `g`.

    The tensors are views of the builder's buffers at fixed addresses. They are valid until the
    builder's next `build`.
    """

    num_reqs: int  # number of requests, including padding
    num_tokens: int  # number of tokens, including padding
    max_query_len: int  # maximum number of tokens per request in this step
    max_seq_len: int  # maximum length of a request after this step
    query_start_loc: torch.Tensor  # int32[num_reqs + 1], also called cu_seqlens_q or qo_indptr
    groups: dict[int, GroupMetadata]
    # only if the lengths came from the host
    query_start_loc_cpu: torch.Tensor = field(init=False, repr=False)

    def __getitem__(self, group: int) -> GroupMetadata:
        try:
            return self.groups[group]
        except (KeyError, TypeError):
            known = ", ".join(map(str, self.groups))
            raise IndexError(f"group is {shown(group)}: expected one of {known}") from None


class AttentionMetadataBuilder:
    """Builds `AttentionMetadata` from rows of the block tables. The builder owns the output
    buffers.

    Encoder groups (cross-attention) have different sequence lengths and need a separate builder.
    Circular groups need no metadata, because their kernels find the token at position `p` in column
    `p // block_size % columns`. Chunked local attention is not supported, because backends treat
    each chunk as a separate request.

    Args:
        tables: The block tables.
        max_num_reqs: Maximum number of requests in a batch, including padding. None: the tables'
            maximum.
        groups: The groups to serve. None: all groups with a slot mapping except encoder and circular
            groups.
        flash_attn: Whether to build tensors for FlashAttention. Without either backend, only
            `query_start_loc` and `seqused_k` are built.
        flashinfer: Whether to build tensors for FlashInfer.

    Raises:
        TypeError: `groups` is not a list of integers.
        ValueError: A group does not exist or is circular, encoder groups are mixed with other
            groups, or a group has a sliding window and its tokens are spread over context-parallel
            ranks. This combination is impossible because a kernel's window has a fixed number of
            tokens on its own rank, whereas the number of a window's tokens on each rank varies.

    Example:
        >>> from kvcache import GroupSpec
        >>> groups = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, {"window": 20})]
        >>> sizes = {"max_num_reqs": 4, "max_model_len": 64, "max_num_tokens": 32}
        >>> tables = BlockTables.for_groups(groups, **sizes)
        >>> tables.add_row(([5, 6, 7], [2, 3, 4]), 1)
        >>> builder = AttentionMetadataBuilder(tables)
        >>> batch = builder.build(rows=[1], query_lens=[1], seq_lens=[40], num_padded_reqs=2)
        >>> batch.query_start_loc.tolist(), batch[0].seqused_k.tolist()
        ([0, 1, 1], [40, 0])
        >>> batch[0].block_table.tolist()
        [[5, 6, 7, 0], [0, 0, 0, 0]]
        >>> batch[1].block_table.tolist()  # token 39 attends to tokens 20 to 39, not to block 0
        [[0, 3, 4, 0], [0, 0, 0, 0]]
        >>> batch[1].paged_kv_indptr.tolist(), batch[1].paged_kv_indices.tolist()
        ([0, 2, 2], [3, 4])
        >>> batch[1].paged_kv_last_page_len.tolist()
        [8, 0]
    """

    def __init__(
        self,
        tables: BlockTables | GroupTable,
        max_num_reqs: int | None = None,
        *,
        groups: Sequence[int] | None = None,
        flash_attn: bool = True,
        flashinfer: bool = True,
    ) -> None:
        instance(tables, BlockTables | GroupTable, "tables")
        flash_attn, flashinfer = flag(flash_attn, "flash_attn"), flag(flashinfer, "flashinfer")
        one = isinstance(tables, GroupTable)
        self._tables = tables.table_set
        shapes = self._tables.shapes
        serves = tables.max_num_reqs if one else tables[0].max_num_reqs
        self.max_num_reqs = integer(
            serves if max_num_reqs is None else max_num_reqs, "max_num_reqs", least=1
        )
        if groups is None:
            shared = [
                g for g, x in enumerate(shapes) if x.slot_mapping and not (x.encoder or x.circular)
            ]
            groups = [tables._group] if one else shared
        self.groups = _checked_groups(groups, len(shapes))
        encoders = [g for g in self.groups if shapes[g].encoder]
        if len(encoders) not in (0, len(self.groups)):
            raise ValueError(
                f"groups is {self.groups}: expected a separate builder for the encoder groups {encoders}"
            )
        circular = [g for g in self.groups if shapes[g].circular]
        if circular:
            raise ValueError(
                f"groups is {self.groups}: expected no circular groups ({circular}), because their "
                "columns are not in token order"
            )
        self._shapes = [shapes[g] for g in self.groups]
        for g, shape in zip(self.groups, self._shapes):
            if shape.window and shape.world_size > 1:
                raise ValueError(
                    f"group {g} has a window of {shape.window}, and its tokens are spread over "
                    f"{shape.world_size} context-parallel ranks: expected no window, or a "
                    "replicated group"
                )
        num_columns = sum(shape.num_columns for shape in self._shapes)
        if self.max_num_reqs * num_columns >= 2**31:
            raise ValueError(
                f"max_num_reqs is {self.max_num_reqs}: expected fewer than 2^31 table entries, "
                f"with {num_columns} entries per request"
            )
        self._most_tokens = min(
            2**31 - 1, *(x.num_columns * x.tokens_per_column for x in self._shapes)
        )
        self._fields = self._tables.fields(self.groups)
        self.device = self._tables.device

        def buffer(*shape: int) -> HostDeviceBuffer:
            return HostDeviceBuffer(shape, torch.int32, self.device, pin_memory=False)

        n, num_groups = self.max_num_reqs, len(self.groups)
        self._buffers = (  # in the order of the op's outputs
            buffer(n + 1),  # query_start_loc
            buffer(num_groups, n),  # seqused_k
            buffer(n * num_columns) if flash_attn else None,  # block_table
            buffer(num_groups, n + 1) if flashinfer else None,  # paged_kv_indptr
            buffer(n * num_columns) if flashinfer else None,  # paged_kv_indices
            buffer(num_groups, n) if flashinfer else None,  # paged_kv_last_page_len
        )
        # Two buffers alternate, so writing the next step's lengths need not wait for the last
        # launch.
        self._requests = [
            HostDeviceBuffer((3 * n,), torch.int32, self.device, self._tables.pin_memory)
            for _ in range(2 if self.device.type == "cuda" else 0)
        ]
        self._views: dict[int, _Views] = {}
        # For each batch position, two token counts: the number of tokens whose columns may contain
        # block IDs now, and the number of tokens whose columns a replayed build may fill at any
        # time.
        self._filled = np.zeros(n, np.int64)
        self._replayed = np.zeros(n, np.int64)

    def build(
        self,
        rows: Lengths | None,
        query_lens: Lengths,
        seq_lens: Lengths,
        *,
        num_padded_reqs: int | None = None,
        num_padded_tokens: int | None = None,
        max_query_len: int | None = None,
        max_seq_len: int | None = None,
    ) -> AttentionMetadata:
        """Build a batch's metadata, with one launch for all groups.

        Each row of a block table contains all blocks that the request holds, so later draft steps
        may increase `seqused_k` without a rebuild. The page lists end at the sequence length.

        Lists, numpy arrays and CPU tensors are uploaded in one copy. They refer to the host tables,
        so call `commit_updates` first.

        int32 tensors on the device are used in place: the call copies and allocates nothing and
        waits for nothing, so it can be captured in a CUDA graph. In this case:

        - Bounds default to the maximum that the tables allow.
        - Block tables contain the columns for `max_seq_len` tokens. A longer request is rejected.
        - Query lengths are not checked against `num_padded_tokens` or `max_query_len`; the caller
          must ensure that the query lengths fit.
        - The host copies (`*_cpu`) are not built.

        Args:
            rows: int32[r]. Each request's row, or -1 for a padding request. None: request `i` has row
                `i`.
            query_lens: int32[r]. Number of each request's tokens in this step.
            seq_lens: int32[r]. Number of each request's tokens after this step. The request's row
                must hold blocks for these tokens.
            num_padded_reqs: Number of requests with which a CUDA graph was captured. Padding
                requests have no tokens.
            num_padded_tokens: Number of tokens with which a CUDA graph was captured. Padding tokens
                belong to no request.
            max_query_len: Upper bound of the query lengths, reported in the metadata. None: the
                longest query.
            max_seq_len: Upper bound of the sequence lengths, reported in the metadata. None: the
                longest sequence.

        Returns:
            The metadata, valid until the next call.

        Raises:
            ValueError: A length, row or size is out of range. Nothing has changed.
            RuntimeError: Lengths on the host were passed while a CUDA graph is being captured, or
                while the tables have changes that `commit_updates` has not uploaded. With
                `KVCACHE_CHECKED=1`, also raised for invalid values on a GPU; otherwise, a request
                with invalid values is treated as padding.
        """
        given = {"query_lens": query_lens, "seq_lens": seq_lens}
        if rows is not None:
            given["rows"] = rows
        elsewhere = [is_on_device(x) for x in given.values()]
        if any(elsewhere) and not all(elsewhere):
            names = [name for name, there in zip(given, elsewhere) if not there]
            raise ValueError(
                f"{' and '.join(names)} is on the cpu: expected all arguments on one device"
            )
        on_device = any(elsewhere) and self.device.type == "cuda"
        if on_device:
            if query_lens.dim() != 1:
                raise ValueError(
                    f"query_lens has shape {list(query_lens.shape)}: expected [num_requests]"
                )
            n = len(query_lens)
            rows = self._tables.identity(n, on_host=False) if rows is None else rows
            requests = (rows, query_lens, seq_lens)
            num_tokens, longest_query, longest = 0, 0, 0
        else:
            requests = self._on_host(rows, query_lens, seq_lens)
            n = len(requests[0])
            on_rows = [x.numpy() for x in requests]
            num_tokens = int(on_rows[1].sum(dtype=np.int64))
            longest_query = int(on_rows[1].max(initial=0))
            longest = int(on_rows[2].max(initial=0, where=on_rows[0] >= 0))
        unknown_tokens = self._tables.num_slots if on_device else num_tokens
        num_reqs = _at_least(num_padded_reqs, n, n, "num_padded_reqs")
        if num_reqs > self.max_num_reqs:
            raise ValueError(
                f"there are {num_reqs} requests including padding: expected at most "
                f"max_num_reqs={self.max_num_reqs}; create the builder with a larger max_num_reqs"
            )
        num_tokens = _at_least(num_padded_tokens, num_tokens, unknown_tokens, "num_padded_tokens")
        most_query = num_tokens if on_device else longest_query
        most_seq = self._most_tokens if on_device else longest
        max_query_len = _at_least(max_query_len, longest_query, most_query, "max_query_len")
        max_seq_len = _at_least(max_seq_len, longest, most_seq, "max_seq_len")

        views = self._views_of(num_reqs)
        stale = int(self._filled[:num_reqs].max(initial=0))
        if on_device:
            shown = max_seq_len
            captured = torch.cuda.is_current_stream_capturing()
            # The op has a single bound for columns and lengths, so columns that an earlier batch
            # filled beyond max_seq_len are zeroed separately. Before a replay, any column may be
            # filled. Whole tensors are zeroed without a kernel, because a kernel may be impossible
            # to load during a capture.
            columns = [min(x.num_columns, -(-shown // x.tokens_per_column)) for x in self._shapes]
            if captured and columns != [x.num_columns for x in self._shapes]:
                views.zero_ids([0] * len(columns))
            self._launch(requests, shown, views)
            if captured:
                np.maximum(self._replayed[:num_reqs], shown, out=self._replayed[:num_reqs])
            elif stale > shown:
                views.zero_ids(columns)
        else:
            # Include all blocks in every row, even blocks for draft tokens beyond the sequence
            # length.
            shown = max(longest, self._tables.longest_row(self.groups, on_rows[0]))
            # Entries that an earlier batch filled beyond these columns are set to null once.
            self._from_host(requests, min(max(shown, stale), 2**31 - 1), views)
        self._filled[:num_reqs] = np.maximum(self._replayed[:num_reqs], shown)
        groups = {
            g: views.group(i, shape, max_seq_len, on_device)
            for i, (g, shape) in enumerate(zip(self.groups, self._shapes))
        }
        sizes = num_reqs, num_tokens, max_query_len, max_seq_len
        found = AttentionMetadata(*sizes, views.query_start_loc, groups)
        if not on_device:
            found.query_start_loc_cpu = views.query_start_loc_cpu
        return found

    def _on_host(self, rows: object, query_lens: object, seq_lens: object) -> tuple:
        """Return the three arguments as int32 CPU tensors of equal length."""
        queries = host_tensor(query_lens, torch.int32, "query_lens")
        lengths = host_tensor(seq_lens, torch.int32, "seq_lens")
        if queries.dim() != 1:
            raise ValueError(f"query_lens has shape {list(queries.shape)}: expected [num_requests]")
        rows = (
            self._tables.identity(len(queries), on_host=True)
            if rows is None
            else host_tensor(rows, torch.int32, "rows")
        )
        for name, values in ("seq_lens", lengths), ("rows", rows):
            if values.shape != queries.shape:
                raise ValueError(
                    f"{name} has shape {list(values.shape)}: "
                    f"expected {list(queries.shape)}, the shape of query_lens"
                )
        return rows, queries, lengths

    def _from_host(self, requests: tuple, max_num_tokens: int, views: _Views) -> None:
        """Build the host outputs on the CPU, and also all other outputs if the device has no kernels."""
        on_cuda = self.device.type == "cuda"
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the lengths are on the host while a CUDA graph is captured: "
                "pass int32 tensors on the device"
            )
        self._tables.require_committed(self.groups)
        # This also runs if the device is a GPU, to validate all values before anything is launched.
        small = views.host_lengths if on_cuda else views.host
        self._tables.attention_metadata(self._fields, requests, max_num_tokens, small, on_host=True)
        if on_cuda:
            self._requests.reverse()
            staged, n = self._requests[0], len(requests[0])
            staged.before_write()
            torch.cat(requests, out=staged.cpu[: 3 * n])
            staged.upload(0, 3 * n)
            self._launch(staged.gpu[: 3 * n].view(3, n).unbind(), max_num_tokens, views)
            staged.note_use()
        elif self.device.type != "cpu":
            for buffer in self._buffers:
                if buffer is not None:
                    buffer.upload(0, len(buffer.cpu))

    def _launch(self, requests: tuple, max_num_tokens: int, views: _Views) -> None:
        self._tables.attention_metadata(
            self._fields, requests, max_num_tokens, views.device, on_host=False
        )

    def _views_of(self, num_reqs: int) -> _Views:
        if num_reqs not in self._views:
            if len(self._views) == MAX_CACHED_VIEWS:
                del self._views[next(iter(self._views))]
            columns = [shape.num_columns for shape in self._shapes]
            self._views[num_reqs] = _Views(self._buffers, num_reqs, self.max_num_reqs, columns)
        return self._views[num_reqs]


class _Views:
    """Views of those parts of the buffers that a batch of a given size uses."""

    def __init__(
        self,
        buffers: tuple[HostDeviceBuffer | None, ...],
        num_reqs: int,
        max_num_reqs: int,
        columns: list[int],
    ) -> None:
        n = num_reqs

        def outputs(sides: list[torch.Tensor | None]) -> tuple:
            start, seqused, block_tables, indptr, indices, last = sides
            return (
                start[: n + 1],
                seqused[:, :n],
                block_tables,
                None if indptr is None else indptr[:, : n + 1],
                indices,
                None if last is None else last[:, :n],
            )

        self.device = outputs([None if b is None else b.gpu for b in buffers])
        self.host = outputs([None if b is None else b.cpu for b in buffers])
        start, seqused, _, indptr, _, last = self.host
        self.host_lengths = (start, seqused, None, indptr, None, last)
        self.query_start_loc, self.query_start_loc_cpu = self.device[0], start
        self._seqused = self.device[1].unbind()
        self._tables = self._indptr = self._indices = self._last = None
        offsets = [max_num_reqs * sum(columns[:g]) for g in range(len(columns))]
        if self.device[2] is not None:
            self._tables = [
                self.device[2][at : at + n * c].view(n, c) for at, c in zip(offsets, columns)
            ]
        if self.device[3] is not None:
            self._indptr, self._last = self.device[3].unbind(), self.device[5].unbind()
            self._indptr_cpu, self._last_cpu = indptr.unbind(), last.unbind()
            self._indptr_np = indptr.numpy()
            self._indices = [self.device[4][at : at + n * c] for at, c in zip(offsets, columns)]

    def zero_ids(self, columns: list[int]) -> None:
        """Set each group's entries beyond the given columns to null on the device, in stream order."""
        for ids, c in zip(self._tables or [], columns):
            ids[:, c:].zero_()
        for ids, c in zip(self._indices or [], columns):
            ids[len(self._seqused[0]) * c :].zero_()

    def group(self, i: int, shape: TableShape, max_seq_len: int, on_device: bool) -> GroupMetadata:
        """Return the metadata of the builder's `i`-th group for the batch that was just built."""
        turn = shape.cp_kv_cache_interleave_size * shape.world_size
        most = min(max_seq_len, -(-max_seq_len // turn) * shape.cp_kv_cache_interleave_size)
        found = GroupMetadata(shape.kernel_block_size, shape.window, most, self._seqused[i])
        if self._tables is not None:
            found.block_table = self._tables[i]
        if self._indptr is not None:
            found.paged_kv_indptr, found.paged_kv_last_page_len = self._indptr[i], self._last[i]
            found.paged_kv_indices = self._indices[i]
            if not on_device:
                found.paged_kv_indices = self._indices[i][: self._indptr_np[i, -1]]
                found.paged_kv_indptr_cpu = self._indptr_cpu[i]
                found.paged_kv_last_page_len_cpu = self._last_cpu[i]
        return found


def _checked_groups(groups: Sequence[int], num_groups: int) -> list[int]:
    expected = f"expected one or more of 0 to {num_groups - 1}, each once"
    if isinstance(groups, str) or not isinstance(groups, Iterable):
        raise TypeError(f"groups is {shown(groups)}: {expected}")
    groups = listed(groups, "groups")
    if not all(isinstance(g, int | np.integer) for g in groups):
        raise TypeError(f"groups is {shown(groups)}: {expected}")
    known = all(0 <= g < num_groups for g in groups)
    if not known or not groups or len(set(groups)) < len(groups):
        raise ValueError(f"groups is {shown(groups)}: {expected}")
    return groups


def _at_least(value: int | None, least: int, default: int, name: str) -> int:
    if value is None:
        return default
    value = integer(value, name, -MAX_INT64, MAX_INT64)
    if value < least:
        raise ValueError(f"{name} is {value}: expected at least {least}, as in the batch")
    if value >= 2**31:
        raise ValueError(f"{name} is {value}: expected fewer than 2^31")
    return value
