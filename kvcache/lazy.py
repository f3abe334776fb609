# SPDX-License-Identifier: Apache-2.0
"""Imports the public names of a package on first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Collection, Mapping

# Names of other engines that users look for in any package.
_IN_COMPAT = {
    "vllm_block_table or kvcache.compat.ascend_block_table": ("BlockTable", "MultiGroupBlockTable"),
    "kv_transfer": (
        *("KVCacheEvents", "KVConnectorOutput", "KVOutputAggregator", "KVTopology", "RemoteEngine"),
        *("TpKVTopology", "copy_kv_blocks", "get_kv_connector_cache_layout", "yield_req_data"),
        *("kv_postprocess_blksize_and_layout_on_receive", "kv_postprocess_blksize_on_receive"),
        "kv_postprocess_layout_on_receive",
    ),
    "kv_cache_manager": ("KVCacheBlock",),
    "block_space_manager": (
        *("AllocStatus", "BlockSpaceManager", "SelfAttnBlockSpaceManager", "SequenceGroupLike"),
        "SequenceLike",
    ),
}
_ELSEWHERE = {n: f"kvcache.compat.{module}" for module, names in _IN_COMPAT.items() for n in names}


def lazy_names(
    package: str, home: Mapping[str, str], modules: Collection[str] = ()
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that imports its public names lazily.

    Args:
        package: Name of the package.
        home: Mapping from each public name to the module that defines it.
        modules: Public modules of the package.

    Example:
        >>> import kvcache.transfer
        >>> "plan_transfer" in dir(kvcache.transfer)
        True
    """

    def get(name: str) -> object:
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        if name not in home:
            message = f"module {package!r} has no attribute {name!r}"
            if name not in _ELSEWHERE:
                raise AttributeError(message)
            message += f": expected an import from {_ELSEWHERE[name]}"
            # `from package import name` replaces the message of an AttributeError.
            is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
            raise (ImportError if is_import else AttributeError)(message, name=name)
        value = getattr(importlib.import_module(home[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home, *modules})

    return get, names
