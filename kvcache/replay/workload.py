"""One request of a workload. Readers and generators make them, the replayer takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.checks import MAX_INT32, check_range, instance, instances, plain_fields, shown


@dataclass(frozen=True, slots=True, eq=False)
class WorkloadRequest:
    """A request as it arrives.

    `index`: position in the workload, from 0. `arrival_ms`: milliseconds since its start.
    `token_ids`: int32[n], the prompt. `output_length`: tokens of the answer. `content`: int64[n], a
    key per token that stands for the token's whole prefix: equal keys mean equal prompts up to and
    including that token, unequal keys unequal ones. The KV of a token is a function of its key.
    TypeError or ValueError for anything else.
    """

    index: int
    arrival_ms: int
    token_ids: np.ndarray
    output_length: int
    content: np.ndarray

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("token_ids", "content"):
            array = getattr(self, name)
            if not (isinstance(array, np.ndarray) and array.ndim == 1 and array.dtype.kind in "iu"):
                raise TypeError(f"{name} is {shown(array)}: expected integers of one dimension")
        check_range("token_ids", "is", self.token_ids, 0, MAX_INT32 + 1)
        if len(self.content) not in (0, len(self.token_ids)):
            raise ValueError(
                f"content has {len(self.content)} entries and token_ids {len(self.token_ids)}: expected "
                "as many, or none"
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)


def checked_workload(
    workload: Iterable[WorkloadRequest], on_request: Callable[[], None] | None
) -> Iterator[WorkloadRequest]:
    """Its requests; those of a list are checked before the first is yielded. TypeError."""
    if on_request is not None and not callable(on_request):
        raise TypeError(f"on_request is {shown(on_request)}: expected a function or None")
    if isinstance(workload, list | tuple):
        checked_requests(workload, "workload")
    try:
        return _checked_each(iter(workload))
    except (TypeError, RuntimeError):  # RuntimeError: of a tensor of too many rows
        raise TypeError(f"workload is {shown(workload)}: expected requests") from None


def checked_requests(requests: Sequence[WorkloadRequest], name: str) -> list[WorkloadRequest]:
    """A list of requests. TypeError or ValueError."""
    return instances(requests, WorkloadRequest, name, "requests")


def _checked_each(workload: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    for i, each in enumerate(workload):
        instance(each, WorkloadRequest, f"workload[{i}]")
        yield each
