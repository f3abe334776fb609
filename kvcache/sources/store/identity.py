# SPDX-License-Identifier: Apache-2.0
"""Computes the fingerprint that engines must have in common to share blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcache.allocator import KVCacheManager
from kvcache.checks import instance, instances, integer, listed, shown, text

if TYPE_CHECKING:
    from kvcache.worker import KVStorage, Pages

FORMAT_VERSION = 2
FINGERPRINT_BYTES = 16


@dataclass(frozen=True)
class Share:
    """The part of each block that a rank holds: a subset of the layers and KV heads and, with
    context parallelism, of the tokens.

    Ranks with equal shares hold identical bytes. This happens, for example, if there are more
    tensor-parallel ranks than KV heads. Such ranks share the blocks of a store, even if they belong
    to engines with different numbers of ranks.

    Args:
        layers: First layer and end layer (exclusive).
        num_layers: Number of layers of the model.
        heads: First KV head and end head (exclusive).
        num_heads: Number of KV heads of the model.
        cp_rank: Rank in context parallelism.
        cp_world_size: Number of ranks in context parallelism.

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
        return cls(layers, num_layers, heads, count, cp_rank, cp_world_size)

    def __str__(self) -> str:
        layers, heads = (f"{first} to {end - 1}" for first, end in (self.layers, self.heads))
        text = f"layers {layers} of {self.num_layers}, heads {heads} of {self.num_heads}"
        if self.cp_world_size > 1:
            text += f", tokens of rank {self.cp_rank} of {self.cp_world_size}"
        return text


def check_shares(ranks: Sequence[str | Share]) -> None:
    """Check that the ranks together hold each block completely. Raises ValueError if they do
    not.
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
    for each in shares:
        is_held[slice(*each.layers), slice(*each.heads), each.cp_rank] = True
    if not is_held.all():
        layer, head, tokens = np.argwhere(~is_held)[0].tolist()
        raise ValueError(
            f"ranks lack layer {layer}, head {head} (context-parallel rank {tokens}): expected each part "
            "of a block on a rank"
        )


def cache_identity(manager: KVCacheManager) -> str:
    """Return the part of a manager's configuration that a fingerprint covers, for a call of
    `fingerprint` in another process.

    Args:
        manager: The manager.

    Returns:
        The hash options, groups and context parallelism configuration, as JSON.

    Raises:
        TypeError: `manager` is not a manager.

    Example:
        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> identity = cache_identity(manager)
        >>> fingerprint(identity, None, model="llama") == fingerprint(manager, None, model="llama")
        True
    """
    instance(manager, KVCacheManager, "manager")
    described = {
        "version": FORMAT_VERSION,
        "hash": [
            manager.cache.hash_algorithm,
            manager.options.hash_seed,
            manager.cache.hash_bytes,
            manager.cache.hash_block_size,
        ],
        "groups": [[_plain(spec), size] for spec, size in zip(manager.groups, manager.block_sizes)],
    }
    if manager.options.num_hash_lookahead_tokens:
        described["hash_lookahead"] = manager.options.num_hash_lookahead_tokens
    if manager.cache.context_parallel.world_size > 1:
        described["context_parallel"] = _plain(manager.cache.context_parallel)
    return json.dumps(described, sort_keys=True)


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
    block's hash.

    The fingerprint covers the version of the value format; the hash algorithm, seed, length and
    tokens per hash; all fields of every group and of the manager's context parallelism; the layout
    of a page (`PageContents`: the dtype, and the position of each token's heads); and the strings
    `model` and `rank`. `python -m tests.machinery.fingerprint_table` lists every field.

    Args:
        manager: The manager of the blocks, or its `cache_identity`.
        pages: The pages that hold the blocks. None: there are no pages, and the fingerprint does
            not cover page contents.
        model: A string that identifies weights, quantization and scales.
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
        ValueError: The page contents are unknown and `contents` is missing, `contents` does not
            consist of one storage per group over `pages`, or the interleave size for context
            parallelism is missing or differs from the one in the pages.
        TypeError: An argument has the wrong type.

    Example:
        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> one, other = (fingerprint(manager, None, model=name) for name in ("llama", "llama-fp8"))
        >>> len(one), one == other
        (16, False)
    """
    from kvcache.worker.pages.pages import Pages

    if pages is not None:
        instance(pages, Pages, "pages")
    rank = str(rank) if isinstance(rank, Share) else text(rank, "rank")
    described = _identity(manager) | {"model": text(model, "model"), "rank": rank}
    context_parallel = described.pop("context_parallel", None)
    if pages is not None:
        described["contents"] = _contents(pages, contents, len(described["groups"]))
        if context_parallel is not None:
            interleave = _interleave(pages, cp_kv_cache_interleave_size)
            described["context_parallel"] = [context_parallel, interleave]
    encoded = json.dumps(described, sort_keys=True).encode()
    return hashlib.sha256(encoded).digest()[:FINGERPRINT_BYTES]


def _identity(manager: KVCacheManager | str) -> dict[str, Any]:
    found = manager if isinstance(manager, str) else cache_identity(manager)
    try:
        described = json.loads(found)
        version = described["version"]
        len(described["hash"]), len(described["groups"])
    except (ValueError, TypeError, LookupError, RecursionError):
        raise ValueError(
            f"manager is {shown(found)}: expected a manager, or the result of cache_identity"
        ) from None
    if version != FORMAT_VERSION:
        raise ValueError(f"manager has version {shown(version)}: expected {FORMAT_VERSION}")
    return described


def _plain(spec: object) -> dict[str, object]:
    """Return all fields of a dataclass as JSON values.

    Fields that are added to the class later are included automatically.
    """
    values = {each.name: getattr(spec, each.name) for each in fields(spec)}
    return {
        name: sorted(value.items()) if name == "options" else value
        for name, value in values.items()
    }


def _contents(pages: Pages, given: str | Sequence[KVStorage] | None, num_groups: int) -> list:
    known = None if pages.contents is None else pages.contents.storages
    if given is None:
        if known is None:
            raise ValueError(
                "contents is None, but the contents of the pages are unknown: expected pages created by "
                "kvcache.build or KVStorage, or contents as the storages over these pages or as a string "
                "that describes dtype, shape and memory order"
            )
        return [pages.page_bytes, known]
    if isinstance(given, str):
        return [pages.sizes.tolist(), pages.layers.tolist(), known, text(given, "contents")]
    from kvcache.worker import KVStorage
    from kvcache.worker.pages.parts import contents_of

    expected = "a text, or the storages over the pages"
    storages = instances(given, KVStorage, "contents", expected)
    if len(storages) != num_groups:
        raise ValueError(
            f"contents has {len(storages)} storages: expected {num_groups}, one for each group"
        )
    return [pages.page_bytes, contents_of(pages, [each.parts for each in storages]).storages]


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
