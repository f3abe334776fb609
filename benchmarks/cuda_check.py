"""Compiles every CUDA source for sm_80, sm_90 and sm_100 with nvcc; needs no GPU.

Exit code 0 when all compile, 1 when one does not, 3 when there is no nvcc.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvcache import _build

NO_NVCC = 3


def main() -> int:
    home = _build.cuda_home()
    if home is None:
        print("cuda-check: no nvcc found, nothing compiled", file=sys.stderr)
        return NO_NVCC
    root = _build.source_root()
    sources = _build.cuda_sources(root)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        results = list(pool.map(lambda source: compile_one(home, root, source, folder), sources))
    for source, result in zip(sources, results, strict=True):
        print(f"{source.name}: {'ok' if result.returncode == 0 else 'FAILED'}")
        sys.stderr.write(result.stderr)
    return int(any(result.returncode for result in results))


def compile_one(home: Path, root: Path, source: Path, folder: str) -> subprocess.CompletedProcess:
    command = [
        str(home / "bin" / "nvcc"),
        *_build.NVCC_FLAGS,
        *_build.gencode_flags(),
        "-Werror=all-warnings",
        f"-D{_build.TORCH_TARGET}",
        "-isystem",
        str(_build.torch_dir() / "include"),
        f"-I{root}",
        "-c",
        str(source),
        "-o",
        str(Path(folder) / f"{source.stem}.o"),
    ]
    return subprocess.run(command, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
