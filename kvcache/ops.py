# SPDX-License-Identifier: Apache-2.0
"""The torch ops of kvcache, `torch.ops.kvcache.*`, as documented functions.

Importing this module registers the ops for CPU and CUDA. For every other torch device, it registers
ops that copy through the host (`docs/other_devices.md`). All arguments are checked before anything
is written, and an invalid argument raises a RuntimeError that names the argument. Values in GPU tensors
are checked only in the checked mode (`KVCACHE_CHECKED=1` in the environment), which synchronizes.
In the normal mode, tokens with an out-of-range value are skipped, and no memory outside the tensors is
accessed.

All ops can be captured in a CUDA graph, because they neither allocate nor synchronize outside the
checked mode. Each op has a fake implementation, so `torch.compile` knows which arguments the op
mutates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature

import torch

from kvcache import ops_by_copies
from kvcache.checks import MAX_INT64, integer, number, shown
from kvcache.formats import (  # noqa: F401  (values of the argument `scale_rule` of `write_kv`)
    INDEXER,
    INDEXER_POWER_OF_TWO,
    TILE,
    TOKEN_HEAD,
)
from kvcache.native import load

load.load_ops()
_ops = torch.ops.kvcache

# Values of the argument `engine` of `copy_blocks`.
KERNEL, COPY_ENGINE, COPY_ENGINE_SINGLY, COPY_ENGINE_SETTLED = range(4)
LOCATED = -1  # a value of the argument `pages_per_run` of `copy_blocks`


def _named(op: Callable[..., None]) -> Callable[..., None]:
    """Wrap an op so that errors raised by torch also name the argument."""
    parameters = signature(op).parameters

    @wraps(op)
    def call(*args: object, **options: object) -> None:
        try:
            op(*args, **options)
        except (ValueError, NotImplementedError, RecursionError, MemoryError) as error:
            given = signature(op).bind(*args, **options).arguments
            for name, value in given.items():
                kind = parameters[name].annotation.partition(" ")[0]
                if kind == "torch.Tensor" and not _is_dense(value) and value is not None:
                    raise TypeError(f"{name} is {shown(value)}: expected a dense tensor") from error
                if kind == "int":
                    integer(value, name, -MAX_INT64, MAX_INT64)
            raise

    return call


def _checked_owners(owners: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Raise TypeError unless `owners` is a list or tuple. torch would exhaust an iterator."""
    if not isinstance(owners, list | tuple):
        raise TypeError(f"owners is a {type(owners).__name__}: expected a list or tuple of tensors")
    return owners


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def warm_up(device: torch.device | str | int | None = None) -> None:
    """Load all kernels on a CUDA device, so that graphs can be captured.

    CUDA loads a kernel at its first launch. This delays the first step and, with drivers before 12.3,
    fails during a graph capture. Call this function once per device before the first capture.
    `SwapEngine` also calls it.

    Args:
        device: A CUDA device. None: the current one.

    Raises:
        RuntimeError: The library was built without CUDA, or without code for the device.
        ValueError: The device does not exist.

    Example:
        >>> if torch.cuda.is_available():
        ...     warm_up()
    """
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise ValueError(f"device is {device}: expected a CUDA device")
    problem = load.why_no_cuda()
    if problem:
        raise RuntimeError(f"there is nothing to load: {problem}")
    count = torch.cuda.device_count()
    if device.index is not None and device.index >= count:
        raise ValueError(f"device is {device}: expected cuda:0 to cuda:{count - 1}")
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        _ops._load_kernels(index)
    except RuntimeError as error:
        if not any(part in str(error) for part in ("no kernel image", "unsupported toolchain")):
            raise
        major, minor = torch.cuda.get_device_capability(index)
        raise RuntimeError(
            f"the CUDA library has no code for cuda:{index} (compute capability {major}.{minor}) and "
            f"its driver: build it with KVCACHE_CUDA_ARCHS={major}{minor}, or update the driver"
        ) from error


