# SPDX-License-Identifier: Apache-2.0
"""Stage: compares bulk copies of the kernel between device and host with its usual copies.

First, the bytes are checked at a size at which each stage of the copies' pipeline is used more than
once, and memcheck checks their accesses.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.gpu import checks, say
from benchmarks.gpu.first_contact import check_cases
from benchmarks.gpu.op_cases import EXPERIMENTAL, MOST_COMPARED
from benchmarks.gpu.swaps import make_pools, report_sweep, sweep

_BYTES = 128 << 20
_MEMCHECK_S = 30.0


def main() -> int:
    num_good = check_cases(EXPERIMENTAL, MOST_COMPARED)
    say.learned(
        f"{num_good} of {len(EXPERIMENTAL)} cases of bulk copies gave the same bytes as on the CPU"
    )
    if num_good == len(EXPERIMENTAL):
        with say.attempt("thread blocks"):
            pools, stream, rows = make_pools(_BYTES), torch.cuda.Stream(), []
            for bulk in (False, True):
                rows += sweep(pools, stream, bulk)
            report_sweep(rows)
    with say.attempt("memcheck"):
        arguments = ("--size", str(MOST_COMPARED), "--only", *EXPERIMENTAL)
        limit_s = min(_MEMCHECK_S, say.seconds_left())
        checks.checked(checks.sanitizer_tool(), "memcheck", limit_s, arguments)
    return say.exit_code()


if __name__ == "__main__":
    say.ready()
    sys.exit(main())
