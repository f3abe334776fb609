# SPDX-License-Identifier: Apache-2.0
"""Rehearses a run with small sizes on the CUDA runtime without a GPU."""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from pathlib import Path

from benchmarks.gpu import machine, workspace

UNAVAILABLE = 3  # exit code on machines that cannot run a rehearsal


def is_inside() -> bool:
    """Return whether this process runs on the CUDA runtime without a GPU."""
    return "KVCACHE_GPULESS_RUNTIME" in os.environ


def again_inside(args: argparse.Namespace, results: Path) -> int:
    """Run the command on the runtime without a GPU, in a copy of the checkout without built libraries.

    The run uses the libraries of the runtime's tests as prebuilt libraries. Returns the exit code.
    """
    from tests.machinery.gpu_less import build

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
    command += ["--lease", str(args.lease)]
    command += ["--total", str(args.total)] if args.total else []
    command += ["--only", *args.only] if args.only else []
    # The copy has no built libraries or caches, like a checkout on a new machine.
    with tempfile.TemporaryDirectory(prefix="kvcache-bare-") as folder:
        bare = Path(folder, "tree")
        workspace.make(bare, build.TREE)
        environment = built.environment(bare) | {"KVCACHE_JIT_DIR": str(Path(folder, "jit"))}
        environment["KVCACHE_COMMIT"] = machine.commit()
        return subprocess.run(command, cwd=bare, env=environment).returncode
