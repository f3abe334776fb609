# SPDX-License-Identifier: Apache-2.0
"""Computes digests of the bytes of vLLM's blocks, so that blocks loaded from a host tier can be
checked.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from kvcache.sanitizer import Sanitizer

# Connectors that load only blocks that they have stored.
_HOST_TIERS = ("OffloadingConnector", "SimpleCPUOffloadConnector")


def has_host_tier(connector: object) -> bool:
    """Return whether a connector stores and loads only blocks of its own engine."""
    return any(each.__name__ in _HOST_TIERS for each in type(connector).__mro__)


class BlockBytes:
    """Records digests of blocks as they become full, and checks the digests of loaded blocks.

    Args:
        runner: vLLM's model runner.
        sanitizer: The sanitizer.
        gids: vLLM's number of each sanitized group.
    """

    def __init__(self, runner: Any, sanitizer: Sanitizer, gids: list[int]) -> None:
        self._sanitizer = sanitizer
        self._num_blocks = runner.kv_cache_config.num_blocks
        self._caches: dict[int, list[torch.Tensor]] = {}  # keyed by sanitized group
        self._num_full: dict[str, int] = {}  # number of tokens in each request's observed blocks
        self.num_loaded = self.num_checked = 0
        self.unchecked: dict[int, str] = {}  # groups whose bytes are not checked, and the reason
        layers = runner.compilation_config.static_forward_context
        for g, gid in enumerate(gids):
            if sanitizer.groups[g].kind == "state":
                continue
            names = runner.kv_cache_config.kv_cache_groups[gid].layer_names
            caches = [getattr(layers.get(name), "kv_cache", None) for name in names]
            if caches and all(self._has_blocks(cache) for cache in caches):
                self._caches[g] = caches
            else:
                self.unchecked[gid] = "bytes of loads: the layout of its caches is unknown"

    def begin(self, name: str, blocks: list[list[int]], num_computed: int, is_loaded: bool) -> None:
        """Check the blocks that were loaded for a new or resumed request."""
        self._num_full[name] = num_computed
        for g in self._caches if is_loaded else ():
            size = self._sanitizer.groups[g].block_size
            full = [block for block in blocks[g][: num_computed // size] if block]
            self.num_loaded += len(full)
            self.num_checked += self._sanitizer.check_digests(g, full, self._digests(g, full))

    def observe(self, name: str, blocks: list[list[int]], num_tokens: int) -> None:
        """Observe the blocks that a request has filled with its first `num_tokens` verified tokens."""
        before = self._num_full.get(name, num_tokens)
        for g in self._caches:
            size = self._sanitizer.groups[g].block_size
            full = [block for block in blocks[g][before // size : num_tokens // size] if block]
            if full:
                self._sanitizer.observe_digests(g, full, self._digests(g, full))
        self._num_full[name] = max(before, num_tokens)

    def finish(self, name: str) -> None:
        """Forget a request."""
        self._num_full.pop(name, None)

    def _has_blocks(self, cache: object) -> bool:
        return isinstance(cache, torch.Tensor) and cache.shape[0] % self._num_blocks == 0

    def _digests(self, g: int, blocks: list[int]) -> np.ndarray:
        digests = [hashlib.blake2b(digest_size=8) for _ in blocks]
        for cache in self._caches[g]:
            own = cache.unflatten(0, (self._num_blocks, -1))[blocks].cpu().contiguous()
            for digest, each in zip(digests, own.view(torch.uint8).numpy()):
                digest.update(each.tobytes())
        return np.array([int.from_bytes(each.digest(), "little", signed=True) for each in digests])
