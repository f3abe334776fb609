# SPDX-License-Identifier: Apache-2.0
"""Installs wheels into fresh virtual environments, and tests them there (`make test-wheel`).

    python -m tests.machinery.wheel_check [--torch VERSION ...] [--python PROGRAM ...] [WHEEL ...]

By default, all wheels of torch-kvcache in dist/ are tested with torch 2.13.0. The wheels of the
packages are taken from the same folder. `tests.machinery.wheel_user` runs in each environment
without a compiler on the PATH. With `--torch none`, only the wheel and kvcache-lab are installed,
without torch, and only the control plane is used. $PIP_TORCH_ARGS is passed to pip when torch is
installed. The results are printed, a line per wheel. The exit code is 1 if a wheel fails or if no
installed Python matches a wheel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from tests.machinery.shared import REPO

USER = REPO / "tests" / "machinery" / "wheel_user.py"
TORCH = "2.13.0"
COLUMNS = ("wheel", "MB", "CUDA", "python", "torch", "ops", "served", "result")
CUDA = "kvcache/libkvcache_cuda.so"


class Failed(Exception):
    """Raised if a wheel cannot be installed or used. The message states the reason in one line."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=[TORCH], metavar="VERSION")
    parser.add_argument("--python", nargs="+", default=[], metavar="PROGRAM")
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    options = parser.parse_args(argv)
    wheels = options.wheels or sorted((REPO / "dist").glob("torch_kvcache-*.whl"))
    if not wheels:
        print("FAILED: there is no wheel in dist/: `make wheel` builds one")
        return 1
    rows = [check(w.resolve(), t, options.python) for w in wheels for t in options.torch]
    for row in rows:
        print("  ".join(f"{name}: {row[name]}" for name in COLUMNS if name in row))
    return int(any(row["result"] != "passed" for row in rows))


def check(wheel: Path, torch: str, pythons: Sequence[str]) -> dict[str, str]:
    """Test a wheel with this version of torch, and return its row of results."""
    with zipfile.ZipFile(wheel) as archive:
        has_cuda = CUDA in archive.namelist()
    row = {"wheel": wheel.name, "MB": f"{wheel.stat().st_size / 1e6:.1f}", "torch": torch}
    row["CUDA"] = "yes" if has_cuda else "no"
    try:
        used = use(wheel, torch, python_of(wheel, pythons))
    except Failed as failure:
        return row | {"result": f"FAILED: {failure}"}
    return row | used | {"result": "passed"}


def python_of(wheel: Path, pythons: Sequence[str] = ()) -> str:
    """Return a Python for which the wheel was built, from `pythons`, pyenv or the PATH.

    Raises Failed if there is none.
    """
    tag = wheel.name.split("-")[2]
    version = f"{tag[2]}.{tag[3:]}"  # cp311
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    found = sorted(root.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    on_path = filter(None, [shutil.which(f"python{version}")])
    for program in [*pythons, sys.executable, *map(str, found), *on_path]:
        ask = [program, "-c", "import sys; print('cp%d%d' % sys.version_info[:2])"]
        done = subprocess.run(ask, capture_output=True, text=True)
        if done.stdout.strip() == tag:
            return program
    raise Failed(f"there is no Python {version}: expected one from pyenv or on the PATH")


def use(wheel: Path, torch: str, python: str) -> dict[str, str]:
    """Install the wheel into a new environment, and return the output of `wheel_user`.

    Raises Failed if a step fails.
    """
    with tempfile.TemporaryDirectory(prefix="kvcache-wheel-") as folder:
        bin_folder = Path(folder) / "bin"
        bare = {**os.environ, "PATH": str(bin_folder)}
        for name in ("PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME", "CXX", "KVCACHE_JIT"):
            bare.pop(name, None)

        def call(*command: str, **options: str) -> str:
            environment = os.environ if command[0] == python else bare
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, **options
            )
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise Failed(f"{' '.join(command[1:4])} ...: {last}")
            return done.stdout

        def pip(*arguments: str) -> None:
            call(str(bin_folder / "python"), "-m", "pip", "install", "--quiet", *arguments)

        call(python, "-m", "venv", folder)
        if torch == "none":
            pip("--only-binary", ":all:", "numpy")
            lab = [wheel.parent.glob(f"kvcache_{name}-*.whl") for name in ("exchange", "lab")]
            pip("--no-deps", str(wheel), *map(str, itertools.chain(*lab)))
        else:
            arguments = shlex.split(os.environ.get("PIP_TORCH_ARGS", ""))
            pip("--only-binary", ":all:", *arguments, f"torch=={torch}")
            beside = ("--find-links", str(wheel.parent))
            pip("--only-binary", ":all:", *beside, f"{wheel}[serve,lab]")
        return json.loads(call(str(bin_folder / "python"), "-I", str(USER)))


if __name__ == "__main__":
    sys.exit(main())
