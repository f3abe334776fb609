# SPDX-License-Identifier: Apache-2.0
"""The source folders of the kernel and of the packages, for checks that read every file.

A check that walks `kvcache/` alone would miss the packages in `packages/` without a message.
"""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

KERNEL = REPO / "kvcache"
PACKAGES = sorted(path.parent for path in REPO.glob("packages/*/pyproject.toml"))
# The importable folders: kvcache, kvcache_exchange, ...
SOURCES = [KERNEL, *(p.parent for p in sorted(REPO.glob("packages/*/src/kvcache_*/__init__.py")))]
TESTS = [REPO / "tests", *sorted(REPO.glob("packages/*/tests/kvcache_*_tests"))]


def files(suffix: str, roots: list[Path] = SOURCES) -> list[Path]:
    """Return all files of these folders with a suffix, for example ".py"."""
    found = [path for root in roots for path in sorted(root.rglob(f"*{suffix}"))]
    return [path for path in found if KERNEL / "csrc" not in path.parents]


def module_name(path: Path) -> str:
    """Return the name under which a source file is imported."""
    root = next(root for root in [*SOURCES, *TESTS] if path.is_relative_to(root))
    parts = path.relative_to(root.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_files(tree: Path = REPO) -> list[Path]:
    """Return the test files of the kernel and of the packages in a checkout, or in a copy of one."""
    folders = [tree / root.relative_to(REPO) for root in TESTS]
    return [path for folder in folders for path in sorted(folder.rglob("test_*.py"))]


def python_path(tree: Path = REPO) -> str:
    """Return the value of PYTHONPATH with which a checkout, or a copy of one, is used uninstalled."""
    folders = [tree, *(tree / root.parent.relative_to(REPO) for root in [*SOURCES[1:], *TESTS[1:]])]
    return os.pathsep.join(map(str, folders))
