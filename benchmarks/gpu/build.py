"""Stage: the native libraries, carried here or built for this device's architecture, and loaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from benchmarks.gpu import say, workspace

CORE = f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
_DESCRIBE = """
import json, kvcache.ops
from kvcache import _native
print(json.dumps(_native.describe()))
"""


def main() -> int:
    import torch

    package = Path.cwd() / "kvcache"
    given = os.environ.get("KVCACHE_LIBRARIES")
    here = set()
    if given:
        with say.attempt("carried libraries"):
            for library in workspace.carried(Path(given)):
                shutil.copy2(library, package)
                here.add(library.name)
            say.learned(f"carried: {', '.join(sorted(here))}")
    arch = "{}{}".format(*torch.cuda.get_device_capability())
    if not here >= {CORE, *workspace.OPS}:
        start = time.monotonic()
        build(with_cuda="libkvcache_cuda.so" not in here, arch=arch)
        seconds = time.monotonic() - start
        say.row(built_for=arch, seconds=seconds, carried=sorted(here))
        say.learned(f"built for sm_{arch} in {seconds:.1f} s")
    loaded = subprocess.run([sys.executable, "-c", _DESCRIBE], capture_output=True, text=True)
    print(loaded.stdout + loaded.stderr)
    if loaded.returncode != 0 or "not loadable" in loaded.stdout or "not built" in loaded.stdout:
        why = (loaded.stdout + loaded.stderr).strip().splitlines()
        print(f"the libraries do not load: {why[-1] if why else loaded.returncode}")
        return 1  # even where a failure before was made good by the build
    say.row(libraries=sorted(path.name for path in package.glob("*.so")))
    return say.exit_code()


def build(with_cuda: bool, arch: str) -> None:
    """Builds into the workspace's package; what was carried is not overwritten but by the same."""
    environment = {**os.environ, "KVCACHE_CUDA": str(int(with_cuda)), "KVCACHE_CUDA_ARCHS": arch}
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "--parallel", "3"]
    subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    sys.exit(main())
