# SPDX-License-Identifier: Apache-2.0
"""The requests of a workload, which readers and generators create and the replayer consumes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.checks import (
    MAX_INT32,
    Count,
    check_range,
    instance,
    instances,
    integer,
    plain_fields,
    shown,
)


class ArrivalError(ValueError):
    """Raised if a request of a timed workload arrives before the previous request."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkloadRequest:
    """A request of a workload.

    Args:
        index: Position in the workload, starting at 0.
        arrival_ms: Milliseconds since the start of the workload.
        token_ids: int32[n], the prompt.
        output_length: Tokens of the answer.
        content: int64[n], one key per token. The key identifies the prefix up to and including the
            token: two keys are equal if and only if the prefixes are equal. A token's KV is a
            function of its key.
        tokens_per_id: Tokens per block of a trace that identifies blocks instead of listing tokens.
            0: the workload lists tokens.

    Raises:
        TypeError, ValueError: An argument is invalid.
    """

    index: int
    arrival_ms: int
    token_ids: np.ndarray
    output_length: int
    content: np.ndarray
    tokens_per_id: Count = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        integer(self.output_length, "output_length", most=MAX_INT32)
        for name in ("token_ids", "content"):
            array = getattr(self, name)
            if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu"):
                raise TypeError(f"{name} is {shown(array)}: expected integers of one dimension")
        check_range("token_ids", "is", self.token_ids, 0, MAX_INT32 + 1)
        if len(self.content) not in (0, len(self.token_ids)):
            raise ValueError(
                f"content has {len(self.content)} entries: expected {len(self.token_ids)}, one per "
                "token, or none"
            )

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.token_ids)


def checked_workload(
    workload: Iterable[WorkloadRequest], on_request: Callable[[], None] | None
) -> Iterator[WorkloadRequest]:
    """Yield the requests of a workload.

    A list is checked before its first request is yielded. Raises TypeError for invalid requests.
    """
    if on_request is not None and not callable(on_request):
        raise TypeError(f"on_request is {shown(on_request)}: expected a function or None")
    if isinstance(workload, list | tuple):
        checked_requests(workload, "workload")
    try:
        return _checked_each(iter(workload))
    except (TypeError, RuntimeError):  # a tensor may raise RuntimeError
        raise TypeError(f"workload is {shown(workload)}: expected requests") from None


def check_arrival(item: WorkloadRequest, last_ms: int) -> None:
    """Raise ArrivalError if a request arrives before the previous one, which arrived at `last_ms`."""
    if item.arrival_ms < last_ms:
        raise ArrivalError(
            f"request {item.index} arrives at {item.arrival_ms} ms, but the previous request at "
            f"{last_ms} ms: expected a timed trace in order of arrival"
        )


def checked_requests(requests: Sequence[WorkloadRequest], name: str) -> list[WorkloadRequest]:
    """Return the requests as a list. Raises TypeError or ValueError for invalid requests."""
    return instances(requests, WorkloadRequest, name, "requests")


def _checked_each(workload: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    for i, each in enumerate(workload):
        instance(each, WorkloadRequest, f"workload[{i}]")
        yield each
