# SPDX-License-Identifier: Apache-2.0
"""Digests of the bytes of full blocks, by content."""

from __future__ import annotations

from collections import OrderedDict

_MAX_CONTENTS = 1 << 18
_MAX_DIGESTS = 32  # of one content, which steps of other shapes compute with other roundings


class ContentDigests:
    """The digests that were seen for each content. The contents seen longest ago are forgotten."""

    def __init__(self) -> None:
        self._digests: OrderedDict[tuple[int, int], list[int]] = OrderedDict()

    def add(self, group: int, tag: int, digest: int) -> None:
        """Remember a digest of the block whose last slot has this tag."""
        known = self._digests.setdefault((group, tag), [])
        self._digests.move_to_end((group, tag))
        if digest not in known:
            known.append(digest)
            del known[:-_MAX_DIGESTS]
        if len(self._digests) > _MAX_CONTENTS:
            self._digests.popitem(last=False)

    def of(self, group: int, tag: int) -> list[int]:
        """Return the known digests of a content."""
        return self._digests.get((group, tag), [])