@_named
def slot_mapping(
    tables: torch.Tensor,
    groups: torch.Tensor,
    num_rows: int,
    rows: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    positions: torch.Tensor,
    num_blocks_per_row: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """Compute the slots of a step's tokens in all cache groups, in one launch.

    Let V = block size * world size, o = position % V, and I = interleave. The block of a token is in
    column position // V of its row. The token is local if o // I % world size == rank. Its offset within
    the block is then o // (world size * I) * I + o % I. Tokens of other ranks, and all entries of `out`
    after the last token, are set to -1.

    Args:
        tables: int32[number of entries]. The tables of all groups, flattened and concatenated.
        groups: int64[num_groups, 8] on the CPU. For each group: offset of its table [num_rows, columns]
            in `tables`, columns, kernel block size, context-parallel world size, rank, interleave, window
            (0: none), and row in `num_blocks_per_row`.
        num_rows: Number of rows per table.
        rows: int32[n], the row of each token. If `query_start_loc` is given, int32[r], the row of each
            request. -1 marks a padding request.
        query_start_loc: int32[r + 1]. Start of each request's tokens.
        positions: int64[n]. Token positions within their requests.
        num_blocks_per_row: int32[any, num_rows]. Number of entries in each row. If given, positions
            beyond a row's entries are out of range. If None, these positions are mapped to slots in
            the null block.
        out: int64 or int32[num_groups, m] with m >= n. With int32, the caller must ensure that all
            slots fit.
    """
    _ops.slot_mapping(
        tables, groups, num_rows, rows, query_start_loc, positions, num_blocks_per_row, out
    )


@_named
def update_block_tables(tables: torch.Tensor, updates: torch.Tensor) -> None:
    """Apply a step's changes to the device tables of all groups, in one launch.

    Args:
        tables: int32[number of entries]. The tables.
        updates: int32[length] in the format of `HostTables.pack`: the number of segments; then, for each
            segment, its start in `tables`, its length, and the position of its values in `updates`;
            then the values of all segments.
    """
    _ops.update_block_tables(tables, updates)


@_named
def gather_block_tables(
    tables: torch.Tensor,
    groups: torch.Tensor,
    num_rows: int,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor | None,
    max_num_tokens: int,
    out: torch.Tensor,
) -> None:
    """Copy rows of all groups' tables into batch order, in one launch.

    Args:
        tables: See `slot_mapping`.
        groups: See `slot_mapping`.
        num_rows: Number of rows per table.
        idx_mapping: int32[n]. Row of each request. -1 marks a padding request, whose output row is
            filled with null blocks.
        num_computed_tokens: int32[n]. Number of tokens that precede each request's first query. Entries
            that are outside the group's window for this query are set to the null block.
        max_num_tokens: Upper bound of the tokens per request. Columns past this number of tokens are
            not written.
        out: Same layout as `tables`, with row `i` of each group for request `i`.
    """
    _ops.gather_block_tables(
        tables, groups, num_rows, idx_mapping, num_computed_tokens, max_num_tokens, out
    )


@_named
def attention_metadata(
    tables: torch.Tensor,
    groups: torch.Tensor,
    num_rows: int,
    rows: torch.Tensor,
    query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    num_blocks_per_row: torch.Tensor,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    seqused_k: torch.Tensor,
    block_tables: torch.Tensor | None = None,
    paged_kv_indptr: torch.Tensor | None = None,
    paged_kv_indices: torch.Tensor | None = None,
    paged_kv_last_page_len: torch.Tensor | None = None,
) -> None:
    """Build a batch's metadata for attention kernels, for all groups and outputs in one launch.

    A request with an out-of-range value, or with more tokens than its row's blocks can hold, raises a
    RuntimeError. On a GPU outside the checked mode, such a request is instead treated as a padding
    request that keeps its queries.

    Args:
        tables: See `slot_mapping`.
        groups: See `slot_mapping`.
        num_rows: Number of rows per table.
        rows: int32[n]. Row of each request, or -1 for a padding request.
        query_lens: int32[n]. Tokens of each request in this step.
        seq_lens: int32[n]. Tokens of each request after this step. Ignored for padding requests.
        num_blocks_per_row: See `slot_mapping`.
        max_num_tokens: Upper bound of `seq_lens`. Columns past this number of tokens are not
            written.
        query_start_loc: int32[N + 1] with N >= n. Requests n to N - 1 are padding without tokens.
        seqused_k: int32[num_groups, N], with any stride between groups. Number of tokens of each request
            that this context-parallel rank stores.
        block_tables: int32[R * sum of columns] with R >= N. For each group, a table [R, columns] with
            rows in batch order. Entries of padding requests and of columns outside the window are 0,
            the null block.
        paged_kv_indptr: int32[num_groups, N + 1], with any stride between groups.
        paged_kv_indices: int32[R * sum of columns]. For each group, a list [R * columns] of the pages of
            each request, in batch order. A request's pages begin with the first page that its first
            query attends to. The list is padded with null entries to N times the number of written
            columns. May be omitted even if the other page lists are given.
        paged_kv_last_page_len: int32[num_groups, N], with any stride between groups. Number of tokens in
            the last page of each request: 1 to the group's block size, or 0 for a request without
            pages.
    """
    _ops.attention_metadata(
        tables,
        groups,
        num_rows,
        rows,
        query_lens,
        seq_lens,
        num_blocks_per_row,
        max_num_tokens,
        query_start_loc,
        seqused_k,
        block_tables,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
    )


@_named
def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale_rule: int = TOKEN_HEAD,
) -> None:
    """Write the K and V of each token to its slot. Slot -1 and block 0, the null block, are skipped.

    K and V may be columns of one tensor, such as MLA's latent and rotary parts, but must not overlap.
    If the latent is a single vector, pass it as `key`, with a `value` of head size 0.

    Without scales, tokens and cache must have the same dtype, of any element size, and bytes are copied
    unchanged. A float8_e4m3fn, float8_e5m2 or int8 cache also accepts float32, float16 and bfloat16
    tokens. It stores key / k_scale, rounded to nearest: ties to even for fp8, and away from zero for
    int8. Values beyond the largest finite value saturate. NaN stays NaN in fp8, and becomes -128 in
    int8. If fp8 values are stored in a uint8 tensor, pass `cache.view(torch.float8_e4m3fn)`.

    If `k_scale` has as many dimensions as `key_cache`, it is part of the cache: each group of
    head_size / num_groups elements is divided by a scale of its own, which is derived from the group
    and written to `k_scale` (`scale_rule`). A uint8 cache then holds two elements per byte: int4, with
    a zero point in the four lowest bits of the scale, or with float8_e4m3fn scales nvfp4. A group that
    contains an infinite value or, except for fp8, NaN is read as NaN or infinite. With
    `docs/formats.md`, these are the formats that engines store: fp8, int8 and int4 per token and head,
    nvfp4, fp8_ds_mla, and the keys of DeepSeek's indexer.

    To write all layers at once, prepend num_layers to the shapes of tokens and caches.

    Args:
        key: [n, num_kv_heads, head_size], contiguous in the last dimension. For tokens in HND order,
            [num_kv_heads, n, head_size], pass `key.transpose(0, 1)`.
        value: [n, num_kv_heads, v_head_size], contiguous in the last dimension.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], contiguous in the last dimension,
            with any other strides (NHD and HND).
        value_cache: [num_blocks, block_size, num_kv_heads, v_head_size], contiguous in the last
            dimension, with any other strides.
        slot_mapping: int64[n]. Every slot may occur only once.
        k_scale: float32 tensor on the tokens' device. Given scales are contiguous, with shape [1] or
            [num_kv_heads]; when all layers are written at once, [num_layers, 1] or
            [num_layers, num_kv_heads]. Scales in the cache have shape
            [num_blocks, block_size, num_kv_heads, num_groups], with any strides, and are written. For
            nvfp4, they are float8_e4m3fn.
        v_scale: The same for V. For `torch.compile`, both count as written, even if they are given.
        scale_rule: How scales in the cache are derived from the largest magnitude m of a group. Let c be
            the format's largest code. TOKEN_HEAD: max(m / c, 1e-6), and elements are multiplied by the
            reciprocal. TILE: max(m / c, 2^-126). INDEXER: max(m, 1e-4) / c. INDEXER_POWER_OF_TWO: the
            smallest power of two that is not below the scale of INDEXER. int4 and nvfp4 ignore it.
    """
    _ops.write_kv(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, scale_rule)


