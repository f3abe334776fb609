# SPDX-License-Identifier: Apache-2.0
"""The distribution of KV heads and layers over an engine's ranks.

Heads are spread over tensor-parallel ranks in one of two ways. If the number of ranks does not
exceed the number of heads, the heads are *sharded*: each rank holds an equal number of consecutive
heads. If there are more ranks than heads, the heads are *replicated*: each rank holds one head, and
consecutive ranks hold the same head. MLA's latent vector is treated as a single head that every
rank holds.

Layers are spread over pipeline stages, each with its own tensor-parallel ranks. By default, all
stages have the same number of layers and ranks. Otherwise, the stages are listed as `PipelineStage`
objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcache.checks import check_count, integer, named_sizes

MAX_RANKS = 4096  # maximum number of ranks per engine; plans iterate over the ranks of both engines


class PipelineStage(NamedTuple):
    """A pipeline stage of an engine: its number of layers, which may be 0 (a cache group may have
    none on a stage), and of tensor-parallel ranks.
    """

    num_layers: int
    tp_size: int


def size_ratio(local: int, remote: int, what: str) -> int:
    """Return `local / remote`, or `-(remote / local)` if the remote size is larger.

    The result is 1 if both sizes are equal, and never 0 or -1. Raises ValueError, which names the size
    `what`, if neither size divides the other.
    """
    local = integer(local, f"local {what}", 1)
    remote = integer(remote, f"remote {what}", 1)
    large, small = max(local, remote), min(local, remote)
    if large % small:
        raise ValueError(
            f"local {what} is {local}, remote {what} is {remote}: expected one to divide the other"
        )
    return large // small if local >= remote else -(large // small)


def heads_of_rank(total_num_kv_heads: int, tp_size: int, tp_rank: int) -> range:
    """Return the range of the model's KV heads that a tensor-parallel rank holds.

    If heads are sharded, each rank holds a range of equal length. If they are replicated (more
    ranks than heads), rank r holds head `r * total_num_kv_heads // tp_size`.

    Args:
        total_num_kv_heads: Number of KV heads in the model.
        tp_size: Number of tensor-parallel ranks.
        tp_rank: The rank.

    Raises:
        ValueError: Neither size divides the other, or the rank is out of range.

    Example:
        >>> heads_of_rank(8, 4, 1), heads_of_rank(2, 8, 5)
        (range(2, 4), range(1, 2))
    """
    total_num_kv_heads, tp_size = _checked_heads(total_num_kv_heads, tp_size)
    tp_rank = integer(tp_rank, "tp_rank", 0, tp_size - 1)
    first = tp_rank * total_num_kv_heads // tp_size
    return range(first, first + max(1, total_num_kv_heads // tp_size))


def ranks_of_head(total_num_kv_heads: int, tp_size: int, head: int) -> range:
    """Return the tensor-parallel ranks that hold a head: one rank, or all replicas.

    Args:
        total_num_kv_heads: Number of KV heads in the model.
        tp_size: Number of tensor-parallel ranks.
        head: The head.

    Raises:
        ValueError: Neither size divides the other, or the head is out of range.

    Example:
        >>> ranks_of_head(8, 4, 3), ranks_of_head(2, 8, 1)
        (range(1, 2), range(4, 8))
    """
    total_num_kv_heads, tp_size = _checked_heads(total_num_kv_heads, tp_size)
    head = integer(head, "head", 0, total_num_kv_heads - 1)
    first = head * tp_size // total_num_kv_heads
    return range(first, first + max(1, tp_size // total_num_kv_heads))


def layers_of_rank(num_layers: int, pp_size: int, pp_rank: int) -> range:
    """Return the range of layers on a pipeline rank. Ranks hold consecutive ranges of equal length.

    Args:
        num_layers: Number of layers in the model.
        pp_size: Number of pipeline ranks.
        pp_rank: The rank.

    Raises:
        ValueError: `pp_size` does not divide `num_layers`, or the rank is out of range.

    Example:
        >>> layers_of_rank(32, 4, 1)
        range(8, 16)
    """
    num_layers, pp_size = integer(num_layers, "num_layers", 1), integer(pp_size, "pp_size", 1)
    pp_rank = integer(pp_rank, "pp_rank", 0, pp_size - 1)
    if num_layers % pp_size:
        raise ValueError(
            f"num_layers is {num_layers}, pp_size is {pp_size}: expected equal layer counts per rank"
        )
    per_rank = num_layers // pp_size
    return range(pp_rank * per_rank, (pp_rank + 1) * per_rank)


def replica_for(
    head: int, total_num_kv_heads: int, tp_size: int, reader: int = 0, num_readers: int = 1
) -> int:
    """Return which of the tensor-parallel ranks that hold a head serves it to a given reader.

    Readers are distributed evenly: the numbers of readers of any two replicas differ by at most
    one.

    Args:
        head: The head.
        total_num_kv_heads: Number of KV heads in the model.
        tp_size: Number of tensor-parallel ranks in the engine that is read.
        reader: Index of the reader, starting at 0.
        num_readers: Number of ranks of the other engine that read this head.

    Raises:
        ValueError: Sizes do not divide each other, or the head or reader is out of range.

    Example:
        >>> [replica_for(1, 2, 8, reader, 2) for reader in (0, 1)]  # ranks 4 to 7 hold head 1
        [4, 6]
    """
    ranks = ranks_of_head(total_num_kv_heads, tp_size, head)
    integer(num_readers, "num_readers", 1)
    integer(reader, "reader", 0, num_readers - 1)
    return ranks[reader * len(ranks) // num_readers]


def check_world_size(world_size: int) -> None:
    """Raise ValueError if an engine has more than `MAX_RANKS` ranks."""
    if world_size > MAX_RANKS:
        raise ValueError(f"world_size is {world_size} ranks: expected at most {MAX_RANKS}")


def check_stages(
    stages: Sequence[Sequence[int]], name: str = "stages"
) -> tuple[PipelineStage, ...]:
    """Return stages of 0 layers or more and 1 rank or more. Raises TypeError or ValueError."""
    return named_sizes(stages, PipelineStage, name, (0, 1))


def check_stages_of(
    stages: Sequence[Sequence[int]], num_layers: int, *, pp_size: int, tp_size: int
) -> tuple[PipelineStage, ...]:
    """Return stages that hold all layers, if `pp_size` and `tp_size` are 1. See `check_stages`."""
    checked = check_stages(stages)
    for name, size in (("pp_size", pp_size), ("tp_size", tp_size)):
        if size != 1:
            raise ValueError(f"{name} is {size}: expected 1 with stages, which specify it")
    if (held := sum(stage.num_layers for stage in checked)) != num_layers:
        raise ValueError(
            f"num_layers is {num_layers}: expected {held}, the total number of layers in stages"
        )
    return checked


def check_page_stride(
    page_stride: int | Sequence[int], page_bytes: Sequence[int]
) -> int | tuple[int, ...]:
    """Return page strides, for all stages or per stage, that are at least the page sizes."""
    if not isinstance(page_stride, Sequence):
        return integer(page_stride, "page_stride", max(page_bytes))
    check_count(page_stride, len(page_bytes), "page_stride", "stage")
    given = enumerate(zip(page_stride, page_bytes))
    return tuple(integer(stride, f"page_stride[{i}]", least) for i, (stride, least) in given)


def layers_of_stages(stages: Sequence[PipelineStage]) -> tuple[range, ...]:
    """Return the layers of each stage, as consecutive ranges."""
    found, first = [], 0
    for stage in stages:
        found.append(range(first, first + stage.num_layers))
        first += stage.num_layers
    return tuple(found)


def equal_stages(num_layers: int, pp_size: int, tp_size: int) -> tuple[PipelineStage, ...]:
    """Return equal stages. Raises ValueError if `pp_size` does not divide `num_layers`."""
    per_stage = len(layers_of_rank(num_layers, pp_size, 0))
    return (PipelineStage(per_stage, integer(tp_size, "tp_size", 1)),) * pp_size


def sources_of_rank(
    readers: Sequence[PipelineStage],
    sources: Sequence[PipelineStage],
    total_num_kv_heads: int,
    pp_rank: int,
    tp_rank: int,
) -> list[tuple[int, int]]:
    """Return the (pp_rank, tp_rank) of the sources of a reader's rank, in ascending order.

    Both engines hold the same layers. Each head of each layer is read from exactly one rank.
    """
    mine, at = layers_of_stages(readers)[pp_rank], (0, pp_rank, tp_rank)
    return sorted(
        {
            (number, source)
            for number, layers in enumerate(layers_of_stages(sources))
            if overlap(layers, mine)
            for source in sources_of_heads(readers, sources, number, total_num_kv_heads, at)
        }
    )


def sources_of_heads(
    readers: Sequence[PipelineStage],
    sources: Sequence[PipelineStage],
    number: int,
    total_num_kv_heads: int,
    at: tuple[int, int, int],
    cp_world_size: int = 1,
) -> list[int]:
    """Return, for each head of a rank of the reader, the tensor-parallel rank to read it from.

    Args:
        readers: The reader's pipeline stages.
        sources: The source's pipeline stages.
        number: The source's stage, which shares layers with the rank.
        total_num_kv_heads: Number of KV heads in the model.
        at: The rank's (cp_rank, pp_rank, tp_rank).
        cp_world_size: The reader's number of context-parallel ranks.
    """
    cp_rank, pp_rank, tp_rank = at
    layers = layers_of_stages(sources)[number]
    sharing = [n for n, held in enumerate(layers_of_stages(readers)) if overlap(held, layers)]
    tp_sizes, stage = [readers[n].tp_size for n in sharing], sharing.index(pp_rank)
    found = []
    for head in heads_of_rank(total_num_kv_heads, readers[pp_rank].tp_size, tp_rank):
        reader = reader_of_head(
            *(head, total_num_kv_heads, tp_sizes),
            stage=stage,
            tp_rank=tp_rank,
            cp_rank=cp_rank,
            cp_world_size=cp_world_size,
        )
        found.append(replica_for(head, total_num_kv_heads, sources[number].tp_size, *reader))
    return found


def overlap(one: range, other: range) -> bool:
    """Return whether two ranges, either of which may be empty, have a common element."""
    return max(one.start, other.start) < min(one.stop, other.stop)


def reader_of_head(
    head: int,
    total_num_kv_heads: int,
    tp_sizes: Sequence[int],
    *,
    stage: int,
    tp_rank: int,
    cp_rank: int = 0,
    cp_world_size: int = 1,
) -> tuple[int, int]:
    """Return the arguments `reader` and `num_readers` of `replica_for`: a rank's index among the
    readers of a head, and their number.

    A head in one stage of the source is read by every rank that holds the head in a reader stage
    that shares layers with the source stage. `tp_sizes` contains the number of ranks in each of
    these reader stages. Readers are numbered first by their position among the head's holders in
    their stage, then by context-parallel rank, then by stage. Therefore, if reader and source have
    the same sizes, rank r reads from rank r.
    """
    holders = ranks_of_head(total_num_kv_heads, tp_sizes[stage], head)
    at = holders.index(tp_rank)
    reader = num_readers = 0
    for other, tp_size in enumerate(tp_sizes):
        count = len(ranks_of_head(total_num_kv_heads, tp_size, head))
        num_readers += count * cp_world_size
        before, rest = divmod(at * count, len(holders))  # `before`: holders at earlier positions
        reader += (before + (rest > 0)) * cp_world_size
        reader += 0 if rest else cp_rank + (other < stage)
    return reader, num_readers


def _checked_heads(total_num_kv_heads: int, tp_size: int) -> tuple[int, int]:
    total_num_kv_heads = integer(total_num_kv_heads, "total_num_kv_heads", 1)
    tp_size = integer(tp_size, "tp_size", 1)
    if total_num_kv_heads % tp_size and tp_size % total_num_kv_heads:
        raise ValueError(
            f"total_num_kv_heads is {total_num_kv_heads}, tp_size is {tp_size}: "
            "expected one to divide the other"
        )
    return total_num_kv_heads, tp_size
