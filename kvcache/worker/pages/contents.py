# SPDX-License-Identifier: Apache-2.0
"""Describes a page's contents: the dtype, and the position of each token's heads."""

from __future__ import annotations

from typing import NamedTuple


class PageContents(NamedTuple):
    """A description of a page's contents, made of plain values that can be compared.

    The bytes of a page are all of its fragments, concatenated in the order of `Pages.sizes`, which
    is how swaps and stores copy them. Neither the fragments' placement in memory nor a backend's
    indexing affects the description.
    """

    storages: tuple[tuple, ...]  # for each storage over the pages, the parts of a block
    cp_interleave: int | None = None  # interleave in tokens, as in the block tables; None: unknown
    groups: tuple[str, ...] = ()  # `GroupSpec.summary` of each group; (): unknown
