"""What must be equal for a block of one engine to be a block of another."""

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
    """16 bytes of all that values depend on besides their hash.

    These are the version of the values' format; how blocks are hashed (algorithm, seed, bytes, tokens);
    all fields of every group and of the manager's context parallelism; what the bytes of a page mean
    (`PageContents`: dtype, and where each head of each token lies); and what only the caller knows.
    `python -m tests.fingerprint_table` lists every field.

    Args:
        manager: Whose blocks they are.
        pages: Their memory. None: no bytes are told apart, for a manager without memory.
        model: A text for weights, quantisation and scales.
        rank: A text for the part of layers and heads that this process has: its ranks in tensor and
            pipeline parallelism, and their sizes.
        contents: What the bytes of a page mean, where `pages` do not know it: the storages over them, one
            for each group, or a text. Pages of `kvcache.build` and of `KVStorage` know it, unless they
            are those of `KVStorage.over`; `Pages.allocate` and `Pages.over` have bytes alone.
        cp_kv_cache_interleave_size: As the block tables have it. Needed with context parallelism over
            pages that were not made by `kvcache.build`.

    Raises:
        ValueError: For pages that do not know what their bytes mean, without `contents`; for `contents`
            that are not one storage per group, or not over `pages`; and for context parallelism without
            an interleave, or with another than that of the pages.
        TypeError: For an argument of another type.

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
            manager.hash_algorithm,
            manager.options.hash_seed,
            manager.hash_bytes,
            manager.hash_block_size,
        ],
        "groups": [[_plain(spec), size] for spec, size in zip(manager.groups, manager.block_sizes)],
    }
    if pages is not None:
        described["contents"] = _contents(pages, contents, len(manager.groups))
        if manager.context_parallel.world_size > 1:
            interleave = _interleave(pages, cp_kv_cache_interleave_size)
            described["context_parallel"] = [_plain(manager.context_parallel), interleave]
    encoded = json.dumps(described, sort_keys=True).encode()
    return hashlib.sha256(encoded).digest()[:FINGERPRINT_BYTES]


def _plain(spec: object) -> dict[str, object]:
    """All fields of a dataclass, so that a new one is never forgotten, as values for JSON."""
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
                "contents is None, and pages are bytes without a meaning: expected pages of "
                "kvcache.build or of a KVStorage, or contents, the storages over these pages, or a "
                "text that names dtype, shape and order in memory"
            )
        return [pages.page_bytes, known]
    if isinstance(given, str):
        return [pages.sizes.tolist(), pages.layers.tolist(), known, text(given, "contents")]
    from kvcache.worker import KVStorage
    from kvcache.worker.pages.contents import PageContents

    expected = "a text, or the storages over the pages"
    storages = instances(given, KVStorage, "contents", expected)
    if len(storages) != num_groups:
        raise ValueError(
            f"contents has {len(storages)} storages: expected {num_groups}, one for each group"
        )
    return [pages.page_bytes, PageContents.of(pages, storages).storages]


def _interleave(pages: Pages, given: int | None) -> int:
    known = None if pages.contents is None else pages.contents.cp_interleave
    if given is None:
        if known is None:
            raise ValueError(
                "cp_kv_cache_interleave_size is None with context parallelism: expected that of the "
                "block tables, as pages do not know it"
            )
        return known
    given = integer(given, "cp_kv_cache_interleave_size", 1)
    if known not in (None, given):
        raise ValueError(
            f"cp_kv_cache_interleave_size is {given}: expected {known}, that of the pages"
        )
    return given
