# SPDX-License-Identifier: Apache-2.0
"""What the simulator knows of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b

from kvcache import Request
from tests.simulator.content import owner_of


class Wrong(AssertionError):
    """Raised if the system has done something wrong."""


@dataclass(eq=False)
class Span:
    """The tokens [start, end) that a step computes for a row, as known when the step is planned."""

    described: str
    row: int
    start: int
    end: int
    sure: int  # tokens from here on are drafts
    contents: list[int | None]  # of the tokens before `end`
    known: int  # `start`, or the end of what may be read if the row goes on from rejected drafts
    begins: tuple[int, int]
    encoder: list[int]
    puts: list  # external tokens that the step itself writes


@dataclass(eq=False)
class Row:
    """What the caller knows of a request that it has created."""

    request: Request
    tokens: list[int]  # that the request will ever have
    units: list[int]  # the same, with images where they replace tokens
    num_sampled: int
    goal: int  # tokens after which the request ends
    by_step: bool = True
    row: int = -1  # -1: not admitted
    # Digests of the KV in the row's slots. None: a rejected draft, or garbage.
    contents: list[int | None] = field(default_factory=list)
    admitted_in: int = -1  # step
    last_start: int = 0  # of the last step
    start_before: int = 0  # of the step before; both may be draft steps, whose tokens may return
    num_rejected: int = 0  # drafts that the manager does not know to be rejected
    # First tokens whose KV groups that are not cached, and groups that are not transferred, store.
    begins: tuple[int, int] = (0, 0)
    external: tuple[int, int] = (0, 0)
    is_receiving: bool = False
    source: object = None  # that the external tokens come from; None: the engine itself writes them
    encoder: int = 0  # digest of the encoder's output
    hashing: tuple[int, int] = (0, 0)  # tokens per hash of an engine, and after them; 0: no hashes

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def num_valid(self) -> int:
        return next((i for i, each in enumerate(self.contents) if each is None), len(self.contents))

    def late(self) -> list[int]:
        """Return sampled tokens that the manager does not know, and append their engine's hashes."""
        self.add_hashes(self.num_sampled)
        return self.tokens[self.request.num_tokens : self.num_sampled]

    def hashes_of(self, num_tokens: int) -> list[bytes] | None:
        size, ahead = self.hashing
        return self.request.block_hashes[: max(num_tokens - ahead, 0) // size] if size else None

    def add_hashes(self, num_tokens: int) -> None:
        """Append the hashes that an engine computes for the first tokens, if it does."""
        request, (size, ahead) = self.request, self.hashing
        for end in range(size, num_tokens - ahead + 1, size) if size else ():
            if end > size * len(request.block_hashes):
                covered = owner_of(request.lora, request.cache_salt), self.units[: end + ahead]
                request.block_hashes.append(
                    blake2b(repr(covered).encode(), digest_size=16).digest()
                )


def differing(before: dict, after: dict) -> dict:
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return {name: (before.get(name), after.get(name)) for name in names}
