# SPDX-License-Identifier: Apache-2.0
"""Records what happens to blocks besides writes and reads, and the digests of their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from kvcache.checks import check_count, check_range, integers, shown
from kvcache.native.load import core
from kvcache.sanitizer.findings import MEDIA, EventKind
from kvcache.sanitizer.requests import NOBODY

_MAX_CONTENTS = 1 << 18
# Maximum number of digests per content. The same content may have several digests, because steps
# with different shapes may round differently.
_MAX_DIGESTS = 32


class ObservedBlocks:
    """The shadow states of the device's and the host tier's blocks.

    Args:
        shapes: (blocks, slots per block, events per block) for each medium.
    """

    def __init__(self, shapes: dict[str, tuple[int, int, int]]) -> None:
        self._shapes = shapes
        self.reset()

    def reset(self) -> None:
        """Forget all contents."""
        self.shadows = {name: core.Shadow(*shape) for name, shape in self._shapes.items()}
        self.device = self.shadows["device"]

    def checked(
        self, blocks: object, name: str = "blocks", shadow: core.Shadow | None = None
    ) -> np.ndarray:
        """Validate block IDs, and return them as int64[n]. Raises TypeError or ValueError."""
        blocks = integers(blocks, name, ())
        check_range(name, "is", blocks, 0, (shadow or self.device).num_blocks)
        return blocks

    def allocate(self, serial: int, blocks: np.ndarray, group: int, step: int) -> None:
        """Record that a request holds the given blocks."""
        shadow, held = self.device, self.device.blocks
        shadow.tracks_holders = True
        # A block that is shared and then written in the same step still counts as new.
        held["is_fresh"][blocks] |= held["num_holders"][blocks] == 0
        held["num_holders"][blocks] += 1
        held["holder"][blocks] = serial
        shadow.log(blocks, EventKind.ALLOCATED, step, serial, group)

    def free(self, serial: int, blocks: np.ndarray, group: int, step: int) -> None:
        """Record that a request no longer holds the given blocks. The blocks keep their content."""
        shadow, held = self.device, self.device.blocks
        held["num_holders"][blocks] = np.maximum(held["num_holders"][blocks] - 1, 0)
        held["holder"][blocks[held["holder"][blocks] == serial]] = NOBODY
        shadow.log(blocks, EventKind.FREED, step, serial, group)
        shadow.change(blocks[held["num_holders"][blocks] == 0])

    def copy(
        self, src: Sequence[int], dst: Sequence[int], src_medium: str, dst_medium: str, step: int
    ) -> None:
        """Copy whole blocks. Raises TypeError or ValueError."""
        source = self._shadow(src_medium, "src_medium")
        target = self._shadow(dst_medium, "dst_medium")
        src, dst = self.checked(src, "src", source), self.checked(dst, "dst", target)
        check_count(dst, len(src), "dst", "source")
        target.slots[dst] = source.slots[src]
        for name in ("owner", "writer", "write_step"):
            target.blocks[name][dst] = source.blocks[name][src]
        target.blocks["is_fresh"][dst] = False
        target.change(dst)
        medium = MEDIA.index(src_medium)
        target.log(dst, EventKind.COPIED, step, sources=src, medium=medium)

    def clear(self, blocks: Sequence[int], medium: str, step: int) -> None:
        """Mark blocks as having no valid content. Raises TypeError or ValueError."""
        shadow = self._shadow(medium, "medium")
        blocks = self.checked(blocks, "blocks", shadow)
        shadow.clear(blocks)
        shadow.log(blocks, EventKind.CLEARED, step)

    def _shadow(self, medium: str, name: str) -> core.Shadow:
        if not isinstance(medium, str) or medium not in self.shadows:
            known = " or ".join(map(repr, self.shadows))
            raise ValueError(f"{name} is {shown(medium)}: expected {known}")
        return self.shadows[medium]


class ContentDigests:
    """Digests by content. The least recently observed contents are dropped."""

    def __init__(self) -> None:
        self._digests: OrderedDict[tuple[int, int], list[int] | None] = OrderedDict()

    def add(self, group: int, tag: int, digest: int) -> None:
        """Record a digest of the content that is identified by the tag of a block's last slot."""
        known = self._digests.setdefault((group, tag), [])
        self._digests.move_to_end((group, tag))
        if known is not None and digest not in known:
            known.append(digest)
            if len(known) > _MAX_DIGESTS:
                self._digests[group, tag] = None
        if len(self._digests) > _MAX_CONTENTS:
            self._digests.popitem(last=False)

    def of(self, group: int, tag: int) -> list[int]:
        """Return the digests that were observed for a content."""
        return self._digests.get((group, tag)) or []
