# SPDX-License-Identifier: Apache-2.0
"""Interprets the operator cases, and mutants of the kernels without one barrier, wait or fence.

Each case runs in the orders "serial" and a seed, must give the CPU's bytes, and must not have data
races. Each mutant must be found by one of the cases. Prints the transactions of each kernel.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import shutil
import sys
import time
from collections import Counter, defaultdict

import torch

from kvcache.native import build
from tests.machinery.kernel_cases import CASES, size_of
from tests.machinery.ptx.machine import Trap
from tests.machinery.ptx.program import ORDERS, Kernel
from tests.machinery.ptx.run import Interpreter, compiled_kernels

# Instructions without which a kernel is equally correct, if the second instruction follows.
EQUIVALENT = {
    ("bar.warp", "barrier.cluster.arrive"): "barrier.cluster also waits for the warp",
    ("bar.sync", "barrier.cluster.arrive.release"): "barrier.cluster also orders the thread block",
}
# Kernels without a case: units that do not fit into shared memory, launches with more than 4 KiB of
# parameters, and checks of KVCACHE_CHECKED, which use atomics.
NOT_INTERPRETED = re.compile(r".*(rotate_kernel|copy_blocks_kernel<32760|first_bad_kernel)")
KERNELS: dict[str, Kernel] = {}


def interpret(name: str, order: str, kernels: dict[str, Kernel]) -> tuple[str, Interpreter]:
    """Return what is wrong with a case (or ""), and the interpreter."""
    wanted = CASES[name]("cpu", size_of(name))
    interpreter, wrong = Interpreter(kernels, order), ""
    try:
        with interpreter.active(name):
            found = CASES[name]("cpu", size_of(name))
        num = sum(int((a != b).sum()) for a, b in zip(found, wanted, strict=True))
        wrong = f"{num} elements differ" if num else ""
    except Trap as trap:
        wrong = str(trap)
    return min(interpreter.races, default=wrong), interpreter


def run_case(job: tuple[str, str]):
    started = time.process_time()
    wrong, interpreter = interpret(*job, KERNELS)
    text = f"{wrong or 'same bytes'} ({interpreter.steps:,} steps, "
    return job, wrong, text + f"{time.process_time() - started:.1f} s)", interpreter.transactions


def run_mutant(job: tuple[str, int, list[str], list[str]]):
    """Return whether the mutant is found or equivalent, and a description."""
    kernel, number, cases, orders = job
    mutant = KERNELS[kernel].without(number)
    name, following = (i.name for i in KERNELS[kernel].instructions[number : number + 2])
    text = f"{kernel} without {name} ({number}): "
    for order in orders:
        for case in cases:
            if wrong := interpret(case, order, KERNELS | {kernel: mutant})[0]:
                return "found", f"{text}found ({order}): {wrong}"
    for (first, second), reason in EQUIVALENT.items():
        if cases and name.startswith(first) and following.startswith(second):
            return "equivalent", f"{text}equivalent: {reason}"
    return "missed", f"{text}NOT FOUND by {len(cases)} cases"


def print_transactions(counts: dict[str, Counter]) -> None:
    columns = ("loads", "stores", "shared")
    print(f"\n{'transactions asked / needed':56}{'bytes':>12}", end="")
    print("".join(f"{name:>22}" for name in columns))
    for kernel in sorted(counts):
        print(f"{kernel:56}{counts[kernel]['bytes', 0]:>12,}", end="")
        for name in columns:
            asked, needed = counts[kernel][name, 0], counts[kernel][name, 1]
            print(f"{f'{asked:,}/{needed:,} {asked / needed:.2f}' if needed else '-':>22}", end="")
        print()
    print(flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machinery.ptx", description=__doc__)
    parser.add_argument("--seed", default="1", help="seed of the random order (default: 1)")
    options = parser.parse_args()
    for tool, found in (("nvcc", build.cuda_home()), ("c++filt", shutil.which("c++filt"))):
        if found is None:
            print(f"SKIPPED: interpreting PTX: no {tool} found")
            return 0
    torch.set_num_threads(1)
    KERNELS.update(compiled_kernels())
    orders, results = ["serial", options.seed], Counter()
    used: dict[str, list[str]] = defaultdict(list)
    counts: dict[str, Counter] = defaultdict(Counter)
    jobs = [(name, order) for name in CASES for order in orders]
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for (name, order), wrong, text, transactions in pool.imap(run_case, jobs):
            print(f"{name}, {order}: {text}", flush=True)
            results["wrong" if wrong else "right"] += 1
            for kernel, numbers in transactions.items() if order == "serial" else ():
                used[kernel].append(name)
                counts[kernel].update(numbers)
        print_transactions(counts)
        mutants = [
            (kernel, i.number, used[kernel], orders)
            for kernel, code in KERNELS.items()
            for i in code.instructions
            if ORDERS.match(i.name)
        ]
        for result, text in pool.imap(run_mutant, mutants):
            print(text, flush=True)
            results[result] += 1
    unused = sorted(set(KERNELS) - set(used))
    unnamed = [name for name in unused if not NOT_INTERPRETED.match(name)]
    print(f"not interpreted, because no case launches them: {', '.join(unused)}")
    if unnamed:
        print(f"NO CASE: {', '.join(unnamed)}")
    print(f"ptx: cases: {results['right']} right, {results['wrong']} wrong; mutants: ", end="")
    print(", ".join(f"{results[result]} {result}" for result in ("found", "equivalent", "missed")))
    return int(results["wrong"] + results["missed"] + len(unnamed) > 0)


if __name__ == "__main__":
    sys.exit(main())
