# SPDX-License-Identifier: Apache-2.0
"""The objects that the control plane and the data plane exchange. In each step, the manager sends one
`StepPlan`, and the worker returns one `StepReport`.

The manager (control plane) allocates blocks, and the worker (data plane) moves bytes. Plans and reports
can be pickled, so the planes may run in two processes. This module does not need torch.
"""

from __future__ import annotations

import copyreg
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kvcache.checks import instances, shown
from kvcache.native.load import core

PLAN_VERSION = 5


class Status(IntEnum):
    """The result for one requested row. `WAIT` and `NEVER` leave the request unchanged.

    - `SERVED`: all requested slots were allocated.
    - `WAIT`: the row does not fit now.
    - `NEVER`: the row does not fit even into an empty pool.
    """

    SERVED = 0
    WAIT = 1
    NEVER = 2


def _constant(*values: int, shape: tuple[int, ...]) -> np.ndarray:
    array = np.array(values, np.int32).reshape(shape)
    array.setflags(write=False)
    return array


# Empty arrays shared by all plans without entries.
NO_IDS = _constant(shape=(0,))
NO_SPLITS = _constant(0, shape=(1,))
NO_PAIRS = _constant(shape=(0, 2))
NO_REPLACE = _constant(shape=(0, 3))


class Answers(NamedTuple):
    """The results for one argument of `KVCacheManager.step`, in the order of the argument's entries.

    - `rows`: int32[n], the row of each request, or -1 for a new request that was not served.
    - `status`: uint8[n], the `Status` of each request.
    - `num_computed_tokens`: int32[n], the position of the request's first new token. For a new
      request, this is the length of its prefix hit.
    - `num_tokens`: int32[n], the number of tokens with allocated slots, or 0 if the request was not
      served.
    """

    rows: np.ndarray
    status: np.ndarray
    num_computed_tokens: np.ndarray
    num_tokens: np.ndarray


class StepAnswers(NamedTuple):
    """A plan's results for the arguments `rows`, `swap_out` and `new` of `KVCacheManager.step`."""

    rows: Answers
    swap_out: Answers
    new: Answers


class _HeldArrays(core.HeldArrays):
    """Arrays created by the native step, converted to numpy on first access."""

    __slots__ = ("_held",)

    def __reduce__(self) -> tuple:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return copyreg.__newobj__, (type(self),), (None, values)


