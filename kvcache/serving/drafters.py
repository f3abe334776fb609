"""Drafters: guesses of the tokens to come, which the next step computes at once."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.allocator import Request
from kvcache.checks import instance, integer

# Of a request: tokens that may follow its known ones; as many or as few as it likes.
Drafter = Callable[[Request], list[int]]


class NgramDrafter:
    """Drafts what followed the last time that a request's last tokens came before.

    Looks for its last `longest` tokens, then for fewer, down to `shortest`; drafts `num_tokens` at most.

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
            while at >= 0 and at % width:  # found across the bytes of two tokens
                at = text.rfind(tail, 0, at + len(tail) - 1)
            if at >= 0:
                follow = at // width + size
                return tokens[follow : follow + self.num_tokens].tolist()
        return []
