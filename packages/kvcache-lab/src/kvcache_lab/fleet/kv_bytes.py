# SPDX-License-Identifier: Apache-2.0
"""Computes the number of bytes that a load of cached tokens transfers."""

from __future__ import annotations

from kvcache.kinds import make_kind
from kvcache_lab.fleet.hardware import Hardware
from kvcache_lab.fleet.sizes import Fleet


class KVBytes:
    """Sizes of the model's KV blocks and tokens in bytes.

    Attributes:
        per_block: Size of a block in bytes.
    """

    def __init__(self, fleet: Fleet, hardware: Hardware) -> None:
        self._per_token = hardware.bytes_per_token
        self.per_block = fleet.page_bytes or self._per_token * fleet.block_size
        self._groups = []
        if fleet.page_bytes:
            self._groups = [
                (make_kind(spec.kind, spec.options), spec.block_size)
                for spec in fleet.group_specs()
            ]

    def between(self, first: int, stop: int) -> int:
        """Return the number of bytes to load for tokens [first, stop), given that earlier tokens
        are cached.

        Only the blocks that token `stop` attends to are loaded in each group.
        """
        if stop <= first:
            return 0
        if not self._groups:
            return round((stop - first) * self._per_token)
        num_blocks = 0
        for kind, size in self._groups:
            if not kind.pages.has_slots:
                num_blocks += 1  # a recurrent state occupies one block
                continue
            needed = max(kind.first_needed_token(stop), first)
            num_blocks += max(-(-stop // size) - needed // size, 0)
        return num_blocks * self.per_block