@_named
def rope_write_kv(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    scale_rule: int = TOKEN_HEAD,
    is_neox: bool = True,
    rotates_value: bool = False,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    query_out: torch.Tensor | None = None,
    key_out: torch.Tensor | None = None,
    value_out: torch.Tensor | None = None,
) -> None:
    """Norm and rotate the query and key of each token, and write K and V to its slot, in one launch.

    The result equals RMS norm, rotary embedding and `write_kv` in sequence. For MLA, pass the latent as
    `key`, its rotary part as `value` with `rotates_value`, and the rotary part of the query as `query`:
    the latent is normed, and the other two are rotated.

    Each step computes in float32 and rounds its result to the tokens' dtype: the norm
    x / sqrt(mean(x^2) + eps), its product with the weight, and the rotation, which is
    (x * cos - y * sin, y * cos + x * sin) with rounded products. A float32 weight is multiplied before
    the first rounding. The norm's sum has 32 partial sums, of elements i, i + 32, ..., which are
    added in halves: 16 and 16, 8 and 8, and so on. CPU and CUDA give equal bits, except for those of
    NaN.

    Slot -1 and block 0 only drop the write; the outputs of such a token are computed. On a GPU outside
    the checked mode, a token whose position has no row in `cos_sin_cache` is skipped.

    Query, key and value may be columns of one tensor. An output may be its own input, but otherwise
    shares no memory with other arguments.

    Args:
        positions: int32[n] or int64[n].
        query: [n, num_heads, q_head_size], float32, float16 or bfloat16, contiguous in the last
            dimension, of at most 1024 elements. Overwritten unless `query_out` is given. For
            `torch.compile`, it counts as written in both cases.
        key: [n, num_kv_heads, head_size] with the dtype of `query`, contiguous in the last dimension,
            of at most 1024 elements.
        value: [n, num_kv_heads, v_head_size]. The same.
        cos_sin_cache: [max_position, rotary_dim], float32 or the tokens' dtype: the cosines of each
            position, then its sines. The first rotary_dim elements of a head are rotated.
        key_cache: See `write_kv`, for one layer.
        value_cache: See `write_kv`, for one layer.
        slot_mapping: int64[n]. Every slot may occur only once.
        k_scale: See `write_kv`.
        v_scale: See `write_kv`.
        scale_rule: See `write_kv`.
        is_neox: Whether element i is rotated with element i + rotary_dim / 2. Otherwise, elements 2 * i
            and 2 * i + 1 are a pair, as in GPT-J and DeepSeek's MLA.
        rotates_value: Whether `value` is rotated instead of `key`.
        q_weight: [q_head_size], float32 or the tokens' dtype. Weight of the query's norm. None: no norm.
        k_weight: [head_size]. The same for `key`.
        eps: Added to the mean of squares.
        query_out: Like `query`. Output. None: `query`.
        key_out: Like `key`. Output of the key as written, before quantization. None: not stored.
        value_out: Like `value`. The same for a rotated value.

    Raises:
        RuntimeError: An argument is invalid, or a position or slot is out of range (on a GPU: only in
            the checked mode).
        TypeError: `eps` is not a number.

    Example:
        >>> angles = torch.outer(torch.arange(8.0), torch.tensor([1.0, 0.1]))
        >>> cos_sin = torch.cat([angles.cos(), angles.sin()], 1)
        >>> query, key, value = torch.ones(2, 4, 4), torch.ones(2, 1, 4), torch.ones(2, 1, 4)
        >>> caches = torch.zeros(2, 3, 4, 1, 4)
        >>> rope_write_kv(torch.tensor([0, 7]), query, key, value, cos_sin, *caches, torch.tensor([4, 9]))
        >>> caches[0].view(-1, 4)[9].tolist() == query[1, 0].tolist()
        True
    """
    _ops.rope_write_kv(
        positions,
        query,
        key,
        value,
        cos_sin_cache,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale,
        v_scale,
        scale_rule,
        is_neox,
        rotates_value,
        q_weight,
        k_weight,
        number(eps, "eps"),
        query_out,
        key_out,
        value_out,
    )


