"""The metadata of a batch for attention kernels, built from the block tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.checks import MAX_INT64, flag, integer, listed, shown
from kvcache.worker.tables.block_table import BlockTable
from kvcache.worker.tables.buffer import HostDeviceBuffer
from kvcache.worker.tables.multi_group import MultiGroupBlockTable
from kvcache.worker.tables.table_layout import TableLayout
from kvcache.worker.tables.table_set import host_tensor, is_on_device

Lengths = Sequence[int] | np.ndarray | torch.Tensor
MAX_CACHED_VIEWS = 64  # batch sizes whose views are kept: making them costs more than the launch


@dataclass(slots=True)
class GroupMetadata:
    """One cache group's part. N: requests with padding. All int32, on the tables' device.

    FlashAttention: `seqused_k`, `block_table`, `max_seqlen_k`. FlashInfer: the three `paged_kv_*`, and
    their copies on the host, which its `plan` reads; those are None where the lengths came from a
    device, and everything of a backend that the builder leaves out is None.
    """

    block_size: int  # of the attention kernel, in tokens of one rank; FlashInfer's page_size
    window: int | None  # tokens a query sees, itself included; None: all
    max_seqlen_k: int  # no seqused_k is greater
    seqused_k: torch.Tensor  # [N] tokens held by this context-parallel rank; 0: padded
    block_table: torch.Tensor | None  # [N, columns], null where hidden by the window or padded
    paged_kv_indptr: torch.Tensor | None  # [N + 1]
    paged_kv_indices: torch.Tensor | None  # [pages], or [N * columns] for lengths from a device
    paged_kv_last_page_len: torch.Tensor | None  # [N] 1 to block_size; 0 without pages
    paged_kv_indptr_cpu: torch.Tensor | None
    paged_kv_last_page_len_cpu: torch.Tensor | None


@dataclass(slots=True)
class AttentionMetadata:
    """Metadata of one batch, made by `AttentionMetadataBuilder.build`; `[g]` is group g's part.

    The tensors are views of the builder's buffers: at one address, valid until its next `build`.
    """

    num_reqs: int  # with padding
    num_tokens: int  # with padding
    max_query_len: int  # no request has more tokens in this step
    max_seq_len: int  # no request is longer after it
    query_start_loc: torch.Tensor  # int32[num_reqs + 1], also called cu_seqlens_q or qo_indptr
    query_start_loc_cpu: torch.Tensor | None  # None for lengths from a device
    groups: dict[int, GroupMetadata]

    def __getitem__(self, group: int) -> GroupMetadata:
        try:
            return self.groups[group]
        except (KeyError, TypeError):
            known = ", ".join(map(str, self.groups))
            raise IndexError(f"group is {shown(group)}: expected one of {known}") from None


class AttentionMetadataBuilder:
    """Builds `AttentionMetadata` of batches over the rows of `tables`, in buffers of its own.

    Room for `max_num_reqs` requests with padding (default: as many as the tables serve). `groups`: the
    groups to serve (default: those with a slot mapping, so none of recurrent state, but encoders and
    circular ones). `flash_attn`, `flashinfer`: which backend's tensors to build; with neither,
    `query_start_loc` and `seqused_k` alone. TypeError or ValueError for groups that are not there, and
    for a group that has a window while its tokens are spread over context-parallel ranks: a kernel
    counts its window in the tokens of one rank, of which a window over all ranks' tokens covers
    sometimes more and sometimes fewer.

    Groups of encoders (cross-attention), whose sequences have other lengths, need a builder of their
    own: ValueError for `groups` with such and others. Groups of circular buffers have none: a kernel
    for them reads the token at position p in column `p // block_size % columns`. Not for chunked local
    attention, whose chunks a backend takes as requests of their own.

    >>> from kvcache import GroupSpec
    >>> groups = [GroupSpec("full_attention", 16), GroupSpec("sliding_window", 16, {"window": 20})]
    >>> sizes = {"max_num_reqs": 4, "max_model_len": 64, "max_num_batched_tokens": 32}
    >>> tables = MultiGroupBlockTable.for_groups(groups, **sizes)
    >>> tables.add_row(([5, 6, 7], [2, 3, 4]), 1)
    >>> builder = AttentionMetadataBuilder(tables)
    >>> batch = builder.build(rows=[1], query_lens=[1], seq_lens=[40], num_padded_reqs=2)
    >>> batch.query_start_loc.tolist(), batch[0].seqused_k.tolist()
    ([0, 1, 1], [40, 0])
    >>> batch[0].block_table.tolist()
    [[5, 6, 7, 0], [0, 0, 0, 0]]
    >>> batch[1].block_table.tolist()  # token 39 sees 20 to 39: the first block is out of its sight
    [[0, 3, 4, 0], [0, 0, 0, 0]]
    >>> batch[1].paged_kv_indptr.tolist(), batch[1].paged_kv_indices.tolist()
    ([0, 2, 2], [3, 4])
    >>> batch[1].paged_kv_last_page_len.tolist()
    [8, 0]
    """

    def __init__(
        self,
        tables: MultiGroupBlockTable | BlockTable,
        max_num_reqs: int | None = None,
        *,
        groups: Sequence[int] | None = None,
        flash_attn: bool = True,
        flashinfer: bool = True,
    ) -> None:
        if not isinstance(tables, MultiGroupBlockTable | BlockTable):
            raise TypeError(
                f"tables is a {type(tables).__name__}: expected a MultiGroupBlockTable or a BlockTable"
            )
        flash_attn, flashinfer = flag(flash_attn, "flash_attn"), flag(flashinfer, "flashinfer")
        one = isinstance(tables, BlockTable)
        self._tables = tables._tables
        layouts = self._tables.layouts
        serves = tables.max_num_reqs if one else tables[0].max_num_reqs
        self.max_num_reqs = integer(
            serves if max_num_reqs is None else max_num_reqs, "max_num_reqs", least=1
        )
        if groups is None:
            shared = [
                g
                for g, x in enumerate(layouts)
                if x.has_slots and not (x.is_encoder or x.is_circular)
            ]
            groups = [tables._group] if one else shared
        self.groups = _checked_groups(groups, len(layouts))
        encoders = [g for g in self.groups if layouts[g].is_encoder]
        if len(encoders) not in (0, len(self.groups)):
            raise ValueError(
                f"groups is {self.groups}: expected a builder of their own for the encoders {encoders}"
            )
        circular = [g for g in self.groups if layouts[g].is_circular]
        if circular:
            raise ValueError(
                f"groups is {self.groups}: expected none of the circular ones {circular}, whose columns "
                "are no longer in the order of the tokens"
            )
        self._layouts = [layouts[g] for g in self.groups]
        for g, layout in zip(self.groups, self._layouts):
            if layout.window and layout.world_size > 1:
                raise ValueError(
                    f"group {g} has a window of {layout.window} and its tokens on "
                    f"{layout.world_size} context-parallel ranks: expected no window, or a "
                    "replicated group"
                )
        num_columns = sum(layout.num_columns for layout in self._layouts)
        if self.max_num_reqs * num_columns >= 2**31:
            raise ValueError(
                f"max_num_reqs is {self.max_num_reqs}: expected fewer than 2^31 table entries, "
                f"there are {num_columns} per request"
            )
        self._most_tokens = min(
            2**31 - 1, *(x.num_columns * x.tokens_per_column for x in self._layouts)
        )
        self._fields = self._tables.fields(self.groups)
        self.device = self._tables.device

        def buffer(*shape: int) -> HostDeviceBuffer:
            return HostDeviceBuffer(shape, torch.int32, self.device, pin_memory=False)

        n, num_groups = self.max_num_reqs, len(self.groups)
        self._query_start = buffer(n + 1)
        self._seqused = buffer(num_groups, n)
        self._block_tables = buffer(n * num_columns) if flash_attn else None
        self._indptr = buffer(num_groups, n + 1) if flashinfer else None
        self._indices = buffer(n * num_columns) if flashinfer else None
        self._last_page_len = buffer(num_groups, n) if flashinfer else None
        # Two, in turns: the next step's lengths do not wait for the last one's launch.
        self._requests = [
            HostDeviceBuffer((3 * n,), torch.int32, self.device, self._tables.pin_memory)
            for _ in range(2 if self.device.type == "cuda" else 0)
        ]
        self._views: dict[int, _Views] = {}
        # Tokens whose columns may hold ids, for each place in the batch; and those that the replay of
        # a captured build may bring back at any time.
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
        """The metadata of a batch, by one launch for all groups.

        rows: each request's row, -1 for a padded one (None: request i has row i). query_lens: its
        tokens in this step. seq_lens: its tokens after this step, for which its row must hold blocks
        (`commit_updates` comes first). num_padded_reqs, num_padded_tokens: the sizes that a CUDA
        graph was captured with; the padded requests have no tokens, and the padded tokens belong to
        no request. max_query_len, max_seq_len: bounds to report (default: the longest).

        Lengths from the host describe the tables of the host: RuntimeError where these have changes
        that `commit_updates` has not brought to a GPU, and while a CUDA graph is captured.

        A row of a block table shows all blocks that the request's row holds, so draft steps that
        follow may lengthen `seqused_k` by themselves; the page lists end with the length.

        Lists, numpy arrays and CPU tensors travel to the device in one copy. int32 tensors on the
        device are used where they are: nothing is copied, allocated or waited for, so that the call
        can be captured in a CUDA graph. Bounds not given are then the most that the tables allow, and
        block tables show the columns of max_seq_len tokens; a request longer than that is refused.
        Query lengths on the device are not compared with num_padded_tokens or max_query_len: that
        they stay within these is up to the caller. There are no copies on the host (`*_cpu`).

        ValueError or RuntimeError on lengths, rows or sizes out of range; nothing is then changed.
        Values on a GPU: with KVCACHE_CHECKED=1, else such a request becomes a padded one.
        """
        given = {"query_lens": query_lens, "seq_lens": seq_lens}
        if rows is not None:
            given["rows"] = rows
        elsewhere = [is_on_device(x) for x in given.values()]
        if any(elsewhere) and not all(elsewhere):
            names = [name for name, there in zip(given, elsewhere) if not there]
            raise ValueError(f"{' and '.join(names)} is on the cpu: expected all on one device")
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
                f"there are {num_reqs} requests with padding: expected at most max_num_reqs, "
                f"which is {self.max_num_reqs}; make the builder with more"
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
            # The op takes one bound for columns and lengths, so what an earlier batch left behind
            # the columns of max_seq_len is zeroed apart. Before a replay, that may be anywhere; whole
            # tensors are set to zero without a kernel, which a capture may be unable to load.
            columns = [min(x.num_columns, -(-shown // x.tokens_per_column)) for x in self._layouts]
            if captured and columns != [x.num_columns for x in self._layouts]:
                views.zero_ids([0] * len(columns))
            self._launch(requests, shown, views)
            if captured:
                np.maximum(self._replayed[:num_reqs], shown, out=self._replayed[:num_reqs])
            elif stale > shown:
                views.zero_ids(columns)
        else:
            # All blocks of every row, those for draft tokens behind its length, too.
            shown = max(longest, self._tables.longest_row(self.groups, on_rows[0]))
            # Entries that an earlier batch left behind these become null, once.
            self._from_host(requests, min(max(shown, stale), 2**31 - 1), views)
        self._filled[:num_reqs] = np.maximum(self._replayed[:num_reqs], shown)
        return AttentionMetadata(
            num_reqs,
            num_tokens,
            max_query_len,
            max_seq_len,
            views.query_start_loc,
            None if on_device else views.query_start_loc_cpu,
            {
                g: views.group(i, layout, max_seq_len, on_device)
                for i, (g, layout) in enumerate(zip(self.groups, self._layouts))
            },
        )

    def _on_host(self, rows: object, query_lens: object, seq_lens: object) -> tuple:
        """The three as int32 tensors on the CPU, of one length."""
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
                    f"expected {list(queries.shape)}, as query_lens has"
                )
        return rows, queries, lengths

    def _from_host(self, requests: tuple, max_num_tokens: int, views: _Views) -> None:
        """Builds on the CPU what the host needs, or all where the device cannot; else launches."""
        on_cuda = self.device.type == "cuda"
        if on_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "the lengths are on the host while a CUDA graph is captured: "
                "give int32 tensors on the device"
            )
        self._tables.require_committed(self.groups)
        # On a GPU, too: this checks all values, before the device is asked for anything.
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
            for buffer in self._buffers():
                if buffer is not None:
                    buffer.upload(0, len(buffer.cpu))

    def _launch(self, requests: tuple, max_num_tokens: int, views: _Views) -> None:
        self._tables.attention_metadata(
            self._fields, requests, max_num_tokens, views.device, on_host=False
        )

    def _buffers(self) -> tuple[HostDeviceBuffer | None, ...]:
        """In the order of the op's outputs."""
        return (
            self._query_start,
            self._seqused,
            self._block_tables,
            self._indptr,
            self._indices,
            self._last_page_len,
        )

    def _views_of(self, num_reqs: int) -> _Views:
        if num_reqs not in self._views:
            if len(self._views) == MAX_CACHED_VIEWS:
                del self._views[next(iter(self._views))]
            columns = [layout.num_columns for layout in self._layouts]
            self._views[num_reqs] = _Views(self._buffers(), num_reqs, self.max_num_reqs, columns)
        return self._views[num_reqs]


