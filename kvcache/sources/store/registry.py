# SPDX-License-Identifier: Apache-2.0
"""The registry of store types. The command line selects a store by its URL."""

from __future__ import annotations

import re
from collections.abc import Callable

from kvcache.checks import byte_count, check_name, instance, shown, text
from kvcache.extensions import load_extensions
from kvcache.sources.store.base import BlockStore

StoreFactory = Callable[[str, int], BlockStore]

_FACTORIES: dict[str, StoreFactory] = {}


def register_store(scheme: str) -> Callable[[StoreFactory], StoreFactory]:
    """Decorator that registers a function as the creator of stores for a URL scheme.

    Args:
        scheme: Scheme of the URLs. It begins with a letter, followed by letters, digits, "+", "-" or
            ".".

    Returns:
        The decorator, which returns the function unchanged. The function is called with the whole
        URL and the capacity in bytes.

    Raises:
        ValueError: The scheme is malformed or already registered.

    Example:
        >>> @register_store("memory")
        ... def memory_store(url: str, capacity_bytes: int) -> BlockStore: ...
    """
    check_name(scheme, "scheme")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*", scheme):
        raise ValueError(f"scheme is {shown(scheme)}: expected the part of a URL before ://")

    def add(factory: StoreFactory) -> StoreFactory:
        if scheme in _FACTORIES:
            raise ValueError(f"scheme is {shown(scheme)}: expected a scheme that is not in use")
        _FACTORIES[scheme] = factory
        return factory

    return add


def open_store(place: str, capacity: int | str = "10GiB") -> BlockStore:
    """Create the store for a folder or URL.

    Args:
        place: A folder, for a `DiskStore`, or a URL whose scheme is registered.
        capacity: Size of the store in bytes, or text such as "20GiB".

    Returns:
        The store, which is not open yet.

    Raises:
        TypeError, ValueError: An argument is invalid, or the scheme is not registered. Other errors
            come from the store.

    Example:
        >>> open_store("/var/cache/kv", "20GiB")  # doctest: +SKIP
        <kvcache.sources.store.disk.DiskStore object at 0x7f0a1c0f5e10>
    """
    place, size = text(place, "place"), byte_count(capacity, "capacity")
    scheme, separator, _ = place.partition("://")
    if not separator:
        from kvcache.sources.store.disk import DiskStore

        return DiskStore(place, size)
    if scheme not in _FACTORIES:
        load_extensions()
    if scheme not in _FACTORIES:
        known = ", ".join(f"{each}://" for each in sorted(_FACTORIES))
        expected = f"a folder, or a URL with {known}" if known else "a folder"
        raise ValueError(f"place is {shown(place)}: expected {expected}")
    store = _FACTORIES[scheme](place, size)
    instance(store, BlockStore, f"the store of {shown(place)}")
    return store
