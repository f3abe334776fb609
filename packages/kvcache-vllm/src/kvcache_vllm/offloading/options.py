# SPDX-License-Identifier: Apache-2.0
"""The options of the host tier in `kv_connector_extra_config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvcache.allocator import host_eviction_names
from kvcache.checks import byte_count, integer, number, shown
from kvcache.native.load import core

THROUGH, SELECTIVE = STORES = ("through", "selective")
# Options that vLLM itself reads. The spec rejects "canonical_layout".
_OF_VLLM = (
    *("spec_name", "spec_module_path", "block_size", "blocks_per_chunk", "offload_prompt_only"),
    *("self_describing_kv_events", "canonical_layout"),
)
_INSTEAD = {
    "eviction_policy": "eviction",
    "store_threshold": 'store "selective" with num_requests_to_store',
    "cache_policy_module_path": "eviction",
    "max_tracker_size": "nothing",
    "sync_load_budget_bytes": "nothing, because a failed load within a step is not recomputed",
    "host_eviction": "eviction",
    "host_write": "store",
}
_NOT_STORES = {
    "evict": "vLLM does not report evicted blocks to a connector",
    "back": "vLLM does not report evicted blocks to a connector",
    "learned": "it chooses among evicted blocks, which vLLM does not report to a connector",
}


@dataclass(frozen=True)
class HostTierOptions:
    """Options of the host tier. An invalid value raises a TypeError or ValueError that names the
    option.

    Example:
        >>> HostTierOptions.of({"cpu_bytes_to_use": "1 GiB"}).cpu_bytes_to_use
        1073741824
    """

    cpu_bytes_to_use: int
    """Bytes of host memory for all workers together, as a number or as text with a unit ("64 GiB")."""

    eviction: str = "lru"
    """The eviction policy, one of `host_eviction_names()`."""

    eviction_options: Mapping[str, float] = field(default_factory=dict)
    """Options of the eviction policy, by name."""

    store: str = THROUGH
    """Which blocks are stored: "through" stores each filled block; "selective" stores only blocks
    that occurred in at least `num_requests_to_store` requests.
    """

    num_requests_to_store: int = 2
    """Number of requests for `store="selective"`, at least 1."""

    def __post_init__(self) -> None:
        num_bytes = byte_count(self.cpu_bytes_to_use, "cpu_bytes_to_use")
        object.__setattr__(self, "cpu_bytes_to_use", num_bytes)
        if not isinstance(self.eviction, str) or self.eviction not in host_eviction_names():
            raise ValueError(
                f"eviction is {shown(self.eviction)}: expected one of "
                f"{', '.join(host_eviction_names())}"
            )
        if not isinstance(self.eviction_options, Mapping):
            raise TypeError(
                f"eviction_options is {shown(self.eviction_options)}: expected a dict of numbers"
            )
        numbers = {
            name: number(value, f"eviction_options[{name!r}]")
            for name, value in self.eviction_options.items()
        }
        object.__setattr__(self, "eviction_options", numbers)
        try:
            core.Eviction.for_host(self.eviction, numbers)
        except ValueError as error:  # its message names host_eviction
            raise ValueError(str(error).removeprefix("host_")) from None
        if not isinstance(self.store, str) or self.store not in STORES:
            why = _NOT_STORES.get(self.store) if isinstance(self.store, str) else None
            expected = " or ".join(map(repr, STORES)) + (f" ({why})" if why else "")
            raise ValueError(f"store is {shown(self.store)}: expected {expected}")
        integer(self.num_requests_to_store, "num_requests_to_store", 1)

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> HostTierOptions:
        """Return the options in `kv_connector_extra_config` that are not vLLM's own."""
        names = [each.name for each in fields(cls)]
        for name in extra_config:
            if name in names or name in _OF_VLLM:
                continue
            instead = _INSTEAD.get(name)
            expected = instead if instead else f"one of {', '.join((*names, *_OF_VLLM))}"
            raise ValueError(f"kv_connector_extra_config has {name!r}: expected {expected}")
        if "cpu_bytes_to_use" not in extra_config:
            raise ValueError(
                "kv_connector_extra_config has no cpu_bytes_to_use: expected the bytes of host memory, "
                "such as 1073741824 or '1 GiB'"
            )
        return cls(**{name: extra_config[name] for name in names if name in extra_config})
