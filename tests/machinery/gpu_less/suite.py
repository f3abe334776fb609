# SPDX-License-Identifier: Apache-2.0
"""Runs tests marked `gpu` but not `exhaustive`, followed by swaps in many stream orders.

Each job runs in its own process.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from tests.machinery import roots
from tests.machinery.gpu_less.build import TREE, Built

# Number of parts that the test files are split into; each part runs in its own process.
NUM_SHARES = 4
# Every file with tests marked gpu matches. Other files are slow to import, so they are skipped.
_MARKED = re.compile(r"mark\.gpu|tests\.backends")
SWAP_STEPS = 12  # steps per race and seed
PYTEST = [
    "python", "-m", "pytest", "-m", "gpu and not exhaustive", "-q", "--tb=short", "-p",
    "no:cacheprovider",
]  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A pytest process. `environment` holds additional variables."""

    name: str
    arguments: list[str]
    environment: dict[str, str]

    def command(self) -> str:
        """Return a command line that repeats this job."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        words = ["python3", "-m", "tests.machinery.gpu_less", "run", "--", *PYTEST, *self.arguments]
        return " ".join([*variables, shlex.join(words)])


def run_suite(built: Built, num_seeds: int) -> int:
    """Run every job and print its output. Return the exit status."""
    started = time.monotonic()
    swaps = sorted(
        str(path.relative_to(TREE))
        for path in roots.test_files(TREE)
        if path.name.startswith(("test_swap", "test_worker"))
    )
    files = sorted(
        str(path.relative_to(TREE))
        for path in roots.test_files(TREE)
        if _MARKED.search(path.read_text())
    )
    jobs = [
        Job(
            f"tests marked gpu, {share + 1} of {NUM_SHARES}",
            ["-rs", "--durations=5", *files[share::NUM_SHARES]],
            {"KVCACHE_GPULESS_SEED": "1"},
        )
        for share in range(NUM_SHARES)
    ]
    for seed in range(1, num_seeds + 1):
        environment = {
            "KVCACHE_GPULESS_SEED": str(seed),
            "KVCACHE_TEST_SWAP_STEPS": str(SWAP_STEPS),
        }
        jobs.append(Job(f"swaps, seed {seed}", swaps, environment))
    failed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        running = {pool.submit(_run, built, job): job for job in jobs}
        for future in as_completed(running):
            _print(running[future], future.result())
            if future.result().returncode != 0:
                failed.append(running[future])
    took = time.monotonic() - started
    print(f"gpu-less: {len(jobs)} processes, {len(failed)} failed, {took:.0f} s")
    for job in failed:
        print(f"gpu-less: again: {job.command()}")
    return 1 if failed else 0


def _run(built: Built, job: Job) -> subprocess.CompletedProcess:
    environment = {**built.environment(), **job.environment}
    environment["KVCACHE_EMUL_SEED"] = job.environment["KVCACHE_GPULESS_SEED"]
    # Two processes run at a time, and torch's operators are small here.
    environment.setdefault("OMP_NUM_THREADS", "1")
    return subprocess.run(
        [str(built.python), *PYTEST[1:], *job.arguments],
        cwd=TREE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _print(job: Job, done: subprocess.CompletedProcess) -> None:
    lines = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode == 0:
        shown = [x for x in lines if re.match(r"SKIPPED|.*s (call|setup) ", x)]
        print(f"== {job.name}: {lines[-1].strip('= ')}", *shown, sep="\n", flush=True)
    else:
        print(f"== {job.name}: FAILED (exit {done.returncode})", done.stdout, sep="\n", flush=True)
