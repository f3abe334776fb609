"""A copy of the checkout to build and run in, and libraries that were built elsewhere.

The checkout's own libraries stay as they are: they may belong to another Python or another torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu import machine

MANIFEST = "kvcache-libraries.json"
OPS = ("libkvcache_cpu.so", "libkvcache_cuda.so")
_PARTS = ("kvcache", "csrc", "benchmarks", "tests", "examples", "setup.py", "pyproject.toml")
_PARTS += ("README.md", "LICENSE", "MANIFEST.in")


def make(folder: Path, repo: Path = machine.REPO) -> None:
    """Copies what building, testing and measuring need; no built libraries."""
    leave = shutil.ignore_patterns("*.so", "__pycache__", "results", "build")
    for part in _PARTS:
        source = repo / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=leave)
        elif source.is_file():
            shutil.copy2(source, folder / part)


def carried(folder: Path, repo: Path = machine.REPO) -> list[Path]:
    """The libraries in a folder, after checking that they were built from these sources.

    ValueError, which says what is wrong, where they were not, or where one is missing.
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


def write_manifest(folder: Path, repo: Path = machine.REPO) -> None:
    """Says in the folder which sources its libraries were built from."""
    facts = {"commit": machine.commit(repo), "sources": machine.sources_digest(repo)}
    (folder / MANIFEST).write_text(json.dumps(facts, indent=1) + "\n")


def main() -> int:
    """`python -m benchmarks.gpu.workspace FOLDER`: builds libraries to be carried to a machine."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path, help="where the libraries go")
    target = parser.parse_args().folder.resolve()
    tree = target / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    make(tree)
    build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    subprocess.run(build, cwd=tree, check=True)
    for library in (tree / "kvcache").glob("*.so"):
        shutil.copy2(library, target)
    shutil.rmtree(tree)
    write_manifest(target)
    print("\n".join(str(path) for path in carried(target)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
