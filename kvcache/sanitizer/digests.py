# SPDX-License-Identifier: Apache-2.0
"""Digests of the bytes in full blocks, keyed by the blocks' content."""

from __future__ import annotations

from collections import OrderedDict

_MAX_CONTENTS = 1 << 18
# Maximum number of digests per content. The same content may have several digests, because steps
# with different shapes may round differently.
_MAX_DIGESTS = 32


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
