# SPDX-License-Identifier: Apache-2.0
"""Runs programs on the CUDA runtime without a GPU:

    python -m tests.machinery.gpu_less run -- python -m pytest -m gpu tests/worker/test_swap.py
    python -m tests.machinery.gpu_less test

A program runs in `build/gpu-less/tree`, an updated copy of the checkout whose package is built for
CUDA. `python` is the interpreter of the virtual environment with a CUDA build of torch.
Subprocesses run without a GPU too.
"""

from __future__ import annotations

import argparse
import os
import sys

from tests.machinery.gpu_less import build


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machinery.gpu_less", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a program")
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="-- program ...")
    commands.add_parser("build", help="only build the required components")
    test = commands.add_parser("test", help="run tests marked gpu, and swaps in many stream orders")
    test.add_argument("--seeds", type=int, default=20, help="number of stream orders (default: 20)")
    arguments = parser.parse_args()
    try:
        built = build.build()
    except build.Unavailable as missing:
        # Skipped tests exit with status 0. `run` exits with 2, because the requested program did
        # not run.
        print(f"SKIPPED: the CUDA runtime without a GPU: {missing}")
        return 2 if arguments.command == "run" else 0
    if arguments.command == "build":
        return 0
    if arguments.command == "test":
        from tests.machinery.gpu_less.suite import run_suite

        return run_suite(built, arguments.seeds)
    program = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not program:
        parser.error("run: no program given")
    sys.stdout.flush()
    os.chdir(build.TREE)
    environment = built.environment()
    os.environ["PATH"] = environment["PATH"]
    os.execvpe(program[0], program, environment)


if __name__ == "__main__":
    sys.exit(main())
