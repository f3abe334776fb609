# SPDX-License-Identifier: Apache-2.0
"""The state of an object, and the result of a call, as plain values."""

from __future__ import annotations

import collections
import functools
import hashlib
import inspect
import io
import threading
import types
import weakref
from collections.abc import Callable, Mapping, Set
from enum import Enum
from pathlib import Path

import numpy as np
import torch

from kvcache.allocator import check_invariants

_DEEPEST = 9
_MOST = 400  # maximum number of entries of a list or mapping that are inspected
_MOST_BYTES = 4 << 20

# The values to inspect for classes with native state or with state that other threads change.
PROBES: dict[str, Callable] = {
    "KVCacheManager": lambda each: _manager(each),
    "BlockPool": lambda each: _pool(each),
    "PoolView": lambda each: (each.num_free, each.num_cached, each.num_pinned),
    "BlockSpaceManager": lambda each: _sequences(each),
    "EventPublisher": lambda each: (each.endpoint, each._is_closing, each._failure),
    "EventSubscriber": lambda each: (sorted(each.view.places), each.next_seq),
    "Request": lambda each: (each.request_id, np.asarray(each.token_ids).tobytes()),
    "StagedTransport": lambda each: sorted(map(str, each.peers())),
    "TcpTransport": lambda each: sorted(map(str, each.peers())),
    "Transfer": lambda each: (each.peer, each.num_bytes),
    "Fetch": lambda each: each.num_bytes,
    "AttentionMetadataBuilder": lambda each: {
        name: value
        for name, value in vars(each).items()
        if name != "_views"  # this attribute is created lazily
    },
    # Memory has another address in each scene.
    "Pages": lambda each: {n: x for n, x in vars(each).items() if n not in ("base", "_within")},
    "Connector": lambda each: each._manager,
    "CacheRank": lambda each: None,  # changed by a thread
    "StoreTier": lambda each: (each.num_waiting_blocks, each._manager),
    "StoreRank": lambda each: None,  # changed by a thread
    "DiskStore": lambda each: each.folder,
}
_BLIND = (
    *(threading.Thread, io.IOBase, weakref.ref, types.ModuleType, types.FunctionType, type),
    *(types.MethodType, types.BuiltinFunctionType, types.GeneratorType, torch.nn.Module),
)


def _manager(manager: object) -> object:
    check_invariants(manager)
    tiers = [each for each in (manager.pool, manager.host_pool) if each is not None]
    counts = [(each.num_free, each.num_cached, each.num_pinned) for each in tiers]
    return [counts, manager.pool.num_loading, _plain(manager.cache.stats, 0, {})]


def _pool(pool: object) -> object:
    pool.check_invariants()
    counts = [pool.num_free, pool.num_cached, pool.num_evicted, pool.num_pinned]
    return [counts, pool.ref_counts(range(1, pool.num_total + 1)).tolist()]


def _sequences(manager: object) -> object:
    manager.check_invariants()
    return [manager.get_num_free_gpu_blocks(), manager.get_num_free_cpu_blocks()]


def state_of(value: object) -> object:
    """Return the state as plain, comparable values."""
    return _plain(value, 0, {})


def answer(call: Callable[[], object]) -> object:
    """Make the call. Return its result, or the exception that it raised, as plain values."""
    try:
        return state_of(call())
    except Exception as error:
        return type(error).__name__, str(error)


def _plain(value: object, depth: int, seen: dict[int, tuple]) -> object:
    try:
        return _looked_at(value, depth, seen)
    except Exception as error:  # may be raised by a hostile object that a call accepted
        return (type(value).__name__, type(error).__name__)


def _looked_at(value: object, depth: int, seen: dict[int, tuple]) -> object:
    kind = type(value)
    if value is None or kind in (bool, int, str, bytes):
        return (kind.__name__, value)
    if kind in (float, complex) or isinstance(value, np.generic | Enum):
        return (kind.__name__, repr(value))  # equal even for NaN
    if id(value) in seen:
        return ("again", seen[id(value)][0])
    seen[id(value)] = (len(seen), value)  # keep the object alive, so that its id is not reused
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, _BLIND) or depth > _DEEPEST:
        return kind.__name__
    for base in kind.__mro__:
        if base.__name__ in PROBES and base.__module__.startswith("kvcache"):
            return (kind.__name__, _plain(PROBES[base.__name__](value), depth + 1, seen))
    if isinstance(value, Mapping):
        entries = list(value.items())[:_MOST]
        return (
            kind.__name__,
            len(value),
            [(_plain(k, depth + 1, seen), _plain(v, depth + 1, seen)) for k, v in entries],
        )
    if isinstance(value, list | tuple | collections.deque):
        return (kind.__name__, len(value), [_plain(v, depth + 1, seen) for v in [*value][:_MOST]])
    if isinstance(value, Set):
        return (kind.__name__, sorted(map(repr, value)))
    if isinstance(value, Path | range | slice | Exception | torch.dtype | torch.device):
        return repr(value)
    return (kind.__name__, [(n, _plain(v, depth + 1, seen)) for n, v in _attributes(value)])


def _attributes(value: object) -> list[tuple[str, object]]:
    """Return an object's attributes, including those of the package's native classes, but without
    derived attributes.
    """
    out = dict(getattr(value, "__dict__", {}))
    for base in type(value).__mro__:
        for name, each in vars(base).items():
            if isinstance(each, functools.cached_property):
                out.pop(name, None)
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                out[name] = getattr(value, name)
    if type(value).__module__ == "kvcache._core":
        for name in dir(type(value)):
            if isinstance(inspect.getattr_static(type(value), name), property):
                try:
                    out[name] = getattr(value, name)
                except Exception as error:
                    out[name] = type(error).__name__
    return sorted(out.items())


def _array(array: np.ndarray) -> object:
    head = (str(array.dtype), array.shape)
    if array.dtype.hasobject or array.nbytes > _MOST_BYTES:
        return head
    return (*head, hashlib.md5(array.tobytes()).hexdigest())


def _tensor(tensor: torch.Tensor) -> object:
    head = (str(tensor.dtype), tuple(tensor.shape))
    try:
        if tensor.numel() * tensor.element_size() > _MOST_BYTES or tensor.device.type == "meta":
            return head
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError):  # e.g. sparse and quantized tensors
        return head
    return (*head, hashlib.md5(data.tobytes()).hexdigest())


def difference(one: object, other: object, path: str = "") -> str | None:
    """Describe the first difference between two states, or return None."""
    if one == other:
        return None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for i, (a, b) in enumerate(zip(one, other)):
            found = difference(a, b, f"{path}.{a[0]}" if _is_named(a) else f"{path}[{i}]")
            if found is not None:
                return found
    return f"{path}: {str(one)[:100]} THEN {str(other)[:100]}"


def _is_named(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str)
