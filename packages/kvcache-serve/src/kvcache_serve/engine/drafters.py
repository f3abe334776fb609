# SPDX-License-Identifier: Apache-2.0
"""Drafters, which guess upcoming tokens. The next step verifies these drafts in one forward pass."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.allocator import Request
from kvcache.checks import instance, integer

# Maps a request to any number of tokens that may follow its known tokens.
Drafter = Callable[[Request], list[int]]


class NgramDrafter:
    """Drafts the tokens that followed the previous occurrence of a request's last tokens.

    Searches for the last `longest` tokens first, then for shorter suffixes down to `shortest`. Drafts at
    most `num_tokens` tokens.

    >>> NgramDrafter(num_tokens=3)(Request("r1", [1, 2, 3, 4, 5, 1, 2]))
    [3, 4, 5]
    """

    def __init__(self, num_tokens: int = 4, *, longest: int = 4, shortest: int = 2) -> None:
        self.num_tokens = integer(num_tokens, "num_tokens", least=1)
        self.shortest = integer(shortest, "shortest", least=1)
        self.longest = integer(longest, "longest", least=1)
        if self.longest < self.shortest:
            raise ValueError(f"shortest is {shortest}: expected at most longest, {longest}")

    def __call__(self, request: Request) -> list[int]:
        instance(request, Request, "request")
        tokens = request.token_ids
        for size in range(min(self.longest, len(tokens) - 1), self.shortest - 1, -1):
            tail = tokens[-size:].tobytes()
            width = tokens.itemsize
            text = tokens[:-1].tobytes()
            at = text.rfind(tail)
            while at >= 0 and at % width:  # the match does not begin at a token boundary
                at = text.rfind(tail, 0, at + len(tail) - 1)
            if at >= 0:
                follow = at // width + size
                return tokens[follow : follow + self.num_tokens].tolist()
        return []
