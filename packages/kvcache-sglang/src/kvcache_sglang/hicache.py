# SPDX-License-Identifier: Apache-2.0
"""A storage backend for SGLang's HiCache that uses a kvcache store and verifies every value:

    sglang serve MODEL --page-size 64 --enable-hierarchical-cache --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{"backend_name": "kvcache", "interface_v1": 1,
            "module_path": "kvcache_sglang.hicache", "class_name": "HiCacheStore",
            "store": "/var/cache/kv", "capacity": "100GiB"}'
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.runtime_context import get_model

from kvcache.checks import text
from kvcache_exchange.circuit import Circuit
from kvcache_exchange.identity import KVIdentity
from kvcache_exchange.plugins.model import weights_digest
from kvcache_exchange.store.base import BlockStore
from kvcache_exchange.store.registry import open_store
from kvcache_exchange.store.value_format import HEADER_BYTES, BlockKey, faults, key_text, seal
from kvcache_sglang.compatibility import HICACHE, check_version
from kvcache_sglang.weights import observe_weight_updates

_log = logging.getLogger("kvcache.hicache")
_OPTIONS = ("store", "capacity")
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
_BATCH_BYTES = 64 * 2**20  # size of the staging buffer between a pool and its store


class HiCacheStore(HiCacheStorage):
    """HiCache pages in a disk store, in Mooncake, or in another registered store.

    Each value carries a digest. A torn or corrupt value is treated as a miss, counted and removed.
    Values of a different model, dtype, layout or rank have different keys and, on disk, a different
    folder. A failed store operation is treated as a miss, and the store is retried later.

    Args:
        config: SGLang's storage configuration. `extra_config` contains `store`, a folder or URL for
            `open_store`, and `capacity`, the size per pool and rank (default: see `open_store`).
        kwargs: Not used.

    Raises:
        TypeError, ValueError: The version of SGLang is not supported, or an option is invalid.
    """

    def __init__(self, config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        check_version(HICACHE)
        self._config, extra = config, dict(config.extra_config or {})
        if not extra.get("interface_v1"):
            raise ValueError("interface_v1 is missing: expected 1")
        if config.is_mla_model and config.tp_size > 1:
            raise ValueError(
                f"tp_size is {config.tp_size} with MLA, whose KV only one rank writes: not supported"
            )
        if unknown := sorted(set(extra) - {*_OPTIONS, *_OF_SGLANG}):
            raise ValueError(
                f"the storage has options {', '.join(unknown)}: expected {', '.join(_OPTIONS)}"
            )
        if "store" not in extra:
            raise ValueError("store is missing: expected a folder or the URL of a store")
        self._place = text(extra["store"], "store")
        self._capacity = extra.get("capacity")
        self._pools: dict[str, _Pool] = {}
        self.stats: Counter[str] = Counter()
        self._is_off = threading.Event()
        observe_weight_updates(self._switch_off)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the store of the KV pool. Raises the same exceptions as `open_store`."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName) -> None:
        """Open the store of another pool, such as that of a sliding window or of states."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(host_pool_name, host_pool)

    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many of the first keys have values."""
        return _leading(self._pools[PoolName.KV].exists(keys))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Read values into pages. Return whether each page was read and verified."""
        return self._pools[PoolName.KV].get(keys, host_indices)

    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages. Return whether each page is now stored."""
        return self._pools[PoolName.KV].put(keys, host_indices)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the prefix lengths for which the stores of all pools have the required pages."""
        num_pages = self.batch_exists(keys)
        hits = {PoolName.KV: num_pages} if num_pages else {}
        lengths = np.ones(num_pages + 1, bool)  # for each prefix length: whether it can be loaded
        lengths[0] = False
        for transfer in pool_transfers or ():
            has = np.array(self._pools[transfer.name].exists(keys[:num_pages]), bool)
            own = np.zeros(num_pages + 1, bool)
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                own[1 : _leading(has) + 1] = True
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                window = max(1, len(transfer.keys or ()))
                for length in range(1, num_pages + 1):
                    own[length] = has[max(0, length - window) : length].all()
            else:
                raise ValueError(f"hit_policy is {transfer.hit_policy}: not supported")
            if own.any():
                hits[transfer.name] = int(np.flatnonzero(own)[-1])
            lengths &= own
        found = np.flatnonzero(lengths).tolist()
        return PoolTransferResult(found[-1] if found else 0, hits, found)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read values into the pages of several pools. Return the results per pool."""
        return self._each(transfers, _Pool.get)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of several pools. Return the results per pool."""
        return self._each(transfers, _Pool.put)

    def clear(self) -> None:
        """Remove all values. Raises RuntimeError for stores that cannot list their keys."""
        if not all(pool.knows_keys for pool in self._pools.values()):
            raise RuntimeError(
                f"the store {self._place} cannot list its keys: remove the values in the store itself"
            )
        for pool in self._pools.values():
            pool.clear()

    def close(self) -> None:
        """Close the stores, and log how many values were corrupt."""
        for pool in self._pools.values():
            pool.close()
        if self.stats["corrupt"]:
            _log.warning("HiCache storage: %s values were corrupt", self.stats["corrupt"])

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        raise NotImplementedError("expected interface_v1 in the options of the storage")

    batch_get = set = batch_set = get

    @functools.cached_property
    def _identity(self) -> KVIdentity:
        """The identity that the pages of all pools have in common."""
        model = get_model()
        values = {each: getattr(model, each, None) for each in _OF_MODEL}
        values["weights"] = weights_digest(model.model_path, model.revision)
        ranks = {each: getattr(self._config, each) for each in _RANKS}
        # Values of other types are compared by their text.
        plain = json.loads(json.dumps([values, ranks], default=str))
        return KVIdentity(plain[0], part={"hicache": plain[1]})

    def _add(self, name: PoolName, pool: Any) -> None:
        if name in self._pools:
            return
        first = pool.get_data_page(0)
        page = [str(name), pool.layout, str(first.dtype), first.numel()]
        page.append(getattr(pool, "page_size", 1))
        own = self._identity
        fingerprint = replace(own, part={**own.part, "page": page}).digest
        place = self._place if "://" in self._place else f"{self._place}/{fingerprint.hex()}"
        store = open_store(place, self._capacity)
        self._pools[name] = _Pool(pool, store, fingerprint, self.stats, self._is_off)

    def _switch_off(self) -> None:
        """Disable the storage, because its keys identify the weights in the files."""
        if not self._is_off.is_set():
            _log.warning("HiCache storage is off: the weights were updated at runtime")
        self._is_off.set()

    def _each(self, transfers: Sequence[PoolTransfer], function: Callable) -> dict[str, list[bool]]:
        return {
            each.name: function(self._pools[each.name], each.keys or [], each.host_indices)
            for each in transfers
        }


