"""Copies blocks between an engine's own tensors on a device and in host memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from kvcache import ops
from kvcache.checks import check_once, check_range, integers
from kvcache.layouts import AttentionBackend, backend_of_shape, described_backend
from kvcache.worker.pages.pages import Pages
from kvcache.worker.pages.regions import format_of
from kvcache.worker.swap.page_copy import PageCopy

Ids = np.ndarray | torch.Tensor | Sequence[int]


def copy_kv_blocks(
    src_kv_caches: Mapping[str, torch.Tensor],
    dst_kv_caches: Mapping[str, torch.Tensor],
    src_block_ids: Ids,
    dst_block_ids: Ids,
    direction: str,
    *,
    backend: str | AttentionBackend | None = None,
) -> None:
    """Copies blocks of all layers, `src_block_ids[i]` to `dst_block_ids[i]`, in one call.

    src_kv_caches, dst_kv_caches: a tensor per layer, indexed as `backend` says; both sides are alike
    except for the number of blocks. backend: a name of `kvcache.layouts` or your own
    `AttentionBackend`. None: five dimensions with a first one of 2 are [2, num_blocks, ...], K and V;
    for other shapes the first dimension counts blocks. direction: "h2d" (src in host memory) or "d2h"
    (dst in host memory, filled when the call returns). "h2d" from pinned memory is enqueued on the
    current stream: do not change the source before the copy is done. Without ids nothing happens.

    ValueError or TypeError, and no byte moves, for another direction or one that the tensors' devices
    do not have, lists of different length, layers that only one side has, tensors of different shape,
    dtype or order in memory, ids out of range, a block written twice, or, where both sides are one
    memory, both read and written.
    """
    if direction not in ("h2d", "d2h"):
        raise ValueError(f"direction is {direction!r}: expected 'h2d' or 'd2h'")
    src_ids, dst_ids = _ids(src_block_ids, "src_block_ids"), _ids(dst_block_ids, "dst_block_ids")
    if len(src_ids) != len(dst_ids):
        raise ValueError(
            f"src_block_ids has {len(src_ids)} entries, dst_block_ids {len(dst_ids)}: "
            "expected the same number"
        )
    _check_layers(src_kv_caches, dst_kv_caches)
    if not src_kv_caches:
        raise ValueError("src_kv_caches is empty: expected one tensor per layer")
    described = None if backend is None else described_backend(backend)
    dims = []
    for name, src in src_kv_caches.items():
        dims.append(_block_dim(name, src, dst_kv_caches[name], described))
        _check_alike(name, src, dst_kv_caches[name], dims[-1])
    src = Pages.over(list(src_kv_caches.values()), dims)
    dst = Pages.over([dst_kv_caches[name] for name in src_kv_caches], dims)
    _check_direction(direction, src.device, dst.device)
    if len(src_ids) == 0:
        return
    check_range("src_block_ids", "is", src_ids, 0, src.num_blocks)
    check_range("dst_block_ids", "is", dst_ids, 0, dst.num_blocks)
    check_once("dst_block_ids names block", dst_ids)
    host = src if direction == "h2d" else dst
    engine = ops.KERNEL if host.is_pinned else ops.COPY_ENGINE
    try:
        PageCopy(src, dst).copy(np.stack([src_ids, dst_ids], axis=1), engine=engine)
    except RuntimeError as error:
        if str(error).startswith("pairs["):  # src and dst are one memory
            raise ValueError(str(error)) from None
        raise
    if direction == "d2h" and src.device.type == "cuda":
        torch.cuda.current_stream(src.device).synchronize()


def _ids(ids: Ids, name: str) -> np.ndarray:
    return integers(ids.cpu().numpy() if isinstance(ids, torch.Tensor) else ids, name, ())


def _check_layers(src: Mapping[str, torch.Tensor], dst: Mapping[str, torch.Tensor]) -> None:
    for name, mine, other, others in (
        ("src_kv_caches", src, "dst_kv_caches", dst),
        ("dst_kv_caches", dst, "src_kv_caches", src),
    ):
        unknown = [layer for layer in mine if layer not in others]
        if unknown:
            raise ValueError(f"{name} has layer {unknown[0]!r}: expected one that {other} has too")


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
    shape = dst.shape if src.shape[1] == 2 else src.shape  # numbers of blocks may differ
    return backend_of_shape(shape, f"layer {name!r}").dims.index("block")


def _check_alike(name: str, src: torch.Tensor, dst: torch.Tensor, block_dim: int) -> None:
    mine, other = (format_of(tensor, block_dim) for tensor in (src, dst))
    if mine[:2] != other[:2]:
        raise ValueError(
            f"layer {name!r} is {src.dtype}{list(src.shape)} in src_kv_caches, "
            f"{dst.dtype}{list(dst.shape)} in dst_kv_caches: expected the same but for blocks"
        )
    if mine != other:
        raise ValueError(
            f"layer {name!r} has strides {src.stride()} in src_kv_caches, {dst.stride()} in "
            "dst_kv_caches: expected the same order in memory"
        )


def _check_direction(direction: str, src: torch.device, dst: torch.device) -> None:
    name, host = ("src_kv_caches", src) if direction == "h2d" else ("dst_kv_caches", dst)
    if host.type != "cpu":
        raise ValueError(f"direction is {direction!r} and {name} is on {host}: expected cpu")
