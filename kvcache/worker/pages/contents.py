# SPDX-License-Identifier: Apache-2.0
"""Describes the contents of a page: the position of each head of each token, and the dtype."""

from __future__ import annotations

from typing import NamedTuple


class PageContents(NamedTuple):
    """The contents of a page, described by plain values that can be compared.

    The bytes of a page are all its fragments, concatenated in the order of `Pages.sizes`, as swaps
    and stores copy them. Neither their placement in memory nor a backend's indexing affects the
    contents.
    """

    storages: tuple[tuple, ...]  # the parts of a block, for each storage over the pages
    cp_interleave: int | None = None  # interleave in tokens, as in the block tables; None: unknown
