# SPDX-License-Identifier: Apache-2.0
"""What the simulator knows of a request."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcache import Request


class Wrong(AssertionError):
    """Raised if the system has done something wrong."""


@dataclass(eq=False)
class Row:
    """What the caller knows of a request that it has created."""

    request: Request
    tokens: list[int]  # that the request will ever have
    units: list[int]  # the same, with images where they replace tokens
    num_sampled: int
    by_step: bool = True
    row: int = -1  # -1: not admitted
    # Digests of the KV in the row's slots. None: a rejected draft, or garbage.
    contents: list[int | None] = field(default_factory=list)
    num_rejected: int = 0  # drafts that the manager does not know to be rejected
    # First tokens whose KV groups that are not cached, and groups that are not transferred, store.
    begins: tuple[int, int] = (0, 0)
    external: tuple[int, int] = (0, 0)
    is_receiving: bool = False
    source: object = None  # that the external tokens come from; None: the engine itself writes them
    encoder: int = 0  # digest of the encoder's output

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def num_valid(self) -> int:
        return next((i for i, each in enumerate(self.contents) if each is None), len(self.contents))

    def late(self) -> list[int]:
        return self.tokens[self.request.num_tokens : self.num_sampled]


def differing(before: dict, after: dict) -> dict:
    names = [name for name in before | after if before.get(name) != after.get(name)]
    return {name: (before.get(name), after.get(name)) for name in names}
