"""One request of a workload. Readers and generators make them, the replayer takes them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class WorkloadRequest:
    """A request as it arrives.

    `index`: position in the workload, from 0. `arrival_ms`: milliseconds since its start.
    `token_ids`: int32[n], the prompt. `output_length`: tokens of the answer. `content`: int64[n], a
    key per token that stands for the token's whole prefix: equal keys mean equal prompts up to and
    including that token, unequal keys unequal ones. The KV of a token is a function of its key.
    """

    index: int
    arrival_ms: int
    token_ids: np.ndarray
    output_length: int
    content: np.ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)