@_named
def gather_kv(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Read the K and V at each slot into `key` and `value`. Slot -1 and block 0 yield zeros.

    Shapes, dtypes, strides and scales are the same as for `write_kv`. Quantized values are multiplied by
    the scale and rounded to the tokens' dtype. To read the context of a batch, compute its slots with
    `slot_mapping`.

    If the tokens are on a CUDA device, the caches and the scales in them may be in pinned host memory.
    The kernel then reads the slots' bytes over the bus. The host must not change or free this memory
    until the kernel has run.

    Args:
        key_cache: [num_blocks, block_size, num_kv_heads, head_size].
        value_cache: [num_blocks, block_size, num_kv_heads, v_head_size].
        slot_mapping: int64[n].
        key: [n, num_kv_heads, head_size]. Output.
        value: [n, num_kv_heads, v_head_size]. Output.
        k_scale: See `write_kv`.
        v_scale: See `write_kv`.

    Example:
        >>> tables = torch.tensor([3, 1, 2, 0], dtype=torch.int32)  # two requests, two blocks of 4 each
        >>> groups = torch.tensor([[0, 2, 4, 1, 0, 1, 0, 0]])
        >>> rows, starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [0, 6, 9]))
        >>> positions = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2])  # of 6 and 3 tokens
        >>> slots = torch.empty(1, 9, dtype=torch.int64)
        >>> slot_mapping(tables, groups, 2, rows, starts, positions, None, slots)
        >>> cache = torch.arange(16.0).view(4, 4, 1, 1)
        >>> key, value = torch.empty(9, 1, 1), torch.empty(9, 1, 1)
        >>> gather_kv(cache, cache + 100, slots[0], key, value)
        >>> key.flatten().tolist()
        [12.0, 13.0, 14.0, 15.0, 4.0, 5.0, 8.0, 9.0, 10.0]
    """
    _ops.gather_kv(key_cache, value_cache, slot_mapping, key, value, k_scale, v_scale)


@_named
def gather_context(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    seq_starts: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Read the K and V of tokens of several requests, through their block tables.

    Token i belongs to the request r with cu_seq_lens[r] <= i < cu_seq_lens[r + 1], and has position
    seq_starts[r] + i - cu_seq_lens[r]. This is the context of a chunk in chunked prefill; quantized
    values are converted. Tokens in block 0, and tokens after the last request's, become zeros.

    With `positions`, token i has position seq_starts[r] + positions[i] instead. These are the tokens
    that sparse attention chooses, such as the top k of each query in DeepSeek's sparse attention: for
    indices [num_queries, k], pass `indices.view(-1)`, and the first query of each request times k as
    `cu_seq_lens`. Most pages may stay in pinned host memory, as in SGLang's HiSparse (see `gather_kv`).

    Values on a GPU are checked only in the checked mode; in the normal mode, a token whose position is
    not in its block table is skipped.

    Args:
        key_cache: See `gather_kv`.
        value_cache: See `gather_kv`. For MLA, pass columns of one cache, and columns of one output.
        block_tables: int32[num_requests, num_columns], contiguous in the last dimension.
        cu_seq_lens: int32[num_requests + 1]. The sums of the numbers of tokens, starting with 0.
        key: [n, num_kv_heads, head_size] with n >= cu_seq_lens[-1]. Output.
        value: [n, num_kv_heads, v_head_size]. Output.
        k_scale: See `write_kv`.
        v_scale: See `write_kv`.
        seq_starts: int32[num_requests]. First position of each request. None: 0.
        positions: int32[n]. Position of each token, counted from its request's first position. -1 is no
            token, which becomes zeros. None: consecutive positions.

    Example:
        >>> cache = torch.arange(16.0).view(4, 4, 1, 1)
        >>> tables = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32)
        >>> lens, starts = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 5], [3, 0]))
        >>> key, value = torch.empty(5, 1, 1), torch.empty(5, 1, 1)
        >>> gather_context(cache, cache + 100, tables, lens, key, value, seq_starts=starts)
        >>> key.flatten().tolist()
        [15.0, 4.0, 5.0, 8.0, 9.0]

        Two tokens for each of two queries of the first request, and one token of the second request:

        >>> chosen = torch.tensor([[6, 1], [7, -1]], dtype=torch.int32)
        >>> lens = torch.tensor([0, 4, 5], dtype=torch.int32)
        >>> positions = torch.cat([chosen.view(-1), torch.tensor([2], dtype=torch.int32)])
        >>> gather_context(cache, cache + 100, tables, lens, key, value, positions=positions)
        >>> key.flatten().tolist()
        [6.0, 13.0, 7.0, 0.0, 10.0]
    """
    _ops.gather_context(
        key_cache,
        value_cache,
        block_tables,
        cu_seq_lens,
        key,
        value,
        k_scale,
        v_scale,
        seq_starts,
        positions,
    )


