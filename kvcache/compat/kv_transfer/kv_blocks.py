# SPDX-License-Identifier: Apache-2.0
"""Copies blocks between an engine's own tensors on a device and in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvcache import ops
from kvcache.checks import check_once, check_range, instance, integers, one_of, shown
from kvcache.layouts import AttentionBackend, EngineBackend, backend_of_shape, described_backend
from kvcache.worker.pages.page_copy import PageCopy
from kvcache.worker.pages.pages import Pages
from kvcache.worker.pages.regions import Region, format_of, matched_regions

Ids = np.ndarray | torch.Tensor | Sequence[int]

Pair = tuple[torch.Tensor, torch.Tensor]  # a layer's source and destination tensor

# Maximum size in bytes of the host staging memory, which holds blocks in the device's memory order.
_STAGED_BYTES = 1 << 28


def copy_kv_blocks(
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: Ids,
    dst_block_ids: Ids,
    direction: str,
    *,
    backend: str | AttentionBackend | EngineBackend | None = None,
) -> None:
    """Copy blocks of all layers between a device and host memory.

    Block `src_block_ids[i]` is copied to `dst_block_ids[i]`. Source and destination may have any
    strides. If their memory orders differ (NHD and HND, layers packed or not) or they are padded, the
    copy is split into more and smaller fragments. With a GPU and unpinned host memory, different memory
    orders or padding also require a second copy on the host.

    With "h2d" from pinned memory, the copy is enqueued on the current stream: do not modify the source
    before the copy completes. On devices other than CPU and CUDA, torch copies the blocks, and the call
    returns after the copy.

    Args:
        src_kv_caches: One tensor per layer, indexed as defined by `backend`.
        dst_kv_caches: One tensor per layer, with the same shapes (except for the number of blocks) and
            dtypes as `src_kv_caches`.
        src_block_ids: Blocks to read. An empty list copies nothing.
        dst_block_ids: Blocks to write, one per entry of `src_block_ids`.
        direction: "h2d" (source in host memory) or "d2h" (destination in host memory, complete when the
            call returns).
        backend: The name of a backend in `kvcache.layouts`, an `AttentionBackend`, or an engine's backend
            class. None: the block dimension is inferred. Five dimensions whose first has size 2 are
            interpreted as `[2, num_blocks, ...]` (K and V). In all other shapes, the first dimension
            is the block.

    Raises:
        ValueError: The direction is unknown or does not match the devices of the tensors, the
            lists differ in length, source and destination have different layers, tensors differ in
            shape or dtype, the copy would consist of too many contiguous fragments, an id is out of
            range, a block is written twice, or, if source and destination share memory, a block is
            both read and written. Nothing has been copied.
        TypeError: An argument has the wrong type. Nothing has been copied.
    """
    for name, caches in (("src_kv_caches", src_kv_caches), ("dst_kv_caches", dst_kv_caches)):
        instance(caches, Mapping, name)
        for layer, tensor in caches.items():
            instance(tensor, torch.Tensor, f"{name}[{layer!r}]")
            if tensor.ndim == 0:
                raise ValueError(
                    f"{name}[{layer!r}] has no dimensions: expected a dimension of blocks"
                )
    one_of(direction, "direction", ("h2d", "d2h"))
    src_ids, dst_ids = _ids(src_block_ids, "src_block_ids"), _ids(dst_block_ids, "dst_block_ids")
    if len(src_ids) != len(dst_ids):
        raise ValueError(
            f"src_block_ids has {len(src_ids)} entries, but dst_block_ids has {len(dst_ids)}: "
            "expected equal lengths"
        )
    _check_layers(src_kv_caches, dst_kv_caches)
    if not src_kv_caches:
        raise ValueError("src_kv_caches is empty: expected one tensor per layer")
    described = None if backend is None else described_backend(backend)
    dims = []
    for name, src in src_kv_caches.items():
        dims.append(_block_dim(name, src, dst_kv_caches[name], described))
        _check_alike(name, src, dst_kv_caches[name], dims[-1])
    tensors = [(src, dst_kv_caches[name]) for name, src in src_kv_caches.items()]
    src = Pages.over([pair[0] for pair in tensors], dims)
    dst = Pages.over([pair[1] for pair in tensors], dims)
    _check_direction(direction, src.device, dst.device)
    if len(src_ids) == 0:
        return
    check_range("src_block_ids", "is", src_ids, 0, src.num_blocks)
    check_range("dst_block_ids", "is", dst_ids, 0, dst.num_blocks)
    check_once("dst_block_ids names block", dst_ids)
    host = src if direction == "h2d" else dst
    same = src.formats == dst.formats and np.array_equal(src.sizes, dst.sizes)
    if not same and src.device != dst.device and not host.is_pinned:
        _copy_staged(tensors, dims, np.stack([src_ids, dst_ids], axis=1), direction)
        return
    if not same:
        src, dst = _matched(tensors, dims)
    engine = ops.KERNEL if host.is_pinned else ops.COPY_ENGINE
    try:
        PageCopy(src, dst).copy(np.stack([src_ids, dst_ids], axis=1), engine=engine)
    except RuntimeError as error:
        if str(error).startswith("pairs["):  # src and dst share memory
            raise ValueError(str(error)) from None
        raise
    if direction == "d2h" and src.device.type == "cuda":
        torch.cuda.current_stream(src.device).synchronize()


def _matched(tensors: list[Pair], dims: list[int]) -> tuple[Pages, Pages]:
    """Return source and destination pages whose corresponding fragments contain the same elements."""
    sides: tuple[list[Region], list[Region]] = [], []
    layers: list[int] = []
    for layer, (pair, dim) in enumerate(zip(tensors, dims)):
        found = matched_regions(*pair, dim, f"layer {layer}")
        layers += [layer] * len(found[0])
        for side, regions in zip(sides, found):
            side += regions
    src, dst = (
        Pages(
            tensors[0][side],
            tensors[0][side].shape[dims[0]],
            table[:, 0] - tensors[0][side].data_ptr(),
            table[:, 1],
            table[:, 2],
            layers,
            owners=[tensors[layer][side] for layer in layers],
        )
        for side, table in enumerate(np.array(sides, np.int64))
    )
    return src, dst


def _copy_staged(tensors: list[Pair], dims: list[int], pairs: np.ndarray, direction: str) -> None:
    """Copy between a device and unpinned host memory through staging memory in device order."""
    on_device = [pair[direction == "h2d"] for pair in tensors]
    block_bytes = sum(each.nbytes // each.shape[dim] for each, dim in zip(on_device, dims))
    at_once = max(1, _STAGED_BYTES // block_bytes)
    for first in range(0, len(pairs), at_once):
        some = pairs[first : first + at_once]
        staged = [_like_blocks(each, dim, len(some)) for each, dim in zip(on_device, dims)]
        numbers = np.arange(len(some))
        for step, ids in (
            ([(src, mine) for (src, _), mine in zip(tensors, staged)], (some[:, 0], numbers)),
            ([(mine, dst) for (_, dst), mine in zip(tensors, staged)], (numbers, some[:, 1])),
        ):
            PageCopy(*_matched(step, dims)).copy(np.stack(ids, axis=1), engine=ops.COPY_ENGINE)
            if on_device[0].device.type == "cuda":  # wait, because `staged` is read or freed next
                torch.cuda.current_stream(on_device[0].device).synchronize()


def _like_blocks(tensor: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Allocate dense host memory for `count` blocks in the memory order of `tensor`."""
    order = sorted(range(tensor.ndim), key=lambda d: (d != dim, -tensor.stride(d)))
    sizes = [count if d == dim else tensor.shape[d] for d in order]
    dense = torch.empty(sizes, dtype=tensor.dtype, device="cpu")
    return dense.permute([order.index(d) for d in range(tensor.ndim)])


