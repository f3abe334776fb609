# SPDX-License-Identifier: Apache-2.0
"""The registry of store types. Command line options select a store by its URL."""

from __future__ import annotations

import re
from collections.abc import Callable
from urllib.parse import parse_qsl, urlsplit

from kvcache.checks import byte_count, check_name, instance, shown, text
from kvcache.extensions import load_extensions
from kvcache_exchange.store.base import BlockStore

StoreFactory = Callable[[str, int], BlockStore]

_FACTORIES: dict[str, StoreFactory] = {}
_CAPACITY = "10GiB"  # default capacity of a folder and of registered stores
_MEMORY = "1GiB"  # default capacity of a Mooncake store, which uses memory of this process
_OF_MOONCAKE = ("host", "protocol", "devices", "metadata")


def register_store(scheme: str) -> Callable[[StoreFactory], StoreFactory]:
    """Decorator that registers a function as the creator of stores for a URL scheme.

    Args:
        scheme: Scheme of the URLs: a letter, followed by letters, digits, "+", "-" or ".".

    Returns:
        The decorator. It returns the decorated function unchanged. The function is called with the
        complete URL and the capacity in bytes.

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


def open_store(place: str, capacity: int | str | None = None) -> BlockStore:
    """Create the store for a folder or URL.

    Args:
        place: A folder, for a `DiskStore`; "mooncake://HOST:PORT", the address of a master, for a
            `MooncakeStore`; or a URL whose scheme is registered. The URL of a Mooncake store may set
            `host`, `protocol`, `devices` and `metadata`, as in
            "mooncake://10.0.0.1:50051?protocol=rdma&devices=mlx5_0".
        capacity: Size of the store in bytes, or a string such as "20GiB". For a Mooncake store, the
            size of this process's memory that the store may use. None: 10 GiB, or 1 GiB for a
            Mooncake store.

    Returns:
        The store, which is not open yet.

    Raises:
        TypeError, ValueError: An argument is invalid, or the scheme is not registered. The store
            may raise other errors.

    Example:
        >>> open_store("/var/cache/kv", "20GiB")  # doctest: +SKIP
        <kvcache_exchange.store.disk.DiskStore object at 0x7f0a1c0f5e10>
    """
    scheme, separator, _ = text(place, "place").partition("://")
    default = _MEMORY if scheme == "mooncake" and separator else _CAPACITY
    size = byte_count(default if capacity is None else capacity, "capacity")
    if not separator:
        from kvcache_exchange.store.disk import DiskStore

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


@register_store("mooncake")
def _mooncake_store(url: str, capacity_bytes: int) -> BlockStore:
    from kvcache_exchange.store.mooncake import MooncakeStore

    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := sorted(set(options) - set(_OF_MOONCAKE)):
        raise ValueError(
            f"place is {shown(url)}, with {', '.join(unknown)}: expected {', '.join(_OF_MOONCAKE)}"
        )
    try:
        is_address = bool(parts.hostname and parts.port) and "@" not in parts.netloc
    except ValueError:  # the port is out of range
        is_address = False
    if not is_address or parts.path not in ("", "/"):
        raise ValueError(f"place is {shown(url)}: expected mooncake://HOST:PORT")
    return MooncakeStore(parts.netloc, segment_bytes=capacity_bytes, **options)
