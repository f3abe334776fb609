# SPDX-License-Identifier: Apache-2.0
"""Compiles every CUDA source with nvcc for every architecture. Requires no GPU.

Warnings are errors, and so are register spills. Exit codes: 0 if everything compiles, 1 if not, 3 if
nvcc is not found.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvcache.native import build

NO_NVCC = 3


def main() -> int:
    home = build.cuda_home()
    if home is None:
        print("cuda-check: no nvcc found, nothing compiled", file=sys.stderr)
        return NO_NVCC
    sources = build.cuda_sources(build.source_root())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda source: compile_one(home, source), sources))
    for source, result in zip(sources, results, strict=True):
        print(f"{source.name}: {'ok' if result.returncode == 0 else 'FAILED'}")
        sys.stderr.write(result.stderr)
    return int(any(result.returncode for result in results))


def compile_one(home: Path, source: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(home / "bin" / "nvcc"),
        *build.NVCC_FLAGS,
        *build.gencode_flags(),
        "-Werror=all-warnings",
        "-Xptxas=--warn-on-spills,--warning-as-error",
        f"-D{build.TORCH_TARGET}",
        "-isystem",
        str(build.torch_dir() / "include"),
        f"-I{build.source_root()}",
        *("-c", str(source), "-o", os.devnull),
    ]
    return subprocess.run(command, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
