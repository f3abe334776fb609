# SPDX-License-Identifier: Apache-2.0
"""Manages a copy of the checkout for building and running, and prebuilt libraries.

The libraries in the checkout are not changed, because they may have been built for another Python
or torch version.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu import machine

MANIFEST = "kvcache-libraries.json"
OPS = ("libkvcache_cpu.so", "libkvcache_cuda.so")
# Run by the build's Python interpreter, without importing the package.
_BUILT_WITH = """
import importlib.metadata, importlib.util, json, subprocess
spec = importlib.util.spec_from_file_location("_build", "kvcache/native/build.py")
build = importlib.util.module_from_spec(spec)
spec.loader.exec_module(build)
home, cuda = build.cuda_home(), None
if home:
    nvcc = [str(home / "bin" / "nvcc"), "--version"]
    cuda = subprocess.check_output(nvcc, text=True).splitlines()[-1]
facts = {"archs": build.cuda_archs() if home else [], "cuda": cuda}
print(json.dumps({**facts, "torch": importlib.metadata.version("torch")}))
"""
_PARTS = ("kvcache", "csrc", "benchmarks", "tests", "examples", "setup.py", "pyproject.toml")
_PARTS += ("packages", "tools", "conftest.py", "README.md", "LICENSE", "MANIFEST.in")


def make(folder: Path, repo: Path = machine.REPO) -> None:
    """Copy the files needed for building, testing and measuring, without built libraries."""
    leave = shutil.ignore_patterns("*.so", "__pycache__", "results", "build")
    for part in _PARTS:
        source = repo / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=leave)
        elif source.is_file():
            shutil.copy2(source, folder / part)


def carried(folder: Path, repo: Path = machine.REPO) -> list[Path]:
    """Return the libraries in a folder, after checking that they were built from these sources.

    Raises ValueError with the reason if they were built from other sources, or if one is missing.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        built_from = manifest["sources"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} has no readable {MANIFEST}: {error}") from error
    if built_from != machine.sources_digest(repo):
        raise ValueError(
            f"the libraries in {folder} were built from the sources {built_from}, of commit "
            f"{manifest.get('commit')}: expected {machine.sources_digest(repo)}"
        )
    missing = [name for name in OPS if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} has no {missing[0]}")
    return sorted(folder.glob("*.so"))


def built_with(folder: Path) -> str:
    """Return a description of how the libraries were built, from the manifest."""
    facts = json.loads((folder / MANIFEST).read_text())
    return ", ".join(f"{name} {facts.get(name)}" for name in ("archs", "cuda", "torch"))


def write_manifest(
    folder: Path,
    repo: Path = machine.REPO,
    python: Path | str = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Write a manifest of the sources and tools from which the libraries in the folder were built.

    `python`, `environment`: the interpreter and environment of the build. They determine torch, the
    toolkit and the architectures.
    """
    facts = {"commit": machine.commit(), "sources": machine.sources_digest(repo)}
    asked = subprocess.run(
        [str(python), "-c", _BUILT_WITH],
        cwd=repo,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    facts |= json.loads(asked.stdout) if asked.returncode == 0 else {}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=1) + "\n")


def main() -> int:
    """Builds libraries for use on another machine with an NVIDIA GPU (`make gpu-libraries`).

    All three libraries are compiled with the headers of this Python's packages (torch, pybind11),
    and only the core for the Python version of that machine, whose headers must be here.
    """
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, help="output folder for the libraries")
    parser.add_argument(
        "--python", default="3.12", metavar="VERSION", help="Python version there; default 3.12"
    )
    parser.add_argument(
        "--archs", default="90", help="architectures of the GPUs there; default 90 (H100, H200)"
    )
    args = parser.parse_args()
    folder = args.folder.resolve()
    try:
        build_for(folder, python_with_headers(args.python), args.archs)
    except (RuntimeError, OSError, shutil.Error) as error:
        print(f"make gpu-libraries: {error}", file=sys.stderr)
        return 1
    for path in carried(folder):
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def build_for(folder: Path, python: str, archs: str) -> None:
    """Build the libraries for a Python interpreter, and replace those in `folder` once all are built."""
    with tempfile.TemporaryDirectory(prefix="kvcache-libraries-") as temporary:
        tree = Path(temporary, "tree")
        make(tree)
        # Packages that the build only reads, such as torch's headers, are shared between versions.
        environment = {
            **os.environ,
            "PYTHONPATH": sysconfig.get_path("purelib"),
            "KVCACHE_CUDA": "1",
            "KVCACHE_CUDA_ARCHS": archs,
        }
        command = [python, "setup.py", "-q", "build_ext", "--inplace"]
        if subprocess.run(command, cwd=tree, env=environment).returncode != 0:
            raise RuntimeError("the build failed (its output is above); nothing was replaced")
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".libraries-", dir=folder.parent) as beside:
            new = Path(beside, "new")
            new.mkdir()
            for library in (tree / "kvcache").glob("*.so"):
                shutil.copy2(library, new)
            write_manifest(new, tree, environment=environment)
            if folder.exists():
                folder.rename(Path(beside, "old"))
            new.rename(folder)


def python_with_headers(version: str) -> str:
    """Return a Python interpreter of this version that has its headers, from the PATH or pyenv.

    Raises RuntimeError if there is none.
    """
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    beside = sorted(root.glob(f"versions/{version}.*/bin/python{version}"), reverse=True)
    found = [sys.executable, shutil.which(f"python{version}"), *map(str, beside)]
    ask = "import sys, sysconfig; print('%d.%d' % sys.version_info[:2], sysconfig.get_path('include'))"
    for program in filter(None, found):
        told = machine.output_of([program, "-c", ask]).split(" ", 1)
        if told[0] == version and Path(told[1], "Python.h").is_file():
            return program
    raise RuntimeError(
        f"no Python {version} with its headers (Python.h) on the PATH or in {root}: install one, or "
        "choose another version with --python"
    )


if __name__ == "__main__":
    sys.exit(main())
