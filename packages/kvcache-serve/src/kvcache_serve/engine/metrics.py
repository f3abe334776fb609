# SPDX-License-Identifier: Apache-2.0
"""Counters of an engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Metrics:
    """Counters of an `Engine` since its creation. `as_dict` returns them keyed by name."""

    requests: int = 0  # requests added
    finished_requests: int = 0
    aborted_requests: int = 0
    failed_sequences: int = 0  # sequences that ended with an error
    steps: int = 0
    failed_steps: int = 0  # steps whose model or transfer failed; their tokens were recomputed
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # prompt tokens that other requests had computed
    generated_tokens: int = 0
    computed_tokens: int = 0  # tokens computed by the model, including drafts and recomputed tokens
    drafted_tokens: int = 0
    accepted_drafts: int = 0
    swapped_out_sequences: int = 0
    recomputed_sequences: int = 0  # sequences preempted by releasing their blocks
    forked_sequences: int = 0
    swapped_out_pages: int = 0
    swapped_in_pages: int = 0  # pages swapped in, including host hits
    copied_pages: int = 0
    schedule_seconds: float = 0.0  # time for planning, applying plans, block tables and slots
    model_seconds: float = 0.0
    sample_seconds: float = 0.0  # time for choosing tokens and reporting them to the manager

    def as_dict(self) -> dict[str, float]:
        """Return all counters, keyed by name."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Timer:
    """Adds the duration of each ``with`` block, in seconds, to a metric. Blocks must not be nested."""

    __slots__ = ("_metrics", "_name", "_start")

    def __init__(self, metrics: Metrics, name: str) -> None:
        self._metrics, self._name = metrics, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        taken = time.perf_counter() - self._start
        setattr(self._metrics, self._name, getattr(self._metrics, self._name) + taken)
