# SPDX-License-Identifier: Apache-2.0
"""The identity of the blocks that a rank stores: its part of each block, and the fingerprint that
engines must have in common to share blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.allocator import KVCacheManager
from kvcache.checks import instance, instances, integer, listed, shown, text
from kvcache.specs import GroupSpec
from kvcache_exchange.identity import FORMAT_VERSION, KVIdentity

if TYPE_CHECKING:
    from kvcache.worker import KVStorage, Pages


@dataclass(frozen=True)
class Share:
    """The part of each block that a rank holds: a subset of the layers and KV heads and, with
    context parallelism, of the tokens.

    Ranks with equal shares hold identical bytes. This happens, for example, if there are more
    tensor-parallel ranks than KV heads. Such ranks share the blocks of a store, even if they belong
    to engines with different numbers of ranks. With recurrent states or several groups, replicas of
    a KV head may hold different parts of the rest, so ranks also need equal `tp` to share blocks.

    Args:
        layers: First layer and end layer (exclusive).
        num_layers: Number of layers of the model.
        heads: First KV head and end head (exclusive).
        num_heads: Number of KV heads of the model.
        cp_rank: Rank in context parallelism.
        cp_world_size: Number of ranks in context parallelism.
        tp: Rank and number of ranks in tensor parallelism. Required with states or several groups.

    Raises:
        TypeError, ValueError: An argument is invalid.

    Example:
        >>> str(Share((0, 16), 32, (4, 8), 8))
        'layers 0 to 15 of 32, heads 4 to 7 of 8'
    """

    layers: tuple[int, int]
    num_layers: int
    heads: tuple[int, int]
    num_heads: int
    cp_rank: int = 0
    cp_world_size: int = 1
    tp: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "heads"):
            given = getattr(self, name)
            most = integer(getattr(self, f"num_{name}"), f"num_{name}", 1)
            ends = listed(given, name)
            if len(ends) != 2:
                raise ValueError(f"{name} is {shown(given)}: expected the first one and the end")
            first = integer(ends[0], f"{name}[0]", 0, most - 1)
            end = integer(ends[1], f"{name}[1]", first + 1, most)
            object.__setattr__(self, name, (first, end))
        integer(self.cp_world_size, "cp_world_size", 1)
        integer(self.cp_rank, "cp_rank", 0, self.cp_world_size - 1)
        if self.tp is not None:
            pair = listed(self.tp, "tp")
            if len(pair) != 2:
                raise ValueError(
                    f"tp is {shown(self.tp)}: expected the rank and the number of ranks"
                )
            size = integer(pair[1], "tp[1]", 1)
            object.__setattr__(self, "tp", (integer(pair[0], "tp[0]", 0, size - 1), size))

    @classmethod
    def of_rank(
        cls,
        *,
        num_layers: int,
        num_heads: int,
        tp_rank: int = 0,
        tp_size: int = 1,
        layers: tuple[int, int] | None = None,
        cp_rank: int = 0,
        cp_world_size: int = 1,
    ) -> Share:
        """Return the share of a tensor-parallel rank, with KV heads distributed as in vLLM.

        Args:
            num_layers: Number of layers of the model.
            num_heads: Number of KV heads of the model. Must be a multiple or a divisor of `tp_size`.
            tp_rank: Rank in tensor parallelism.
            tp_size: Number of ranks in tensor parallelism.
            layers: First layer and end layer (exclusive) of the pipeline stage. None: all layers.
            cp_rank: Rank in context parallelism.
            cp_world_size: Number of ranks in context parallelism.

        Returns:
            The share.

        Raises:
            TypeError, ValueError: An argument is invalid.

        Example:
            >>> [Share.of_rank(num_layers=2, num_heads=2, tp_rank=i, tp_size=4).heads for i in range(4)]
            [(0, 1), (0, 1), (1, 2), (1, 2)]
        """
        size, count = integer(tp_size, "tp_size", 1), integer(num_heads, "num_heads", 1)
        number = integer(tp_rank, "tp_rank", 0, size - 1)
        if size % count and count % size:
            raise ValueError(
                f"tp_size is {size}: expected a divisor or a multiple of num_heads, {count}"
            )
        first = number * count // size
        heads = (first, first + max(count // size, 1))
        if layers is None:
            layers = (0, integer(num_layers, "num_layers", 1))
        return cls(layers, num_layers, heads, count, cp_rank, cp_world_size, (number, size))

    def __str__(self) -> str:
        layers, heads = (f"{first} to {end - 1}" for first, end in (self.layers, self.heads))
        text = f"layers {layers} of {self.num_layers}, heads {heads} of {self.num_heads}"
        if self.cp_world_size > 1:
            text += f", tokens of rank {self.cp_rank} of {self.cp_world_size}"
        return text


def check_shares(ranks: Sequence[str | Share], has_states: bool) -> None:
    """Check that the ranks together hold each block completely, including every part of recurrent
    states if there are any. Raises ValueError if they do not.
    """
    shares = [each for each in ranks if isinstance(each, Share)]
    if len(shares) < len(ranks):
        for i, each in enumerate(ranks):
            if each in ranks[:i]:
                raise ValueError(
                    f"ranks[{i}] has rank {shown(each)}, as ranks[{ranks.index(each)}]: expected another "
                    "one, or a Share if both hold the same layers and heads"
                )
        return
    first = shares[0]
    sizes = [(each.num_layers, each.num_heads, each.cp_world_size) for each in shares]
    for i, each in enumerate(sizes):
        if each != sizes[0]:
            raise ValueError(
                f"ranks[{i}] has {shares[i]}: expected a share of the same model as ranks[0], {first}"
            )
    is_held = np.zeros(sizes[0], bool)
    num_parts = math.lcm(*(each.tp[1] for each in shares if each.tp and has_states))
    has_part = np.zeros((first.num_layers, num_parts, first.cp_world_size), bool)
    for each in shares:
        is_held[slice(*each.layers), slice(*each.heads), each.cp_rank] = True
        tp_rank, tp_size = each.tp if each.tp and has_states else (0, 1)
        parts = slice(tp_rank * num_parts // tp_size, (tp_rank + 1) * num_parts // tp_size)
        has_part[slice(*each.layers), parts, each.cp_rank] = True
    for what, held in (("head", is_held), ("tensor-parallel part", has_part)):
        if not held.all():
            layer, number, tokens = np.argwhere(~held)[0].tolist()
            raise ValueError(
                f"ranks lack layer {layer}, {what} {number} (context-parallel rank {tokens}): expected "
                "each part of a block on a rank"
            )


def cache_identity(manager: KVCacheManager) -> str:
    """Return the part of a manager's configuration that a fingerprint covers, for a call of
    `fingerprint` in another process.

    Args:
        manager: The manager.

    Returns:
        The version of the weights, the hash options, groups and context parallelism configuration,
        as JSON.

    Raises:
        TypeError: `manager` is not a manager.

    Example:
        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> identity = cache_identity(manager)
        >>> fingerprint(identity, None, model="llama") == fingerprint(manager, None, model="llama")
        True
    """
    instance(manager, KVCacheManager, "manager")
    identity = KVIdentity.of_manager(manager, {})
    return json.dumps({"format": FORMAT_VERSION, **identity.to_dict()}, sort_keys=True)


def fingerprint(
    manager: KVCacheManager | str,
    pages: Pages | None,
    *,
    model: str,
    rank: str | Share = "",
    contents: str | Sequence[KVStorage] | None = None,
    cp_kv_cache_interleave_size: int | None = None,
) -> bytes:
    """Return a 16-byte fingerprint of everything that determines a block's content, apart from the
    block's hash: the `digest` of its `KVIdentity`.

    The fingerprint covers the version of the value format; the version of the weights; the hash
    algorithm, seed, length and tokens per hash; all fields of every group and of the manager's
    context parallelism; the layout of a page (`PageContents`: the dtype, and the position of each
    token's heads); the fp8 scales of its storages; and `model` and `rank`.
    `python -m tests.machinery.identity_table` lists every field.

    Args:
        manager: The manager of the blocks, or its `cache_identity`.
        pages: The pages that hold the blocks. None: there are no pages, and the fingerprint does
            not cover page contents.
        model: A string that identifies the weights at startup and their quantization.
        rank: The layers and heads that this process holds: a `Share`, or a string that identifies them,
            such as ranks and sizes in tensor and pipeline parallelism.
        contents: Description of the page contents. Required if `pages` does not define its
            contents. Either one storage per group over the pages, or a string. Pages created by
            `kvcache.build` or `KVStorage` define their contents, except pages created by
            `KVStorage.over`. `Pages.allocate` and `Pages.over` create pages without defined
            contents.
        cp_kv_cache_interleave_size: Interleave size of the block tables. Required with context
            parallelism unless `kvcache.build` created the pages.

    Returns:
        The fingerprint.

    Raises:
        ValueError: The pages were created for other groups, their contents are unknown and `contents`
            is missing, `contents` does not consist of one storage per group over `pages`, `rank`
            cannot be right for the groups, or the interleave size for context parallelism is missing
            or differs from the one in the pages.
        TypeError: An argument has the wrong type.

    Example:
        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> one, other = (fingerprint(manager, None, model=name) for name in ("llama", "llama-fp8"))
        >>> len(one), one == other
        (16, False)
    """
    described = rank, contents, cp_kv_cache_interleave_size
    return identity_of(manager, pages, model, *described).digest


def identity_of(
    manager: KVCacheManager | str,
    pages: Pages | None,
    model: str,
    rank: str | Share,
    contents: str | Sequence[KVStorage] | None,
    cp_interleave: int | None,
) -> KVIdentity:
    """Return the identity of the blocks in a rank's pages. See `fingerprint`."""
    from kvcache.worker import Pages

    if pages is not None:
        instance(pages, Pages, "pages")
    identity = _identity(manager)
    part = dict(identity.part)
    if pages is not None:
        _check_groups(pages, identity.groups)
        part["contents"] = _contents(pages, contents, len(identity.groups))
        if "context_parallel" in part:
            part["interleave"] = _interleave(pages, cp_interleave)
    part["rank"] = str(rank) if isinstance(rank, Share) else text(rank, "rank")
    has_rest = len(identity.groups) > 1 or any(group["is_state"] for group in identity.groups)
    if isinstance(rank, Share) and has_rest:
        if rank.tp is None:
            raise ValueError(
                f"rank is {rank} with tp=None, but the manager has states or several groups: expected "
                "the rank and the number of ranks over which they are distributed"
            )
        part["tp"] = rank.tp
    return replace(identity, model={"name": text(model, "model")}, part=part)


def _identity(manager: KVCacheManager | str) -> KVIdentity:
    if not isinstance(manager, str):
        instance(manager, KVCacheManager, "manager")
        return KVIdentity.of_manager(manager, {})
    try:
        values = json.loads(manager)
        version = values["format"]
        if version == FORMAT_VERSION:
            return KVIdentity.from_dict(values)
    except (ValueError, TypeError, LookupError, RecursionError):
        raise ValueError(
            f"manager is {shown(manager)}: expected a manager, or the result of cache_identity"
        ) from None
    raise ValueError(f"manager has format {shown(version)}: expected {FORMAT_VERSION}")


def _check_groups(pages: Pages, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if the pages were created for groups other than the manager's."""
    known = () if pages.contents is None else pages.contents.groups
    names = [each.name for each in fields(GroupSpec)]
    specs = [GroupSpec(**{name: group[name] for name in names}) for group in groups]
    if known and known != (expected := tuple(spec.summary for spec in specs)):
        raise ValueError(
            f"pages were created for groups {shown(list(known))}: expected {shown(list(expected))}, the "
            "groups of the manager; plan all pipeline stages together, with plan_cache(stages=)"
        )


def _contents(pages: Pages, given: str | Sequence[KVStorage] | None, num_groups: int) -> list[Any]:
    known = None if pages.contents is None else pages.contents.storages
    scales = sorted((number, each) for number, each in pages.scales.items() if each is not None)
    if given is None:
        if known is None:
            raise ValueError(
                "contents is None, but the contents of the pages are unknown: expected pages created by "
                "kvcache.build or KVStorage, or contents as the storages over these pages or as a string "
                "that describes dtype, shape and memory order"
            )
        return [pages.page_bytes, known, scales]
    if isinstance(given, str):
        described = text(given, "contents")
        return [pages.sizes.tolist(), pages.layers.tolist(), known, described, scales]
    from kvcache.worker import KVStorage
    from kvcache.worker.pages.parts import contents_of

    expected = "a text, or the storages over the pages"
    storages = instances(given, KVStorage, "contents", expected)
    if len(storages) != num_groups:
        raise ValueError(
            f"contents has {len(storages)} storages: expected {num_groups}, one for each group"
        )
    described = contents_of(pages, [each.parts for each in storages]).storages
    return [pages.page_bytes, described, scales]


def _interleave(pages: Pages, given: int | None) -> int:
    known = None if pages.contents is None else pages.contents.cp_interleave
    if given is None:
        if known is None:
            raise ValueError(
                "cp_kv_cache_interleave_size is None with context parallelism: expected the interleave "
                "of the block tables, because the pages do not contain it"
            )
        return known
    given = integer(given, "cp_kv_cache_interleave_size", 1)
    if known not in (None, given):
        raise ValueError(
            f"cp_kv_cache_interleave_size is {given}: expected {known}, as in the pages"
        )
    return given
