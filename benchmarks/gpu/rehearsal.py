"""A rehearsal: the same run on the CUDA runtime without a GPU, with small sizes."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.gpu import machine, workspace

UNAVAILABLE = 3  # the exit code where this machine cannot rehearse


def is_inside() -> bool:
    """Whether this process runs on that runtime."""
    return "KVCACHE_GPULESS_RUNTIME" in os.environ


def again_inside(args: argparse.Namespace, results: Path) -> int:
    """Runs the command on the runtime, in a copy of the checkout without built libraries, and carries
    those that the runtime's tests use; the exit code."""
    from tests.gpu_less import build

    try:
        built = build.build()
    except build.Unavailable as missing:
        print(f"SKIPPED: the rehearsal needs the CUDA runtime without a GPU: {missing}")
        return UNAVAILABLE
    libraries = args.libraries
    if libraries is None:
        libraries = build.TREE / "kvcache"
        workspace.write_manifest(libraries, build.TREE, built.python, built.environment())
    command = [str(built.python), "-m", "benchmarks.gpu", "--rehearse", "--results", str(results)]
    command += ["--libraries", str(libraries.resolve())]
    command += ["--only", *args.only] if args.only else []
    # As on a fresh machine: a checkout without built libraries, and no cache of any.
    with tempfile.TemporaryDirectory(prefix="kvcache-bare-") as folder:
        bare = Path(folder, "tree")
        workspace.make(bare, build.TREE)
        environment = built.environment(bare) | {"KVCACHE_JIT_DIR": str(Path(folder, "jit"))}
        environment["KVCACHE_COMMIT"] = machine.commit()
        return subprocess.run(command, cwd=bare, env=environment).returncode
