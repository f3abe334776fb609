# SPDX-License-Identifier: Apache-2.0
"""The attention function of transformers models, which reads the contexts of a batch's requests.

The function is registered as "kvcache" in transformers' attention interface. It uses PyTorch's
scaled-dot-product attention (SDPA). Layers with features that SDPA lacks (sinks, capped scores) use
the model's eager implementation. Outside `PagedModel.forward`, the function computes the same
attention over the model's own tensors, so an attached model can still run and generate without the
cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvcache_serve.engine.batch import Batch

NAME = "kvcache"
# Up to this size, one padded call was measured to be faster than one call per length.
_FEW_KEYS = 1024


class ForwardCache(Protocol):
    """The cache of the current forward pass."""

    batch: Batch
    resumes: bool

    def attend(self, layer: int | None) -> int:
        """Begin attention in a module with this layer index. Returns the layer whose KV it reads."""

    def group_of(self, layer: int) -> int:
        """Return the cache group of a layer's K and V."""

    def parts_of(self, group: int) -> Parts:
        """Return the parts into which the batch is split for attention in this group."""


# The cache of the current `PagedModel.forward`, or None outside it.
CURRENT: ContextVar[ForwardCache | None] = ContextVar("kvcache_current", default=None)


class Part(NamedTuple):
    """Requests whose attention is computed in one call. There are b requests, each with q queries
    and k keys.

    `queries`: int64[b, q], the queries' indices in the batch's tokens, or a slice if b is 1.
    `keys`: the range of the b x k keys in `Parts.slots`.
    `mask`: bool[b, 1, q, k], True where a query attends to a key. None: every query attends to
    every key.
    """

    queries: torch.Tensor | slice
    keys: slice
    num_requests: int
    mask: torch.Tensor | None


class Parts(NamedTuple):
    """The parts into which a batch is split for attention in one group.

    `slots`: int64[c] on the device. Slots of the K and V to gather, concatenated over all parts. Within
    a part, shorter contexts are padded by repeating their last slot.
    """

    slots: torch.Tensor
    parts: list[Part]


def parts_of(batch: Batch, group: int) -> Parts:
    """Combine single-token requests into parts, padded to the longest context.

    Each request with several tokens is a separate part.
    """
    context = batch.context(group)
    starts = context.ends - context.lengths
    single = np.flatnonzero(batch.query_lens == 1)
    device = batch.positions.device
    parts: list[Part] = []
    gathered: list[np.ndarray] = []  # indices into the group's context
    end = 0

    def to_device(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def add(queries: torch.Tensor | slice, keys: np.ndarray, mask: np.ndarray | None) -> None:
        nonlocal end
        start, end = end, end + keys.size
        gathered.append(keys.ravel())
        on_device = None if mask is None else to_device(mask)
        parts.append(Part(queries, slice(start, end), len(keys), on_device))

    for chosen in _by_length(single, context.lengths):
        lengths = context.lengths[chosen]
        width = int(lengths.max())
        columns = np.arange(width)
        keys = starts[chosen, None] + np.minimum(columns, lengths[:, None] - 1)
        is_padded = (lengths != width).any()
        mask = (columns < lengths[:, None])[:, None, None] if is_padded else None
        add(to_device(batch.query_start_loc[chosen][:, None]), keys, mask)
    first_needed = batch.kind(group).first_needed_token
    for i in np.flatnonzero(batch.query_lens > 1):
        positions = np.arange(batch.starts[i], batch.seq_lens[i])
        seen = context.firsts[i] + np.arange(context.lengths[i])
        firsts = np.array([first_needed(int(position)) for position in positions])
        mask = (seen <= positions[:, None]) & (seen >= firsts[:, None])
        queries = slice(*batch.query_start_loc[i : i + 2].tolist())
        add(queries, np.arange(starts[i], context.ends[i])[None], mask[None, None])
    return Parts(context.slots[to_device(np.concatenate(gathered))], parts)


def _by_length(requests: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Group requests by context length, so that padding at most doubles a context.

    Small batches are not split, because with few keys, separate calls would cost more than the
    padding.
    """
    if len(requests) and len(requests) * int(lengths[requests].max()) <= _FEW_KEYS:
        return [requests]
    sizes = np.frexp(lengths[requests].astype(np.float64))[1]
    return [requests[sizes == size] for size in np.unique(sizes)]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention, using the signature that transformers expects. query: [1, heads, t, size].

    `key` and `value` are the K and V of the slots in `Parts.slots`.
    """
    reader = CURRENT.get()
    attend = _attention_of(module, options)
    if reader is None:
        return attend(module, query, key, value, attention_mask, **options)
    if attention_mask is not None and attention_mask.numel() != 1:
        raise RuntimeError(f"{type(module).__name__} uses its own attention mask")
    layer = reader.attend(module.layer_idx)
    num_tokens = query.shape[2]
    out = query.new_empty(num_tokens, query.shape[1], value.shape[-1])
    for queries, keys, num_requests, mask in reader.parts_of(reader.group_of(layer)).parts:
        if isinstance(queries, slice):
            q = query[:, :, queries]
        else:
            q = query[0].transpose(0, 1)[queries].transpose(1, 2)
        # [heads, b * k, size] to [b, heads, k, size] without a copy
        k, v = (
            each[0, :, keys].unflatten(1, (num_requests, -1)).transpose(0, 1)
            for each in (key, value)
        )
        # [b, q, heads, size]
        out[queries] = attend(module, q, k, v, mask, **(options | {"is_causal": False}))[0]
    return out[None], None


def _attention_of(module: torch.nn.Module, options: dict[str, object]) -> Callable:
    if options.get("position_bias") is not None:
        raise ValueError(f"{type(module).__name__} passes a position_bias, which is not supported")
    if options.get("softcap") is None and options.get("s_aux") is None:
        return sdpa_attention_forward
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(
            f"{type(module).__name__} caps scores or has sinks, and its module has no "
            "eager_attention_forward: this is not supported"
        )

    def attend(module, q, k, v, mask, **options):
        added = q.new_zeros(()) if mask is None else torch.zeros_like(mask, dtype=q.dtype)
        if mask is not None:
            added.masked_fill_(~mask, torch.finfo(q.dtype).min)
        return eager(module, q, k, v, added, **options)

    return attend


def _dense_mask(*args: object, **options: object) -> torch.Tensor:
    """Return the mask of a model that runs without pages.

    Never returns None, because eager attention needs a mask.
    """
    return sdpa_mask(*args, **(options | {"allow_is_causal_skip": False}))


def register() -> None:
    """Register "kvcache" as an attention implementation of transformers."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionMaskInterface.register(NAME, _dense_mask)