@dataclass(slots=True, eq=False)
class StepPlan(_HeldArrays):
    """The changes that a worker makes before it runs a step, and the results for the scheduler.

    `KVCacheManager.step` creates a plan, and `Worker.apply` applies it. Every plan is applied
    exactly once, in step order. All IDs are int32. A page is the memory of a block on the device. "Per
    group" means a list with one entry per cache group.

    The step:

    - `step_id`: the step number. Numbers increase, and the numbers of aborted steps are not reused.
    - `previous_step_id`: the most recent earlier step that was not aborted, or -1. The plan of this
      earlier step must have been applied.
    - `version`: version of this format, `PLAN_VERSION`.

    The results have one entry for each entry of the arguments `rows`, `swap_out` and `new`, in this
    order. The property `answers` splits the results by argument:

    - `rows`: int32[b], the row of each request, or -1 for a new request that was not served.
    - `status`: uint8[b], the `Status` of each request.
    - `num_computed_tokens`: int32[b], the position of the row's first new token. For a new request, this
      is the length of its prefix hit.
    - `num_tokens`: int32[b], the number of tokens with allocated slots, or 0 if the row was not served or
      is swapped out.
    - `num_running`, `num_leaving`: number of results for `rows` and for `swap_out`.

    A worker performs these sections in order:

    - `swap_out`: int32[n, 2], device page and host page.
    - `copy`: int32[n, 2], source and destination page.
    - `zero`: int32[n], pages to zero: states that start anew, and blocks without the KV of a hit.
    - `fresh`: int32[n], new pages that no other section fills. They contain bytes of an earlier
      owner until the step or a load writes them. A worker with `clear="fresh"` zeroes them together
      with `zero`; no page is in both.
    - `swap_in`: int32[n, 2], host page and device page.
    - `clear_rows`: int32[k], table rows to clear.
    - `append_rows`: int32[r], rows to which blocks are appended. In group g, the blocks
      `append_ids[g][splits[i] : splits[i + 1]]` are appended to row `append_rows[i]`, with
      `splits = append_splits[g]`.
    - `append_splits`, `append_ids`: per group int32[r + 1] and int32[splits[-1]].
    - `replace`: per group int32[m, 3]: row, column and new ID of existing table entries.
    - `is_empty`: True if the manager left all of these sections empty, so that a worker can skip them.
      False in a plan that was not created by a manager.
    """

    step_id: int
    rows: np.ndarray
    status: np.ndarray
    num_computed_tokens: np.ndarray
    num_tokens: np.ndarray = field(default_factory=lambda: NO_IDS)
    num_running: int = 0
    num_leaving: int = 0
    clear_rows: np.ndarray = field(default_factory=lambda: NO_IDS)
    append_rows: np.ndarray = field(default_factory=lambda: NO_IDS)
    append_splits: list[np.ndarray] = field(default_factory=list)
    append_ids: list[np.ndarray] = field(default_factory=list)
    replace: list[np.ndarray] = field(default_factory=list)
    swap_out: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    copy: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    zero: np.ndarray = field(default_factory=lambda: NO_IDS)
    fresh: np.ndarray = field(default_factory=lambda: NO_IDS)
    swap_in: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    is_empty: bool = field(default=False, init=False)  # `dataclasses.replace` resets it to False
    previous_step_id: int = -1
    version: int = PLAN_VERSION

    @property
    def answers(self) -> StepAnswers:
        """The results for `rows`, `swap_out` and `new`, as views.

        Example:
            >>> from kvcache import KVCacheManager, Request
            >>> manager = KVCacheManager(16, num_gpu_blocks=9, max_model_len=128)
            >>> plan = manager.step(new=[Request("r1", range(40)), Request("r2", range(120))])
            >>> plan.answers.new.status.tolist(), plan.answers.new.num_tokens.tolist()
            ([0, 1], [40, 0])
        """
        first, second = self.num_running, self.num_running + self.num_leaving
        arrays = self.rows, self.status, self.num_computed_tokens, self.num_tokens
        parts = slice(first), slice(first, second), slice(second, None)
        return StepAnswers(*(Answers(*(each[part] for each in arrays)) for part in parts))


@dataclass(slots=True)
class StepReport:
    """A worker's report of a step, sent after all copies of the step have finished.

    - `step_id`: the step. The report also covers all earlier steps.
    - `completed`: whether the plan was applied.
    - `failed_pages`: device pages that do not have the content required by the plan.
    - `failed_host_pages`: host pages whose swap-out failed.
    """

    step_id: int
    completed: bool
    failed_pages: list[int] = field(default_factory=list)
    failed_host_pages: list[int] = field(default_factory=list)

    @staticmethod
    def of_ranks(reports: Sequence[StepReport]) -> StepReport:
        """Combine the reports of all ranks of an engine for one step.

        A step counts as completed only if all ranks completed it. A page counts as failed if it
        failed on any rank, so that all ranks discard the same blocks.

        Args:
            reports: One report per rank.

        Returns:
            The report for `KVCacheManager.report`.

        Raises:
            TypeError, ValueError: There is no report, or the reports belong to different steps.

        Example:
            >>> StepReport.of_ranks([StepReport(3, True, [5]), StepReport(3, True, [2, 5])])
            StepReport(step_id=3, completed=True, failed_pages=[2, 5], failed_host_pages=[])
        """
        found = instances(reports, StepReport, "reports")
        if not found:
            raise ValueError("reports is empty: expected one report per rank")
        step_id = found[0].step_id
        for i, each in enumerate(found):
            if each.step_id != step_id:
                raise ValueError(
                    f"reports[{i}] is of step {shown(each.step_id)}: expected {shown(step_id)}, as in "
                    "reports[0]"
                )
        return StepReport(
            step_id,
            all(each.completed for each in found),
            sorted({page for each in found for page in each.failed_pages}),
            sorted({page for each in found for page in each.failed_host_pages}),
        )
