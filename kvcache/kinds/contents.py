# SPDX-License-Identifier: Apache-2.0
"""What the pages of a kind contain, and the properties that follow from the content."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageContent:
    """The content of a kind's pages.

    To add a kind of content, add a value here, a file in `kvcache/kinds`, and a file in
    `csrc/core/groups/rules`.

    Args:
        name: Name used in messages.
        has_slots: Whether each token has a slot in a page. False for states, because a page contains a
            single state.
        of_encoder: Whether the pages contain the KV of an encoder's tokens. If so, all pages are
            allocated at admission.
        wraps: Whether a request reuses its blocks as a circular buffer.
        is_transferable: Whether other requests and engines can use a page, because the page contains
            consecutive tokens of the request, or the state after such tokens.
    """

    name: str
    has_slots: bool = True
    of_encoder: bool = False
    wraps: bool = False
    is_transferable: bool = True

    def __repr__(self) -> str:
        return repr(self.name)


TOKENS = PageContent("tokens")  # the KV of `block_size` tokens
STATE = PageContent("state", has_slots=False)  # a request's state at the end of a block
ENCODER = PageContent("encoder", of_encoder=True, is_transferable=False)
CIRCULAR = PageContent("circular", wraps=True, is_transferable=False)  # a request's last tokens