@_named
def copy_blocks(
    src: torch.Tensor | None,
    dst: torch.Tensor,
    regions: torch.Tensor,
    pairs: torch.Tensor,
    num_src_blocks: int,
    num_dst_blocks: int,
    engine: int = KERNEL,
    pages_per_run: int = 0,
    num_thread_blocks: int = 0,
    owners: Sequence[torch.Tensor] = (),
) -> None:
    """Copy or zero whole pages in all layers, within or between devices and the host.

    A page of `src` and a page of `dst` must either be the same page or not overlap. On the CPU,
    pages are copied by several threads, and `engine` has no effect.

    Args:
        src: The memory to which source offsets are relative. None: source and destination are in `dst`.
        dst: The memory to which destination offsets are relative.
        regions: int64[r, 5] on the CPU, in bytes: offset of page 0 and stride between pages in
            `src`, offset and stride in `dst`, and fragment size. Usually built by `PageCopy`. Each
            region must lie in the storage of `src`, `dst` or one of `owners`.
        pairs: int32[n, 2]. Source and destination page. Source -1 zeros the destination. On the CPU,
            pairs are checked: no page may be out of range, written twice, or both read and written. Pairs
            may also be on the device.
        num_src_blocks: Number of source pages.
        num_dst_blocks: Number of destination pages.
        engine: How to copy between a device and the host. KERNEL accesses pinned host memory from the
            device. COPY_ENGINE merges consecutive pages into fragments and copies many fragments per
            call. COPY_ENGINE_SINGLY copies one fragment per call, and is always used if
            `KVCACHE_BATCH_COPIES=0` is set in the environment. COPY_ENGINE_SETTLED is like
            COPY_ENGINE, but may read the host pages before the stream's earlier work has run, so no
            work in flight may write these pages.
        pages_per_run: Number of host pages that were pinned by each call. 0: a single call pinned all
            pages. LOCATED: like 0, but the driver is not queried whether each region is pinned,
            because a call with KERNEL and the same memory and regions has succeeded, and the memory
            has been pinned since.
        num_thread_blocks: Number of thread blocks for KERNEL. 0: a small default.
        owners: A list or tuple of all other tensors that contain regions. Needed if an engine's layers
            are separate tensors. Do not compile calls with `owners`, because `torch.compile` does not
            know that these tensors are written.
    """
    _ops.copy_blocks(
        src,
        dst,
        regions,
        pairs,
        num_src_blocks,
        num_dst_blocks,
        engine,
        pages_per_run,
        num_thread_blocks,
        _checked_owners(owners),
    )


