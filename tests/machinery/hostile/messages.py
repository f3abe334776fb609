# SPDX-License-Identifier: Apache-2.0
"""Decides whether an error message is clear, i.e. whether it names an invalid argument."""

from __future__ import annotations

import re

# Words with which errors refer to parts of an argument.
_WORDS = {
    "request": ("request", "token_ids", "block_hashes", "row"), "new": ("request", "new"),
    "seq": ("seq", "get_len", "get_token_ids"), "seqs": ("seq",),
    "seq_group": ("seq", "group", "encoder"), "parent_seq": ("seq",), "child_seq": ("seq",),
    "report": ("report", "step", "failed_pages", "failed_host_pages", "completed"),
    "step_id": ("step",), "budget": ("num_gpu_blocks",),
    "plan": (
        "num_", "max_", "page", "layer", "plan", "append", "swap", "copy", "zero", "fresh",
        "replace", "clear_rows", "step",
    ),
    "layers": ("layer",), "layouts": ("groups",), "number": ("layer",), "tp_size": ("tp_",),
    "dcp_world_size": ("dcp_",), "pcp_world_size": ("pcp_",), "values": ("version", "value"),
    "num_tokens": ("tokens", "num_tokens", "num_rejected_tokens", "external.delayed"),
    "previous_step_id": ("step",), "pp_size": ("pp_",), "block_size": ("full block",),
    "token_ids": ("full block",), "seconds": ("clock",), "key": ("tokens are",),
    "value": ("tokens are",), "swap_out": ("swapped out", "row"), "num_padded_reqs": ("requests",),
    "sliding_window": ("window",), "ids": ("ids", "page", "block"),
    "description": ("descri", "memory_order", "stages of engine"), "length": ("bytes",),
    "timeout_s": ("within", "timed out"), "data": ("spans say",),
    "block_ids": ("block_ids", "append", "blocks"), "req_indices": ("row",),
    "num_rows": ("row", "table"), "num_src_blocks": ("page",), "num_dst_blocks": ("page",),
    "key_cache": ("cache",), "value_cache": ("cache",), "required": ("layout", "connector"),
    "pairs": ("pairs", "swap_out", "swap_in"), "pages": ("pages", "before_write"),
    "k_scale": ("scale", "fp8"), "v_scale": ("scale", "fp8"), "caches": ("cache", "layer"),
    "cache": ("cache", "layer"), "name": ("backend", "kind"), "described": ("backend",),
    "text": ("number of blocks", "two speeds", "option"), "eviction_options": ("option",),
    "host_eviction_options": ("option",), "options": ("option", "window", "chunk_size"),
    "parent": ("parent", "request", "row"), "child": ("child", "request"),
    "append_rows": ("append",), "append_ids": ("append",), "append_splits": ("append",),
    "groups": ("group",), "tables": ("table",), "storage": ("storage", "block_size"),
    "host": ("page", "host", "fragment"), "device": ("page", "device", "fragment"),
}  # fmt: skip


_RIGHT = (TypeError, ValueError, RuntimeError, IndexError, MemoryError)


def is_clear(error: BaseException, text: str, wrong: list[str]) -> bool:
    """Return whether an error shows the caller which argument is invalid."""
    # Errors about files and sockets must name the path or the argument.
    if isinstance(error, OSError):
        return error.filename is not None or names_one_of(text, wrong)
    if isinstance(error, AttributeError | KeyError | RecursionError | OverflowError):
        return False
    of_package = type(error).__module__.startswith("kvcache")
    is_right = isinstance(error, _RIGHT) or of_package
    return is_right and names_one_of(text, wrong)


def names_one_of(text: str, wrong: list[str]) -> bool:
    """Return whether a message names one of these arguments."""
    plain = text.lower()
    if "incompatible function arguments" in plain:
        return False
    for name in wrong:
        words = {name, name.removesuffix("s"), *_WORDS.get(name, ())}
        patterns = (re.escape(word).replace("_", "[_ ]") for word in words)
        if any(re.search(rf"(?<![a-z]){pattern}", plain) for pattern in patterns):
            return True
    return False
