"""How the blocks of one KV cache group lie in an engine's memory, as engines tell each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from kvcache.checks import instance, integer, shown
from kvcache.transfer.description import CacheDescription
from kvcache.transfer.plan.transfer_plan import check_same_content
from kvcache.transfer.states import StateDescription, plan_states

# All that a head of a token has lies as the description says, or a kernel of vLLM for CPUs has an order
# of its own.
BY_TOKEN = "by token"
# K of a block's head is [head size, tokens], V is [tokens, head size]: the CPU's kernel of this name.
VEC = "vec"


@dataclass(frozen=True)
class GroupLayout:
    """A group's blocks, the same on every rank.

    layers: their names, all stages'. description: of the pages, which hold tokens or one state each.
    pages_per_block: pages of the kernels that a block of the scheduler has. num_blocks: of the pool.
    interior: the order within a head of a page, `BY_TOKEN` or the name of a kernel for CPUs.
    """

    layers: tuple[str, ...]
    description: CacheDescription | StateDescription
    pages_per_block: int
    num_blocks: int
    interior: str = BY_TOKEN

    @property
    def is_state(self) -> bool:
        """Whether a block holds a state."""
        return isinstance(self.description, StateDescription)

    @property
    def block_size(self) -> int:
        """Tokens of a block, over all context-parallel ranks; a state's has none of its own."""
        return self.description.tokens_per_page * self.pages_per_block

    def num_regions(self, rank: int) -> int:
        """How many addresses name a rank's pages."""
        if self.is_state:
            return len(self.description.layers(rank))
        return len(self.description.stage_of(rank).region_strides)

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
        instance(values, Mapping, "values")
        if missing := [each.name for each in fields(cls) if each.name not in values]:
            raise ValueError(f"values lacks {missing}: expected those of to_dict")
        layers, interior = values["layers"], values["interior"]
        if not isinstance(layers, list) or not all(isinstance(name, str) for name in layers):
            raise TypeError(f"layers is {shown(layers)}: expected a list of names")
        if not isinstance(interior, str):
            raise TypeError(f"interior is {shown(interior)}: expected a name")
        description = values["description"]
        instance(description, Mapping, "description")
        kind = StateDescription if "tensors" in description else CacheDescription
        return cls(
            tuple(layers),
            kind.from_dict(description),
            integer(values["pages_per_block"], "pages_per_block", 1),
            integer(values["num_blocks"], "num_blocks", 1),
            interior,
        )


def check_like(local: Sequence[GroupLayout], remote: Sequence[GroupLayout]) -> None:
    """ValueError unless blocks of the remote engine can become local ones: what differs, in one line."""
    if [each.layers for each in local] != [each.layers for each in remote]:
        raise ValueError(
            f"the local engine has groups of {[len(each.layers) for each in local]} layers, the remote "
            f"one of {[len(each.layers) for each in remote]}: expected the same layers in the same "
            "groups; serve the same model in both"
        )
    for mine, theirs in zip(local, remote):
        if mine.is_state and theirs.is_state:
            plan_states(mine.description, theirs.description, 0)
            continue
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


def is_complete(blocks: Sequence[int], block_size: int, first_token: int, end_token: int) -> bool:
    """Whether blocks hold the tokens [first_token, end_token): none is 0 or behind the last."""
    if first_token >= end_token:
        return True
    first, last = first_token // block_size, (end_token - 1) // block_size
    return last < len(blocks) and all(blocks[first : last + 1])