@_named
def permute_blocks_(
    cache: torch.Tensor,
    offsets: torch.Tensor,
    indices: torch.Tensor,
    remote_block_size: int,
    remote_is_hnd: bool,
    owners: Sequence[torch.Tensor] = (),
) -> None:
    """Convert blocks that hold another engine's bytes to the local layout, in place.

    Let k = max(1, remote_block_size / block_size). Before the call, the k blocks in a row of `indices`
    contain, in memory order, the bytes of one or more remote blocks [num_kv_heads, remote_block_size,
    head_size] (HND) or [remote_block_size, num_kv_heads, head_size] (NHD). After the call, token t of
    row i is token t % block_size of block indices[i, t // block_size].

    Each byte is read once and written once, and blocks that are not listed remain unchanged. Indices on
    the CPU are always checked and need not outlive the call. Indices on a GPU are checked only in the
    checked mode; in the normal mode, a row with an out-of-range index is skipped.

    Args:
        cache: [num_blocks, block_size, num_kv_heads, head_size], of any dtype, contiguous in the last
            dimension. The other strides determine whether the local layout is NHD or HND.
        offsets: int64[num_layers] on the CPU. For each layer, the bytes from the first element of
            `cache` to the layer's first element. `[0]` selects only `cache` itself. All layers must
            have the layout of `cache` and must not share memory.
        indices: int32[n, k] on the CPU or on the cache's device. Each block may occur only once. On
            a GPU, the caller must ensure this.
        remote_block_size: Tokens per remote block. One of the two block sizes must divide the other.
        remote_is_hnd: Whether the remote layout is HND.
        owners: A list or tuple of the other layers, if they are separate tensors. Do not compile
            calls with `owners` using `torch.compile`.
    """
    _ops.permute_blocks_(
        cache, offsets, indices, remote_block_size, remote_is_hnd, _checked_owners(owners)
    )


