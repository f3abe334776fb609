# SPDX-License-Identifier: Apache-2.0
"""How many bytes a load of cached tokens moves."""

from __future__ import annotations

from kvcache.kinds import make_kind
from kvcache.replay.fleet.hardware import Hardware
from kvcache.replay.fleet.sizes import Fleet


class KVBytes:
    """The bytes of blocks and tokens of a fleet's model.

    Attributes:
        per_block: Bytes of a block.
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
        """Return the bytes to load for the tokens [first, stop), if the earlier ones are cached.

        Of each group, only the blocks are loaded that the token at `stop` attends to.
        """
        if stop <= first:
            return 0
        if not self._groups:
            return round((stop - first) * self._per_token)
        num_blocks = 0
        for kind, size in self._groups:
            if not kind.pages.has_slots:
                num_blocks += 1  # the state
                continue
            needed = max(kind.first_needed_token(stop), first)
            num_blocks += max(-(-stop // size) - needed // size, 0)
        return num_blocks * self.per_block