_OF_MODEL = ("model_path", "revision", "load_format", "json_model_override_args", "quantization")
_OF_MODEL += (
    "quantization_param_path",
    "dtype",
    "kv_cache_dtype",
    "context_length",
    "rope_scaling",
)
_RANKS = ("tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size")
_RANKS += ("dp_rank", "dcp_rank", "dcp_size", "is_mla_model")


class _Pool:
    """A host pool and its store.

    HiCache calls the methods from several threads; calls are serialized.
    """

    def __init__(
        self,
        pool: Any,
        store: BlockStore,
        fingerprint: bytes,
        stats: Counter[str],
        is_off: threading.Event,
    ) -> None:
        self._pool, self._fingerprint, self._stats = pool, fingerprint, stats
        self._store, self._is_open, self._is_off = store, False, is_off
        self._page_size = getattr(pool, "page_size", 1) or 1
        page = pool.get_data_page(0)
        self._dtype, self._page_bytes = page.dtype, page.numel() * page.element_size()
        value_bytes = HEADER_BYTES + self._page_bytes
        self._batch = max(1, min(128, _BATCH_BYTES // value_bytes))
        self._values = np.zeros((self._batch, value_bytes), np.uint8)
        self._lock, self._circuit = threading.Lock(), Circuit()
        self._open()

    @property
    def knows_keys(self) -> bool:
        """Whether the store can list its keys."""
        return self._store.knows_keys

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Return, for each key, whether it has a value."""
        names = self._names([_key(key) for key in keys])
        return self._call(len(keys), lambda: self._store.exists(names))

    def get(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Read values into the pages that contain these slots."""
        return self._in_batches(keys, host_indices, self._get)

    def put(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[bool]:
        """Store the pages that contain these slots."""
        return self._in_batches(keys, host_indices, self._put)

    def clear(self) -> None:
        """Remove all values that the store can list."""
        self._call(0, lambda: self._store.remove(self._store.keys()) or [])

    def close(self) -> None:
        """Close the store."""
        with self._lock:
            self._store.close()
            self._is_open = False

    def _open(self) -> None:
        self._store.open(self._values.reshape(-1), self._values.shape[1])
        self._is_open = True

    def _call(self, count: int, function: Callable[[], list[bool]]) -> list[bool]:
        """Call the store. If the call fails, all keys are treated as misses."""
        with self._lock:
            if self._is_off.is_set() or not self._circuit.allows():
                return [False] * count
            try:
                if not self._is_open:
                    self._open()
                found = function()
            except Exception as error:
                self._stats["failures"] += 1
                if not self._circuit.is_open:
                    _log.warning("HiCache storage has failed: %r; its pages count as misses", error)
                self._circuit.failed()
                self._is_open = False
                return [False] * count
            self._circuit.worked()
            return found

    def _in_batches(
        self, keys: Sequence[str], host_indices: torch.Tensor | None, function: Callable
    ) -> list[bool]:
        if host_indices is None or len(host_indices) != len(keys) * self._page_size:
            return [False] * len(keys)
        slots, found = host_indices[:: self._page_size].tolist(), []
        for first in range(0, len(keys), self._batch):
            some = [_key(key) for key in keys[first : first + self._batch]]
            at = slots[first : first + self._batch]
            found += self._call(len(some), lambda some=some, at=at: function(some, at))
        return found

    def _get(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> list[bool]:
        names, numbers = self._names(keys), range(len(keys))
        sizes = self._store.get(names, [self._values[n] for n in numbers])
        found = faults(self._values, numbers, sizes, self._fingerprint, keys)
        for n in numbers:
            if found[n] is None:
                page = torch.from_numpy(self._values[n, HEADER_BYTES:]).view(self._dtype)
                self._pool.set_from_flat_data_page(slots[n], page)
        self._stats.update("read" if each is None else each for each in found)
        bad = [name for name, fault in zip(names, found) if fault in ("corrupt", "misfit")]
        if bad:
            _log.warning("HiCache storage: %s of %s values were corrupt", len(bad), len(names))
            self._store.remove(bad)
        return [each is None for each in found]

    def _put(self, keys: Sequence[BlockKey], slots: Sequence[int]) -> list[bool]:
        numbers = range(len(keys))
        for n, slot in enumerate(slots):
            page = self._pool.get_data_page(slot).contiguous().view(torch.uint8)
            self._values[n, HEADER_BYTES:] = page.numpy()
        seal(self._values, numbers, self._fingerprint, keys)
        done = self._store.put(self._names(keys), [self._values[n] for n in numbers])
        self._stats.update("written" if each else "full" for each in done)
        return done

    def _names(self, keys: Sequence[BlockKey]) -> list[str]:
        return [key_text(self._fingerprint, key) for key in keys]


def _key(key: str) -> BlockKey:
    """Return the key of a page. SGLang's hashes are SHA-256 in hexadecimal."""
    try:
        found = bytes.fromhex(key)
    except ValueError:
        found = b""
    return BlockKey(0, found if len(found) == 32 else hashlib.sha256(key.encode()).digest())


def _leading(has: Sequence[bool]) -> int:
    """Return the number of leading True values."""
    return next((i for i, each in enumerate(has) if not each), len(has))
