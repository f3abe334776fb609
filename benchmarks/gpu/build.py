# SPDX-License-Identifier: Apache-2.0
"""Stage: loads native libraries that are prebuilt or built for this device's architecture."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from benchmarks.gpu import process, say, workspace

CORE = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
# A library without code for this device can be loaded, but its kernels cannot. Therefore, the
# kernels are loaded as well.
_LOAD = """
import json, kvcache.ops
from kvcache.native import load
why = load.why_no_cuda()
if why:
    raise SystemExit(" ".join(why.split()))
kvcache.ops.warm_up()
print(json.dumps(load.describe()))
"""


def main() -> int:
    import torch

    given = os.environ.get("KVCACHE_LIBRARIES")
    arch = "{}{}".format(*torch.cuda.get_device_capability())
    return provide(Path.cwd() / "kvcache", Path(given) if given else None, arch)


def provide(package: Path, given: Path | None, arch: str) -> int:
    """Copy the libraries in `given` to `package`, or build them. Return the exit code."""
    here = copied(given, package) if given else set()
    problem = None
    if here:
        # The usual reason for a missing library is that the core was built for another Python
        # version.
        if not here >= {CORE, *workspace.OPS}:
            timed_build("libkvcache_cuda.so" not in here, arch, here)
        problem = loading_problem()
        if problem:
            say.failed(f"the carried libraries do not load, so they are built here: {problem}")
            for library in package.glob("*.so"):
                library.unlink()
            here = set()
    if not here:
        timed_build(True, arch, here)
        problem = loading_problem()
    if problem:
        print(f"the libraries do not load: {problem}")
        return 1
    say.row(libraries=sorted(path.name for path in package.glob("*.so")))
    return say.exit_code()  # also 1 if the build has resolved an earlier failure


def copied(given: Path, package: Path) -> set[str]:
    """Copy prebuilt libraries into the package and return their names.

    If they were built from other sources, report a failure and return an empty set.
    """
    here = set()
    with say.attempt("carried libraries"):
        for library in workspace.carried(given):
            shutil.copy2(library, package)
            here.add(library.name)
        say.learned(f"carried: {', '.join(sorted(here))}; {workspace.built_with(given)}")
    return here


def loading_problem() -> str | None:
    """Load the libraries and kernels in a separate process. Return the error, or None."""
    with say.timed("loading"):
        loaded = subprocess.run([sys.executable, "-c", _LOAD], capture_output=True, text=True)
    print(loaded.stdout + loaded.stderr)
    if loaded.returncode == 0:
        return None
    why = (loaded.stdout + loaded.stderr).strip().splitlines()
    return why[-1] if why else process.Ended(loaded.returncode, False, 0).status


def timed_build(with_cuda: bool, arch: str, here: set[str]) -> None:
    """Build the missing libraries, and report the build time."""
    start = time.monotonic()
    with say.timed("building"):
        build(with_cuda, arch)
    seconds = time.monotonic() - start
    say.row(built_for=arch, seconds=seconds, carried=sorted(here))
    say.learned(f"built for sm_{arch} in {seconds:.1f} s")


def build(with_cuda: bool, arch: str) -> None:
    """Build into the workspace's package. Prebuilt libraries are replaced only by identical ones."""
    environment = {**os.environ, "KVCACHE_CUDA": str(int(with_cuda)), "KVCACHE_CUDA_ARCHS": arch}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--parallel", "3"]
    subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
