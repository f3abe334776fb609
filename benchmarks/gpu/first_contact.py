# SPDX-License-Identifier: Apache-2.0
"""Stage: runs each op once on the GPU, compares it with the CPU op, and checks pinned host memory.
The checks stage uses this as its smoke test.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from benchmarks.gpu import say
from benchmarks.gpu.op_cases import CASES, Case
from kvcache.worker.pages.pages import Pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", help="run only cases with one of these in their name")
    parser.add_argument("--no-compare", action="store_true", help="run the cases only on the GPU")
    args = parser.parse_args()
    parts = args.only or [""]
    chosen = [name for name in CASES if any(part in name for part in parts)]
    if args.no_compare:
        for name in chosen:
            with say.attempt(name):
                CASES[name]("cuda", 1)
                torch.cuda.synchronize()
        say.learned(f"ran {len(chosen)} op cases")
        return say.exit_code()
    num_good = check_cases(chosen)
    if args.only is None:
        with say.attempt("host.is_pinned"):
            check_pinned()
            say.learned("torch recognizes the host memory as pinned")
    say.learned(f"{num_good} of {len(chosen)} op cases gave the same bytes as on the CPU")
    return say.exit_code()


def check_cases(names: Sequence[str]) -> int:
    """Compare these cases on both devices, report each, and return the number of equal results."""
    num_good = 0
    for name in names:
        with say.attempt(name):
            compare(CASES[name])
            say.row(op=name, same=True)
            num_good += 1
    return num_good


def compare(case: Case) -> None:
    """Raise AssertionError with the first differing byte if the results of both devices differ."""
    results = zip(case("cuda", 1), case("cpu", 1), strict=True)
    for number, (found, wanted) in enumerate(results):
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
    say.ready()
    sys.exit(main())
