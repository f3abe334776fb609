# SPDX-License-Identifier: Apache-2.0
"""Stage: runs each op once on the GPU, compares it with the CPU op, and checks pinned host memory.

The sanitizer stage uses this as its smoke test, and the counters stage runs larger single cases.
"""

from __future__ import annotations

import argparse
import sys

import torch

from benchmarks.gpu import say
from benchmarks.gpu.op_cases import CASES, Case, size_for
from kvcache.worker.pages.pages import Pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[""], help="run only cases with one of these in their name"
    )
    parser.add_argument(
        "--bytes",
        type=int,
        default=0,
        help="bytes that a case should read and write; default: the minimum",
    )
    parser.add_argument("--no-compare", action="store_true", help="run the cases only on the GPU")
    args = parser.parse_args()
    chosen = {n: case for n, case in CASES.items() if any(part in n for part in args.only)}
    num_good = 0
    for name, case in chosen.items():
        with say.attempt(name):
            if args.no_compare:
                case("cuda", size_for(name, args.bytes))
                torch.cuda.synchronize()
            else:
                compare(case)
            say.row(op=name, same=True)
            num_good += 1
    if args.only == [""]:
        with say.attempt("host.is_pinned"):
            check_pinned()
            say.learned("torch recognizes the host memory as pinned")
    what = "ran" if args.no_compare else "gave the same bytes as on the CPU"
    say.learned(f"{num_good} of {len(chosen)} op cases {what}")
    return say.exit_code()


def compare(case: Case) -> None:
    """Raise AssertionError with the first differing byte if the results of both devices differ."""
    for number, (found, wanted) in enumerate(zip(case("cuda", 1), case("cpu", 1), strict=True)):
        if not torch.equal(found, wanted):
            differing = (found != wanted).flatten().nonzero().flatten()
            at = int(differing[0])
            raise AssertionError(
                f"result {number}: {len(differing):,} of {found.numel():,} elements differ, the first "
                f"at {at}: {found.flatten()[at]}, expected {wanted.flatten()[at]}"
            )


def check_pinned() -> None:
    """Raise AssertionError unless all bytes of the host pages are pinned."""
    pages = Pages.allocate(9, [[4096, 4096]] * 2, device="cuda")
    host = pages.on_host(1000)
    assert host.is_pinned, "torch does not recognize the memory of Pages.on_host as pinned"
    last = host.memory[-1:]
    assert last.is_pinned(), "the last byte of the host pages is not pinned"


if __name__ == "__main__":
    sys.exit(main())
