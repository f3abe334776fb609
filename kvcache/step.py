"""The objects that the planes exchange: one `StepPlan` per step, and one `StepReport` back.

The manager decides which blocks (control plane), the worker moves bytes (data plane). Both objects
pickle, so the planes may live in two processes. No torch here.
"""

from __future__ import annotations

import copyreg
from dataclasses import dataclass, field, fields
from enum import IntEnum

import numpy as np

from kvcache.native.load import core

PLAN_VERSION = 2


class Status(IntEnum):
    """Answer per asked row. `WAIT` and `NEVER` left the request exactly as it was."""

    SERVED = 0
    WAIT = 1  # does not fit now
    NEVER = 2  # does not fit into the whole pool


def _empty(*shape: int) -> np.ndarray:
    array = np.empty(shape, np.int32)
    array.setflags(write=False)
    return array


# Empty arrays that all plans share.
NO_IDS = _empty(0)
NO_PAIRS = _empty(0, 2)
NO_REPLACE = _empty(0, 3)


class _HeldArrays:
    """Arrays that the native step has made: numpy's form of them comes when one is asked for."""

    __slots__ = ("_held",)

    def __getattr__(self, name: str) -> object:
        # Asked only for what is not set yet.
        return core.fill_plan(self, name)

    def __reduce__(self) -> tuple:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return copyreg.__newobj__, (type(self),), (None, values)


@dataclass(slots=True, eq=False)
class StepPlan(_HeldArrays):
    """The work of a worker before it runs a step.

    Order of application: swap-out, copy, zero, swap-in, tables (clear, append, replace), slot
    mapping. `append_splits`, `append_ids` and `replace` have one entry per cache group. All ids are
    int32; a page is a device block.
    """

    step_id: int
    rows: np.ndarray  # int32[b]: row of each asked request, in the order asked; -1 where not served
    status: np.ndarray  # uint8[b]: Status
    num_computed_tokens: (
        np.ndarray
    )  # int32[b]: where the row's new tokens start (hit length if new)
    clear_rows: np.ndarray = field(default_factory=lambda: NO_IDS)  # int32[k]: reset these first
    append_rows: np.ndarray = field(default_factory=lambda: NO_IDS)  # int32[r]
    append_splits: list[np.ndarray] = field(default_factory=list)  # per group int32[r + 1]
    append_ids: list[np.ndarray] = field(default_factory=list)  # per group int32[splits[-1]]
    replace: list[np.ndarray] = field(
        default_factory=list
    )  # per group int32[m, 3]: row, column, id
    swap_out: np.ndarray = field(
        default_factory=lambda: NO_PAIRS
    )  # int32[n, 2]: device page, host page
    copy: np.ndarray = field(
        default_factory=lambda: NO_PAIRS
    )  # int32[n, 2]: source, destination page
    zero: np.ndarray = field(default_factory=lambda: NO_IDS)  # int32[n]: device pages to clear
    swap_in: np.ndarray = field(
        default_factory=lambda: NO_PAIRS
    )  # int32[n, 2]: host page, device page
    version: int = PLAN_VERSION
    page_bytes: int = 0  # of a page; 0: not known

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
    """A worker's report of a step, once its bytes have moved."""

    step_id: int
    completed: bool
    failed_pages: list[int] = field(default_factory=list)  # of the device
    failed_host_pages: list[int] = field(default_factory=list)  # that a swap-out did not fill
