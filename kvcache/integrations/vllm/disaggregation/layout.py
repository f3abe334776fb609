"""How the blocks of one KV cache group lie in a worker's memory, as engines tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcache.checks import integer, shown
from kvcache.transfer.description import CacheDescription
from kvcache.transfer.plan.transfer_plan import check_same_content

# All that a head of a token has lies together, or a kernel of vLLM for CPUs has an order of its own.
BY_TOKEN = "by token"
# K of a block's head is [head size, tokens], V is [tokens, head size]: the CPU's kernel of this name.
VEC = "vec"
_ORDERS = {
    "HND": ("layer", "block", "head", "token", "element"),
    "NHD": ("layer", "block", "token", "head", "element"),
}


@dataclass(frozen=True)
class GroupLayout:
    """A group's blocks, the same on every rank.

    layers: their names. description: of pages in which a head of a token is one piece, K and V together.
    pages_per_block: pages of the kernels that a block of the scheduler has. num_blocks: of the pool.
    interior: the order within a head of a page, `BY_TOKEN` or the name of a kernel for CPUs.
    """

    layers: tuple[str, ...]
    description: CacheDescription
    pages_per_block: int
    num_blocks: int
    interior: str = BY_TOKEN

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.description.block_size * self.pages_per_block

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "layers": list(self.layers),
            "description": self.description.to_dict(),
            "pages_per_block": self.pages_per_block,
            "num_blocks": self.num_blocks,
            "interior": self.interior,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GroupLayout:
        """The inverse of `to_dict`. TypeError or ValueError for anything else."""
        layers, interior = values["layers"], values["interior"]
        if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
            raise TypeError(f"layers is {shown(layers)}: expected a list of names")
        if not isinstance(interior, str):
            raise TypeError(f"interior is {shown(interior)}: expected a name")
        return cls(
            tuple(layers),
            CacheDescription.from_dict(values["description"]),
            integer(values["pages_per_block"], "pages_per_block", 1),
            integer(values["num_blocks"], "num_blocks", 1),
            interior,
        )


def layout_of_group(
    layers: Sequence[str],
    tensors: Sequence[torch.Tensor],
    *,
    engine_id: str,
    num_blocks: int,
    total_num_kv_heads: int,
    tp_size: int,
    is_mla: bool = False,
    interior: str = BY_TOKEN,
) -> GroupLayout:
    """The layout of a rank's tensors [pages, heads, tokens, content], one per layer.

    total_num_kv_heads: of the model; a rank holds an equal part, or one head that several ranks have.
    ValueError where pages are not whole runs of bytes, or unlike from layer to layer.
    """
    first = tensors[0]
    if first.ndim == 3 and is_mla:
        tensors = [tensor.unsqueeze(1) for tensor in tensors]
        first = tensors[0]
    like = {(tuple(each.shape), each.stride(), each.dtype) for each in tensors}
    if len(like) > 1 or first.ndim != 4:
        raise ValueError(
            f"layers {', '.join(layers)} have caches of shapes "
            f"{sorted({tuple(each.shape) for each in tensors})}: expected one shape, "
            "[blocks, heads, tokens, content]"
        )
    num_pages, heads, tokens, content = first.shape
    _, head_stride, token_stride, stride = first.stride()
    orders = {"HND": (tokens * content, content), "NHD": (content, heads * content)}
    order = next(
        (
            name
            for name, strides in orders.items()
            if stride == 1
            and (heads == 1 or head_stride == strides[0])
            and (tokens == 1 or token_stride == strides[1])
        ),
        None,
    )
    if order is None or num_pages % num_blocks:
        raise ValueError(
            f"layer {layers[0]} has a cache of shape {tuple(first.shape)} and strides "
            f"{first.stride()}, for {num_blocks} blocks: expected each block's heads, tokens and "
            "content together, as in vLLM's layouts LBHNC, LBNHC, BLHNC and BLNHC"
        )
    if interior != BY_TOKEN and order != "HND":
        raise ValueError(f"layer {layers[0]} lies as {order}: expected HND on a CPU")
    total = heads * tp_size
    if total != total_num_kv_heads and heads == 1 and total_num_kv_heads < tp_size:
        total = total_num_kv_heads
    description = CacheDescription(
        engine_id=engine_id,
        num_layers=len(layers),
        total_num_kv_heads=1 if is_mla else total,
        head_size=content,
        v_head_size=0,
        block_size=tokens,
        is_mla=is_mla,
        tp_size=tp_size,
        memory_order=_ORDERS[order],
        page_stride=first.stride(0) * first.element_size(),
        dtype=str(first.dtype).removeprefix("torch."),
    )
    return GroupLayout(tuple(layers), description, num_pages // num_blocks, num_blocks, interior)


def check_like(local: Sequence[GroupLayout], remote: Sequence[GroupLayout]) -> None:
    """ValueError unless blocks of the remote engine can become local ones: what differs, in one line."""
    if [each.layers for each in local] != [each.layers for each in remote]:
        raise ValueError(
            f"the local engine has groups of {[len(each.layers) for each in local]} layers, the remote "
            f"one of {[len(each.layers) for each in remote]}: expected the same layers in the same "
            "groups; serve the same model in both"
        )
    for mine, theirs in zip(local, remote):
        check_same_content(mine.description, theirs.description)
        if mine.interior != theirs.interior:
            raise ValueError(
                f"the local engine's kernels order a block as {mine.interior!r}, the remote one's as "
                f"{theirs.interior!r}: expected the same; serve both on machines of one kind"
            )
        is_same_size = mine.description.block_size == theirs.description.block_size
        if mine.interior not in (BY_TOKEN, VEC) and not is_same_size:
            raise ValueError(
                f"the local engine has blocks of {mine.description.block_size} tokens, the remote one "
                f"of {theirs.description.block_size}: expected the same with the CPU's kernel "
                f"{mine.interior!r}; set the same --block-size"
            )
