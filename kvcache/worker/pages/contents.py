"""The meaning of a page's bytes: the position of each head of each token, and the dtype."""

from __future__ import annotations

from typing import NamedTuple


class PageContents(NamedTuple):
    """The meaning of a page's bytes, as plain values that can be compared.

    The bytes are all fragments, concatenated in the order of `Pages.sizes`, as swaps and stores copy
    them. Neither their placement in memory nor a backend's indexing affects the contents.
    """

    storages: tuple[tuple, ...]  # per storage over the pages: the parts of its blocks
    cp_interleave: int | None = None  # tokens, as in the block tables; None: unknown
