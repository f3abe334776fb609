# SPDX-License-Identifier: Apache-2.0
"""Counts the device work of a code block (kernels and copies)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType

from tests.machinery.gpu_less import counts

_COPY, _FILL = "Memcpy", "Memset"  # name prefixes of CUPTI's records; all other records are kernels
# Counters of the runtime without a GPU. They count device work and operations that are slow on a
# GPU.
_COUNTED = ("launches", "copies", "batches", "fills", "pageable_copies", "legacy_work")


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Count the device work that all threads submit in the block. The dict is filled at the end.

    On a GPU, torch's profiler counts `launches`, `copies`, `fills` and `pageable_copies`. Without
    CUPTI, the profiler has no device records and counts nothing. The runtime without a GPU also
    counts `batches` of copies, and `legacy_work`, the work on the legacy stream, for which all
    other streams wait.
    """
    found: dict[str, int] = {}
    if counts.is_available():
        with counts.counted() as totals:
            yield found
        found.update({name: totals[name] for name in _COUNTED})
        return
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        yield found
        torch.cuda.synchronize()
    events = (each for each in profiler.events() if each.device_type == DeviceType.CUDA)
    found.update(of_records(each.name for each in events))


def of_records(names: Iterable[str]) -> dict[str, int]:
    """Return the counts of the profiler's device records by name; empty without records."""
    found: dict[str, int] = {}
    for name in names:
        found = found or dict.fromkeys(("launches", "copies", "fills", "pageable_copies"), 0)
        kind = {_COPY: "copies", _FILL: "fills"}.get(name.split(" ")[0], "launches")
        found[kind] += 1
        found["pageable_copies"] += kind == "copies" and "Pageable" in name
    return found