# For each op, the positions of arguments that may be on the CPU even if the others are not.
_ON_HOST = {
    "slot_mapping": {1},  # groups
    "update_block_tables": set(),
    "gather_block_tables": {1},  # groups
    "attention_metadata": {1},  # groups
    "write_kv": set(),
    "rope_write_kv": set(),
    "gather_kv": {0, 1, 5, 6},  # key_cache, value_cache, k_scale, v_scale
    "gather_context": {0, 1, 6, 7},  # the same
    "copy_blocks": {0, 1, 2, 3},  # src, dst, regions, pairs
    "permute_blocks_": {1, 2},  # offsets, indices
}


def _fake(op: Callable[..., None], on_host: set[int], *args: object) -> None:
    """Check that all tensors are on one device. The ops return nothing, so nothing else is done."""
    tensors = {
        name: x
        for i, (name, x) in enumerate(zip(signature(op).parameters, args))
        if isinstance(x, torch.Tensor) and not (i in on_host and x.device.type == "cpu")
    }
    first = next(iter(tensors), None)
    for name, tensor in tensors.items():
        if tensor.device != tensors[first].device:
            raise RuntimeError(
                f"{first} is on {tensors[first].device}, {name} on {tensor.device}: expected one device"
            )


for _name, _on_host in _ON_HOST.items():
    torch.library.register_fake(f"kvcache::{_name}", partial(_fake, globals()[_name], _on_host))
ops_by_copies.register(_ON_HOST)
