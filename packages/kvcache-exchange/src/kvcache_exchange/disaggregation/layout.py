# SPDX-License-Identifier: Apache-2.0
"""The memory layout of one KV cache group's blocks, in the form that engines exchange."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvcache.checks import instance, integer, shown
from kvcache.transfer import CacheDescription, StateDescription, plan_states
from kvcache.transfer.plan.transfer_plan import check_same_content

# Values of `interior`. With `BY_TOKEN`, the elements of a head are ordered as in the description.
# vLLM's CPU kernels use a different order.
BY_TOKEN = "by token"
# The "vec" CPU kernel stores K as [head size, tokens] and V as [tokens, head size].
VEC = "vec"


@dataclass(frozen=True)
class GroupLayout:
    """Describes the memory layout of one group's blocks. All ranks of an engine share it.

    Args:
        layers: Names of the group's layers on all pipeline stages.
        description: Description of the pages, each of which holds either tokens or one state.
        pages_per_block: Number of kernel pages per scheduler block.
        num_blocks: Number of blocks in the pool.
        interior: Order of the elements within each head in a page: `BY_TOKEN`, or the name of a CPU
            kernel.
        spec: `GroupSpec.summary` of the group. "": unknown.
    """

    layers: tuple[str, ...]
    description: CacheDescription | StateDescription
    pages_per_block: int
    num_blocks: int
    interior: str = BY_TOKEN
    spec: str = ""

    @property
    def is_state(self) -> bool:
        """Whether each block holds a state rather than tokens."""
        return isinstance(self.description, StateDescription)

    @property
    def block_size(self) -> int:
        """Number of tokens per block, summed over all context-parallel ranks. Undefined if blocks
        hold states.
        """
        return self.description.tokens_per_page * self.pages_per_block

    def num_regions(self, rank: int) -> int:
        """Return the number of memory regions, and thus of start addresses, that locate a rank's
        pages.
        """
        if self.is_state:
            return len(self.description.layers(rank))
        return len(self.description.stage_of(rank).region_strides)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields, keyed by name, as JSON values."""
        return {
            "layers": list(self.layers),
            "description": self.description.to_dict(),
            "pages_per_block": self.pages_per_block,
            "num_blocks": self.num_blocks,
            "interior": self.interior,
            "spec": self.spec,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GroupLayout:
        """Create a layout from the result of `to_dict`. Raises TypeError or ValueError for any
        other value.
        """
        instance(values, Mapping, "values")
        if missing := [each.name for each in fields(cls) if each.name not in values]:
            raise ValueError(f"values lacks {missing}: expected the fields of to_dict")
        layers, interior, spec = values["layers"], values["interior"], values["spec"]
        if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
            raise TypeError(f"layers is {shown(layers)}: expected a list of names")
        if not isinstance(interior, str):
            raise TypeError(f"interior is {shown(interior)}: expected a name")
        if not isinstance(spec, str):
            raise TypeError(f"spec is {shown(spec)}: expected text")
        description = values["description"]
        instance(description, Mapping, "description")
        kind = StateDescription if "tensors" in description else CacheDescription
        return cls(
            tuple(layers),
            kind.from_dict(description),
            integer(values["pages_per_block"], "pages_per_block", 1),
            integer(values["num_blocks"], "num_blocks", 1),
            interior,
            spec,
        )


def check_like(
    local: Sequence[GroupLayout], remote: Sequence[GroupLayout], converts: Collection[str] = ()
) -> None:
    """Raise ValueError unless remote blocks can be converted to local blocks.

    The one-line message states the difference. `converts` lists the values of `interior` between
    which the caller can convert.
    """
    if [each.layers for each in local] != [each.layers for each in remote]:
        raise ValueError(
            f"the local engine has groups of {[len(each.layers) for each in local]} layers, but "
            f"the remote engine has groups of {[len(each.layers) for each in remote]}: expected the "
            "same layers in each group; serve the same model in both engines"
        )
    for mine, theirs in zip(local, remote):
        if mine.is_state and theirs.is_state:
            plan_states(mine.description, theirs.description, 0)
            continue
        check_same_content(mine.description, theirs.description)
        is_converted = {mine.interior, theirs.interior} <= set(converts)
        if mine.interior != theirs.interior and not is_converted:
            raise ValueError(
                f"the local engine's kernels arrange a block as {mine.interior!r}, but the remote "
                f"engine's kernels use {theirs.interior!r}: expected the same order; run both engines "
                "on machines of the same kind"
            )
        is_same_size = mine.description.block_size == theirs.description.block_size
        if mine.interior not in (BY_TOKEN, VEC) and not is_same_size:
            raise ValueError(
                f"the local engine has blocks of {mine.description.block_size} tokens, but "
                f"the remote engine has blocks of {theirs.description.block_size}: expected equal block "
                f"sizes, which the CPU kernel's order {mine.interior!r} requires; set the same "
                "--block-size"
            )


def is_complete(blocks: Sequence[int], block_size: int, first_token: int, end_token: int) -> bool:
    """Return whether all blocks for tokens [first_token, end_token) are present, that is, within
    the block table and not 0.
    """
    if first_token >= end_token:
        return True
    first, last = first_token // block_size, (end_token - 1) // block_size
    return last < len(blocks) and all(blocks[first : last + 1])
