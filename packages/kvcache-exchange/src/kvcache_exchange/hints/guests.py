# SPDX-License-Identifier: Apache-2.0
"""Guests: hints that need steps, with the requests that hold their blocks in the meantime."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvcache.allocator import Request
from kvcache.sources import KVSource
from kvcache_exchange.hints.prefixes import HintedPrefix
from kvcache_exchange.hints.receipts import PendingHint


class Stage(Enum):
    """Progress of a guest."""

    WAITING = "waiting"  # not admitted yet
    PLANNED = "planned"  # admitted by the step in flight
    LOADING = "loading"  # a source fills its blocks


@dataclass(eq=False)
class Guest:
    """A hint that needs steps, and the request that holds its blocks during these steps."""

    pending: PendingHint
    prefix: HintedPrefix
    name: str
    deadline: float
    stage: Stage = Stage.WAITING
    request: Request | None = None  # None until the first step that could admit the guest
    source: KVSource | None = None
    num_external: int = 0  # number of tokens that the source loads
    first_token: int = 0  # the first token that the source loads
    num_before: int = 0  # number of tokens on the device before the hint
    limit: str | None = None  # why the guest covers only part of the prefix

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prefix that the guest covers."""
        return self.request.num_tokens - 1
