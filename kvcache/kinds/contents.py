"""What the pages of a kind contain, and the properties that other modules derive from it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageContent:
    """The content of a kind's pages.

    A new content is one value here, one file in `kvcache/kinds`, and one in `csrc/core/groups/rules`.

    Args:
        name: The name in messages.
        has_slots: Whether each token has a slot in a page. False for states: a page has one state.
        of_encoder: Whether the pages hold an encoder's tokens: admission allocates them all.
        wraps: Whether a request reuses its blocks in a circle.
        is_transferable: Whether a page holds a run of the request's tokens, or their state, so that other
            requests and engines can use it.
    """

    name: str
    has_slots: bool = True
    of_encoder: bool = False
    wraps: bool = False
    is_transferable: bool = True

    def __repr__(self) -> str:
        return repr(self.name)


TOKENS = PageContent("tokens")  # KV of block_size tokens
STATE = PageContent("state", has_slots=False)  # a request's state at the end of a block
ENCODER = PageContent("encoder", of_encoder=True, is_transferable=False)
CIRCULAR = PageContent("circular", wraps=True, is_transferable=False)  # a request's last tokens
