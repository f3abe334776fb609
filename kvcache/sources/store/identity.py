# SPDX-License-Identifier: Apache-2.0
"""Computes the fingerprint that must be equal in two engines that share blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from kvcache.allocator import KVCacheManager
from kvcache.checks import instance, instances, integer, text

if TYPE_CHECKING:
    from kvcache.worker import KVStorage, Pages

FORMAT_VERSION = 2
FINGERPRINT_BYTES = 16


def fingerprint(
    manager: KVCacheManager,
    pages: Pages | None,
    *,
    model: str,
    rank: str = "",
    contents: str | Sequence[KVStorage] | None = None,
    cp_kv_cache_interleave_size: int | None = None,
) -> bytes:
    """Return a 16-byte fingerprint of everything that determines a block's content, apart from the
    block's hash.

    The fingerprint covers the version of the value format; the hash algorithm, seed, length and
    tokens per hash; all fields of every group and of the manager's context parallelism; the meaning
    of a page's bytes (`PageContents`: dtype, and the position of each head of each token); and the
    strings `model` and `rank`. `python -m tests.machinery.fingerprint_table` lists every field.

    Args:
        manager: The manager of the blocks.
        pages: The memory of the blocks. None: the manager has no memory, and the fingerprint does
            not cover page contents.
        model: A string that identifies weights, quantization and scales.
        rank: A string that identifies the layers and heads that this process holds, that is, its
            ranks and sizes in tensor and pipeline parallelism.
        contents: Description of the page contents, required if `pages` does not define them. Either
            one storage per group over the pages, or a string. Pages created by `kvcache.build` or
            `KVStorage` define their contents, except those of `KVStorage.over`. `Pages.allocate`
            and `Pages.over` create pages without defined contents.
        cp_kv_cache_interleave_size: Interleave size of the block tables. Required with context
            parallelism unless `kvcache.build` created the pages.

    Returns:
        The fingerprint.

    Raises:
        ValueError: The page contents are unknown and `contents` is missing, `contents` is not one
            storage per group over `pages`, or the interleave size for context parallelism is
            missing or differs from that of the pages.
        TypeError: An argument has the wrong type.

    Example:
        >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
        >>> one, other = (fingerprint(manager, None, model=name) for name in ("llama", "llama-fp8"))
        >>> len(one), one == other
        (16, False)
    """
    from kvcache.worker.pages.pages import Pages

    instance(manager, KVCacheManager, "manager")
    if pages is not None:
        instance(pages, Pages, "pages")
    described = {
        "version": FORMAT_VERSION,
        "model": text(model, "model"),
        "rank": text(rank, "rank"),
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
    if pages is not None:
        described["contents"] = _contents(pages, contents, len(manager.groups))
        if manager.cache.context_parallel.world_size > 1:
            interleave = _interleave(pages, cp_kv_cache_interleave_size)
            described["context_parallel"] = [_plain(manager.cache.context_parallel), interleave]
    encoded = json.dumps(described, sort_keys=True).encode()
    return hashlib.sha256(encoded).digest()[:FINGERPRINT_BYTES]


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