def _ids(ids: Ids, name: str) -> np.ndarray:
    on_device = isinstance(ids, torch.Tensor) and not ids.is_meta  # meta tensors are rejected below
    return integers(ids.cpu() if on_device else ids, name, ())


def _check_layers(src: Mapping[str, torch.Tensor], dst: Mapping[str, torch.Tensor]) -> None:
    for name, mine, other, others in (
        ("src_kv_caches", src, "dst_kv_caches", dst),
        ("dst_kv_caches", dst, "src_kv_caches", src),
    ):
        unknown = [layer for layer in mine if layer not in others]
        if unknown:
            raise ValueError(
                f"{name} has layer {shown(unknown[0])}: expected a layer that {other} also has"
            )


def _block_dim(
    name: str, src: torch.Tensor, dst: torch.Tensor, described: AttentionBackend | None
) -> int:
    if described is not None:
        if src.ndim != len(described.dims):
            raise ValueError(
                f"layer {name!r} has shape {list(src.shape)}: expected [{', '.join(described.dims)}] "
                f"of backend {described.name!r}"
            )
        return described.dims.index("block")
    if src.ndim != 5 or src.shape[0] != 2 or dst.shape[0] != 2:
        return 0
    shape = dst.shape if src.shape[1] == 2 else src.shape  # the number of blocks may differ
    return backend_of_shape(shape, f"layer {name!r}").dims.index("block")


def _check_alike(name: str, src: torch.Tensor, dst: torch.Tensor, block_dim: int) -> None:
    mine, other = (format_of(tensor, block_dim)[:2] for tensor in (src, dst))
    if mine != other:
        raise ValueError(
            f"layer {name!r} is {src.dtype}{list(src.shape)} in src_kv_caches, but "
            f"{dst.dtype}{list(dst.shape)} in dst_kv_caches: expected shapes that differ only in the "
            "number of blocks"
        )


def _check_direction(direction: str, src: torch.device, dst: torch.device) -> None:
    name, host = ("src_kv_caches", src) if direction == "h2d" else ("dst_kv_caches", dst)
    if host.type != "cpu":
        raise ValueError(f"direction is {shown(direction)} and {name} is on {host}: expected cpu")