class _Views:
    """The part of the buffers that a batch of so many requests uses."""

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
        """Entries behind so many columns per group become null on the device, in stream order."""
        for ids, c in zip(self._tables or [], columns):
            ids[:, c:].zero_()
        for ids, c in zip(self._indices or [], columns):
            ids[len(self._seqused[0]) * c :].zero_()

    def group(
        self, i: int, layout: TableLayout, max_seq_len: int, on_device: bool
    ) -> GroupMetadata:
        """The part of the batch just built that belongs to group i of the builder."""
        turn = layout.interleave * layout.world_size
        most = min(max_seq_len, -(-max_seq_len // turn) * layout.interleave)
        listed = self._indptr is not None
        known = listed and not on_device
        indices = self._indices[i] if listed else None
        return GroupMetadata(
            layout.kernel_block_size,
            layout.window or None,
            most,
            self._seqused[i],
            None if self._tables is None else self._tables[i],
            self._indptr[i] if listed else None,
            indices[: self._indptr_np[i, -1]] if known else indices,
            self._last[i] if listed else None,
            self._indptr_cpu[i] if known else None,
            self._last_cpu[i] if known else None,
        )


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
        raise ValueError(f"{name} is {value}: expected at least {least}, as the batch has")
    if value >= 2**31:
        raise ValueError(f"{name} is {value}: expected fewer than 2^31")
    return value
