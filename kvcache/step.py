"""The objects that the planes exchange: one `StepPlan` per step, and one `StepReport` back.

The manager decides which blocks (control plane), the worker moves bytes (data plane). Both objects
pickle, so the planes may live in two processes. No torch here.
"""

from __future__ import annotations

import copyreg
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kvcache.native.load import core

PLAN_VERSION = 3


class Status(IntEnum):
    """Answer per asked row. `WAIT` and `NEVER` left the request exactly as it was.

    - `SERVED`: it has what was asked for.
    - `WAIT`: it does not fit now.
    - `NEVER`: it does not fit into the whole pool.
    """

    SERVED = 0
    WAIT = 1
    NEVER = 2


def _constant(*values: int, shape: tuple[int, ...]) -> np.ndarray:
    array = np.array(values, np.int32).reshape(shape)
    array.setflags(write=False)
    return array


# Arrays that all plans without entries share.
NO_IDS = _constant(shape=(0,))
NO_SPLITS = _constant(0, shape=(1,))
NO_PAIRS = _constant(shape=(0, 2))
NO_REPLACE = _constant(shape=(0, 3))


class Answers(NamedTuple):
    """The answers to one list that `KVCacheManager.step` was asked with, in its order.

    - `rows`: int32[n], the row of each request; -1 for a new one that was not served.
    - `status`: uint8[n], a `Status` each.
    - `num_computed_tokens`: int32[n], where its new tokens start (of a new request: its hit).
    - `num_tokens`: int32[n], how many tokens it has got slots for; 0 where it was not served.
    """

    rows: np.ndarray
    status: np.ndarray
    num_computed_tokens: np.ndarray
    num_tokens: np.ndarray


class StepAnswers(NamedTuple):
    """The answers of a plan by the arguments of `KVCacheManager.step`: `rows`, `swap_out`, `new`."""

    rows: Answers
    swap_out: Answers
    new: Answers


class _HeldArrays(core.HeldArrays):
    """Arrays that the native step has made: numpy's form of them comes when one is asked for."""

    __slots__ = ("_held",)

    def __reduce__(self) -> tuple:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return copyreg.__newobj__, (type(self),), (None, values)


@dataclass(slots=True, eq=False)
class StepPlan(_HeldArrays):
    """The work of a worker before it runs a step, and the answers to the scheduler.

    `KVCacheManager.step` makes it, `Worker.apply` carries it out: each plan once, in their order. All
    ids are int32; a page is a device block; "per group" is a list with one entry per cache group.

    The step:

    - `step_id`: its number. Numbers grow; those of aborted steps are not used again.
    - `previous_step_id`: the last step before it that was not aborted; -1: none. A worker has applied it.
    - `version`: of this format, `PLAN_VERSION`.

    The answers, one entry each for `rows`, then `swap_out`, then `new`; `answers` has the three apart:

    - `rows`: int32[b], the row of each request; -1 for a new one that was not served.
    - `status`: uint8[b], a `Status` each.
    - `num_computed_tokens`: int32[b], where the row's new tokens start (of a new request: its hit).
    - `num_tokens`: int32[b], how many tokens the row has got slots for; 0 where it was not served, and
      of rows that were asked to leave.
    - `num_running`, `num_leaving`: how many of the answers are to `rows` and to `swap_out`.

    The work, in the order in which a worker does it:

    - `swap_out`: int32[n, 2], device page and host page each.
    - `copy`: int32[n, 2], source and destination page.
    - `zero`: int32[n], pages to clear.
    - `swap_in`: int32[n, 2], host page and device page.
    - `clear_rows`: int32[k], rows of the tables that begin anew, empty.
    - `append_rows`: int32[r], rows that get more blocks: `append_ids[g][splits[i] : splits[i + 1]]` is
      what row `append_rows[i]` gets in group g, with `splits = append_splits[g]`.
    - `append_splits`, `append_ids`: per group int32[r + 1] and int32[splits[-1]].
    - `replace`: per group int32[m, 3], row, column and new id of entries that a table has already.
    - `is_empty`: the manager found all of these empty, so a worker does not look at them. False in a plan
      that is made by hand.

    `depends_on`: int32[n, 2], a row and another row of this step that fills blocks which it reads (with
    `in_step_hits="share"`). The worker computes both in one pass that writes the K and V of a layer
    before it attends, or the second row first.

    `page_bytes`: bytes of a page, 0 where the manager does not know.
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
    swap_in: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    depends_on: np.ndarray = field(default_factory=lambda: NO_PAIRS)
    is_empty: bool = field(default=False, init=False)  # so dataclasses.replace makes it False
    previous_step_id: int = -1
    version: int = PLAN_VERSION
    page_bytes: int = 0

    @property
    def answers(self) -> StepAnswers:
        """The answers to each of the three lists; views.

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

    @property
    def swap_in_bytes(self) -> int:
        """Bytes that come from the host."""
        return len(self.swap_in) * self.page_bytes

    @property
    def swap_out_bytes(self) -> int:
        """Bytes that go to the host."""
        return len(self.swap_out) * self.page_bytes


@dataclass(slots=True)
class StepReport:
    """A worker's report of a step, once its bytes have moved.

    - `step_id`: of the plan; the report is one for all earlier steps too.
    - `completed`: whether the plan was carried out.
    - `failed_pages`: pages of the device whose content is not what the plan says.
    - `failed_host_pages`: pages of the host that a swap-out did not fill.
    """

    step_id: int
    completed: bool
    failed_pages: list[int] = field(default_factory=list)
    failed_host_pages: list[int] = field(default_factory=list)
