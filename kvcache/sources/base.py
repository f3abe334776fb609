# SPDX-License-Identifier: Apache-2.0
"""The interface between an engine and a source of KV that was computed elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvcache.allocator.request import Request
from kvcache.step import StepReport


@dataclass(frozen=True)
class Arrived:
    """A load that has ended, as returned by `KVSource.poll`.

    Attributes:
        request: The request that was loading.
        num_computed_tokens: Number of computed tokens, after which the request continues. None if
            the source may still write to the request's blocks. In that case, the blocks are in
            quarantine and the request was freed, so admit it again like a new request.
        num_loaded_tokens: Number of tokens that were loaded from the source.
        error: Reason why some tokens did not arrive. None if all tokens arrived.
        are_cached: Whether the loaded tokens were computed for other requests. False: they were
            computed for this request, so they are not counted as cached.
    """

    request: Request
    num_computed_tokens: int | None
    num_loaded_tokens: int = 0
    error: str | None = None
    are_cached: bool = True


@dataclass
class LoadStats:
    """The counts that a source has accumulated since it was created."""

    loads: int = 0
    """Number of loads that were started."""

    hit_tokens: int = 0
    """Number of tokens in these loads."""

    loaded_tokens: int = 0
    """Number of tokens in these loads that arrived."""

    failed_loads: int = 0
    """Number of loads that failed, were canceled, or arrived only in part."""

    failed_tokens: int = 0
    """Number of tokens in these loads that did not arrive. The engine computes them."""

    quarantined_loads: int = 0
    """Number of failed loads whose blocks were quarantined because data could still arrive."""

    refused_requests: int = 0
    """Number of requests rejected because the source and the engine are incompatible."""


class KVSource(Protocol):
    """A source of KV that was computed elsewhere, such as another engine or a store.

    For each request, call `match` until it returns a number, pass that number to `KVCacheManager.step` as
    `Admit(request, external=External(n, delayed=True))`, and call `begin` once the plan is applied.
    `poll` returns the request when its load has ended. All methods are called in the manager's
    thread and return without waiting.

    The source owns a load's blocks until no transfer can write to them any more. If the request
    ends earlier, the source keeps the blocks in quarantine and later releases them in `poll`.

    Attributes:
        name: Name of the source, for metrics.
        stats: The counts accumulated since the source was created.
    """

    name: str
    stats: LoadStats

    @property
    def num_loading_requests(self) -> int:
        """Number of requests whose blocks may still be written to, including those in quarantine."""

    @property
    def num_quarantined_blocks(self) -> int:
        """Number of blocks in quarantine."""

    @property
    def is_busy(self) -> bool:
        """Whether `poll` and `save` have work left that no request is waiting for, so that the
        engine must keep calling them.
        """

    def match(self, request: Request) -> int | None:
        """Return how many tokens after the local hit can be loaded.

        Call this method immediately before the step that admits the request.

        Args:
            request: A request that is not admitted.

        Returns:
            The number of tokens. None if the number is not known yet; call again in the next step.

        Raises:
            ValueError: The source rejects the request. The one-line message gives the reason.
        """

    def begin(self, request: Request) -> None:
        """Begin to load the tokens that `match` found.

        Args:
            request: A request that was admitted with `External.delayed` and whose plan was applied.

        Raises:
            ValueError: The request was not matched, or was admitted with a different number of
                tokens. Nothing has changed. `cancel` the request.
        """

    def poll(self) -> list[Arrived]:
        """Return the loads that have ended since the last call. Call this method once per step."""

    def save(self, report: StepReport) -> None:
        """Store newly computed blocks, if the source stores blocks.

        Args:
            report: The report of the most recently planned step. Pass it to the manager first.
        """

    def cancel(self, request: Request) -> None:
        """Free a request that is matched or loading, and end its load.

        Its blocks are reused once no transfer can write to them any more.

        Args:
            request: The request. If the source does not know the request, it is only freed.
        """

    def close(self) -> object:
        """End all loads and release the source's resources."""
