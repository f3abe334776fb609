"""The torch ops of kvcache: `torch.ops.kvcache.*` under names with documentation.

Importing this module registers them for CPU and CUDA, and for every other device of torch by copies
through the host (`docs/other_devices.md`). Every argument is checked before anything is written, and a
wrong one is a RuntimeError that names it. Values that live on a GPU are checked only with
`KVCACHE_CHECKED=1` in the environment (which synchronises); without, tokens with a value out of range are
skipped, and nothing is read or written outside the tensors.

Capturable in a CUDA graph: no allocation, no synchronisation (outside the checked mode). Each op has
a fake implementation, so `torch.compile` sees what it mutates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from inspect import signature

import torch

from kvcache import ops_by_copies
from kvcache.checks import MAX_INT64, integer, shown
from kvcache.native import load

load.load_ops()
_ops = torch.ops.kvcache

# Engines of `copy_blocks` between a device and the host.
KERNEL, COPY_ENGINE, COPY_ENGINE_SINGLY, COPY_ENGINE_SETTLED = range(4)


def _named(op: Callable[..., None]) -> Callable[..., None]:
    """The op; what torch refuses in words of its own, as a tensor without memory, is refused by name."""
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
    """Returns `owners`. TypeError for anything else than a list or tuple: torch exhausts iterators, and
    never returns from an infinite one."""
    if not isinstance(owners, list | tuple):
        raise TypeError(f"owners is a {type(owners).__name__}: expected a list or tuple of tensors")
    return owners


def _is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def warm_up(device: torch.device | str | int | None = None) -> None:
    """Loads all kernels on a CUDA device (None: the current one), so that graphs may be captured.

    CUDA loads a kernel when it is first launched, which drivers before 12.3 refuse while a graph is
    captured, and which delays a first step with any. Call it once per device before the first capture;
    `SwapEngine` does. RuntimeError where there is no CUDA library, or it has no code for the device;
    ValueError for a device that is not there.

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
        raise ValueError(
            f"device is {device}: expected one of the {count} that there are, from cuda:0"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        _ops._load_kernels(index)
    except RuntimeError as error:
        if not any(part in str(error) for part in ("no kernel image", "unsupported toolchain")):
            raise
        major, minor = torch.cuda.get_device_capability(index)
        raise RuntimeError(
            f"the CUDA library has no code that cuda:{index} (compute capability {major}.{minor}) and "
            f"its driver take: build it with KVCACHE_CUDA_ARCHS={major}{minor}, or update the driver"
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
    """Slots of a step's tokens in all cache groups, in one launch, parallel over tokens.

    tables: int32[...], all groups' tables one after the other. groups: int64[num_groups, 8] on the
    CPU: offset of the group's table [num_rows, columns] in `tables`, columns, kernel block size,
    context-parallel world size, rank, interleave, window (0: none), row in num_blocks_per_row.
    rows: int32[n], the row of each token; or, with query_start_loc int32[r + 1] (where each
    request's tokens begin), int32[r], the row of each request; -1 is a dummy request.
    positions: int64[n]. num_blocks_per_row: int32[any, num_rows], the entries that each row holds:
    positions behind them are then refused, like any out of range (without it, they get slots of the
    null block). out: int64 or int32[num_groups, m], m >= n; that slots fit int32 is the caller's
    promise.

    With V = block size * world, o = position % V and I the interleave: column position // V; the
    token is local if o // I % world == rank, at offset o // (world * I) * I + o % I of its block.
    Everything else, and all behind the last token, is -1.
    """
    _ops.slot_mapping(
        tables, groups, num_rows, rows, query_start_loc, positions, num_blocks_per_row, out
    )


@_named
def update_block_tables(tables: torch.Tensor, updates: torch.Tensor) -> None:
    """Puts a step's changes, for all groups, in place in the device's tables, in one launch.

    tables: int32[...]. updates: int32[...] as `HostTables.pack` writes it: the number of segments, then
    (start in tables, length, place of its values in updates) of each, then the values.
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
    """Copies rows of all groups' tables into batch order, in one launch.

    tables, groups: as for `slot_mapping`. idx_mapping: int32[n], the row of each request, -1 for a
    padded one, which becomes all null. num_computed_tokens: int32[n] tokens before each request's
    first query; entries that it can no longer see through the group's window become null. out: laid
    out as tables, row i of each group being written up to the columns of `max_num_tokens` tokens.
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
    """Metadata of a batch for attention kernels, all groups and all outputs in one launch.

    tables, groups, num_blocks_per_row: as for `slot_mapping`. rows, query_lens, seq_lens: int32[n],
    each request's row (-1: a padded one), its tokens in this step, and its tokens after this step;
    the seq_len of a padded request is not looked at. max_num_tokens: no seq_len is greater; columns
    behind those of so many tokens are not written.

    query_start_loc: int32[N + 1], N >= n. Requests n to N - 1 are padded ones without tokens.
    seqused_k: int32[num_groups, N], the tokens of each request that this context-parallel rank
    holds. block_tables: int32[R * sum of columns], R >= N: per group [R, columns], rows in batch
    order, null (0) where the request is padded or the window is past the column. The page lists, of
    which `paged_kv_indices` may be left out: paged_kv_indptr int32[num_groups, N + 1];
    paged_kv_indices int32[R * sum of columns]: per group [R * columns], each request's pages from the
    first one that its first query sees to its last, one request after the other, then null up to N
    times the columns written; paged_kv_last_page_len int32[num_groups, N], 1 to the group's block
    size, 0 for a request without pages. seqused_k, paged_kv_indptr and paged_kv_last_page_len may
    have any stride between groups.

    A request with a value out of range, or longer than its row's blocks reach, is a RuntimeError; on
    a GPU outside the checked mode it becomes a padded request that keeps its queries.
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
) -> None:
    """Writes each token's K and V at its slot; slot -1 and those of block 0, the null block, are skipped.

    key: [n, num_kv_heads, head_size], value: [n, num_kv_heads, v_head_size], any strides but 1 in the
    last dimension: tokens in HND order, [num_kv_heads, n, head_size], are `key.transpose(0, 1)`.
    key_cache, value_cache: [num_blocks, block_size, num_kv_heads, (v_)head_size], any strides but 1 in
    the last dimension (NHD and HND). slot_mapping: int64[n]. Two tokens must not name one slot. All
    layers at once: num_layers in front of the shape of tokens and caches.

    K and V may be columns of one tensor, as MLA's latent and rope parts are, but share no element. A
    latent that is one vector comes as key, with a value of head size 0.

    Same dtype as their cache, any element size, without a scale: bytes are moved as they are. A cache
    of float8_e4m3fn or float8_e5m2 also takes float32, float16 and bfloat16, stored as key / k_scale,
    rounded to nearest even, beyond the largest finite value that value; NaN stays NaN. k_scale,
    v_scale: float32, contiguous, where key and value are: [1] or [num_kv_heads], and [num_layers, 1]
    or [num_layers, num_kv_heads] for all layers. fp8 kept in a uint8 tensor: hand over
    `cache.view(torch.float8_e4m3fn)`.
    """
    _ops.write_kv(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale)


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
    """Reads tokens back: the K and V at each slot into key[n, ...] and value[n, ...].

    Slot -1 and those of block 0, the null block, give zeros.

    Shapes, dtypes, strides and scales as for `write_kv`; fp8 becomes fp8 * scale, rounded to the
    tokens' dtype. The context of a batch is `slot_mapping` of its requests and positions, then this:

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
    """Copies whole pages over all layers, between or within devices and the host; clears pages.

    src, dst: the memories that regions count from; src None: both sides lie in dst. regions:
    int64[r, 5] on the CPU, in bytes: offset of page 0 and distance of pages in src, the same in dst,
    bytes of a fragment. Usually made by `PageCopy`. All pages of a region lie in the memory (storage) of
    src, dst or one of `owners`, a list or tuple: the other tensors of an engine whose layers are
    separate. A page of src and a page of dst are the same page or do not overlap. Calls with
    owners stay outside `torch.compile`, which does not see that those are written. pairs: int32[n, 2],
    source and destination page, source -1 clears the destination; on the CPU (checked: pages out of
    range, one written twice, one both read and written), or on the device. num_src_blocks,
    num_dst_blocks: pages on either side.

    `engine`, between a device and the host: KERNEL accesses pinned host memory from the device, with
    `num_thread_blocks` thread blocks (0: a few). COPY_ENGINE merges consecutive pages into fragments and
    copies many per call; COPY_ENGINE_SINGLY copies one per call (KVCACHE_BATCH_COPIES=0 does that for all
    calls). COPY_ENGINE_SETTLED is COPY_ENGINE for host pages that nothing under way writes to: they may
    be read from the call on, before the stream's earlier work has run. pages_per_run: host pages that
    were pinned with one call (0: all). On the CPU several threads copy, whatever the engine.
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
    """Permutes blocks that hold another engine's bytes into the local layout, in place.

    cache: [num_blocks, block_size, num_kv_heads, head_size], any dtype, any strides, except that the last
    dimension is dense. The strides determine NHD or HND. offsets: int64[num_layers] on the CPU, bytes
    from cache's first element to that of each layer (`[0]`: cache itself). Each layer lies in the memory
    (storage) of cache or of one of `owners`, the other layers where those are tensors of their own; calls
    with owners stay outside `torch.compile`. The caller ensures that all layers have cache's layout and
    share no memory. indices: int32[n, k] on the CPU or on cache's device,
    each block once. With k = max(1, remote_block_size / block_size), the k blocks of a row hold, in
    memory order, the bytes of one or several remote blocks
    [num_kv_heads, remote_block_size, head_size] (HND) or [remote_block_size, num_kv_heads, head_size].
    Afterwards token t of these bytes is token t % block_size of block indices[i, t // block_size].

    One block size divides the other. Each byte is read once and written once; blocks that are not listed
    keep every byte. Indices on the CPU are always checked and need not outlive the call. Indices on a GPU
    are checked as the module says (a row with one out of range is skipped whole), and the caller ensures
    that no block is named twice.
    """
    _ops.permute_blocks_(
        cache, offsets, indices, remote_block_size, remote_is_hnd, _checked_owners(owners)
    )


# Ops and the positions of the arguments that may be on the CPU wherever the others are.
_ON_HOST = {
    "slot_mapping": {1},  # groups
    "update_block_tables": set(),
    "gather_block_tables": {1},  # groups
    "attention_metadata": {1},  # groups
    "write_kv": set(),
    "gather_kv": set(),
    "copy_blocks": {0, 1, 2, 3},  # either side, regions, pairs
    "permute_blocks_": {1, 2},  # offsets, indices
}


def _fake(op: Callable[..., None], on_host: set[int], *args: object) -> None:
    """The ops return nothing and only mutate, so a fake op only checks that tensors share a device."""
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
