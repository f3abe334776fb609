"""The build at first use: a copy of the package without built libraries."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.shared import REPO

USE = """
import kvcache, numpy as np
from kvcache import _native
assert kvcache.hash_blocks(range(32), 16).shape == (2, 32)
import torch
table = kvcache.BlockTable(16, 4, 8, 64, False, "cpu", 16)
table.add_row([7, 9], 0)
table.compute_slot_mapping(np.array([0, 0]), np.array([3, 17]))
assert table.slot_mapping.np[:3].tolist() == [115, 145, -1]
assert all(how.startswith("JIT") for how in _native.describe().values()), _native.describe()
print("works")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Package and sources as in a checkout that was never built."""
    folder = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("*.so", "__pycache__", "csrc")
    shutil.copytree(REPO / "kvcache", folder / "kvcache", ignore=skip)
    shutil.copytree(REPO / "csrc", folder / "csrc")
    return folder


def run(checkout, program, **environment):
    env = {**os.environ, "KVCACHE_JIT_DIR": str(checkout / "jit"), **environment}
    env["PYTHONPATH"] = str(checkout)
    return subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, cwd=checkout
    )


def test_builds_at_first_use_says_so_and_loads_at_once_afterwards(checkout):
    both = [
        subprocess.Popen(
            [sys.executable, "-c", USE],
            env={
                **os.environ,
                "KVCACHE_JIT_DIR": str(checkout / "jit"),
                "PYTHONPATH": str(checkout),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=checkout,
        )
        for _ in range(2)  # at the same time: one builds, the other waits for it
    ]
    answers = [process.communicate() for process in both]
    assert [out for out, _ in answers] == ["works\n"] * 2, answers
    said = answers[0][1] + answers[1][1]
    for name in ("_core", "libkvcache_cpu"):
        assert said.count(f"no built {name} found, building it in") == 1
    again = run(checkout, USE)
    assert again.stdout == "works\n" and "building" not in again.stderr


def without(tmp_path, *tools):
    """A PATH on which everything but these tools is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        if not os.path.isdir(place):
            continue
        for name in os.listdir(place):
            if name not in tools and not (folder / name).exists():
                (folder / name).symlink_to(os.path.join(place, name))
    return str(folder)


def test_a_missing_compiler_is_named(checkout, tmp_path):
    path = without(tmp_path, "g++", "clang++", "c++")
    done = run(checkout, "import kvcache.allocator", PATH=path, KVCACHE_JIT_DIR=str(tmp_path / "j"))
    assert done.returncode != 0
    assert "no C++ compiler (g++ or clang++ is not on the PATH): install one" in done.stderr
    assert "apt-get install g++" in done.stderr


def test_a_missing_ninja_is_named(checkout, tmp_path):
    program = "import sys; sys.executable = '/nowhere/python'; import kvcache.ops"
    path = without(tmp_path, "ninja")
    done = run(checkout, program, PATH=path, KVCACHE_JIT_DIR=str(tmp_path / "j"))
    assert done.returncode != 0
    assert "ninja is missing" in done.stderr and "pip install ninja" in done.stderr


def test_a_folder_that_cannot_be_written_is_named(checkout, tmp_path):
    (tmp_path / "file").touch()
    done = run(checkout, "import kvcache.allocator", KVCACHE_JIT_DIR=str(tmp_path / "file"))
    assert "set KVCACHE_JIT_DIR" in done.stderr


def test_an_error_of_the_compiler_is_shown(checkout, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkout / "kvcache", broken / "kvcache")
    shutil.copytree(checkout / "csrc", broken / "csrc")
    (broken / "csrc" / "core" / "broken.cpp").write_text("this is not C++\n")
    done = run(broken, "import kvcache.allocator", KVCACHE_JIT_DIR=str(tmp_path / "j"))
    assert "building kvcache._core failed" in done.stderr and "broken.cpp" in done.stderr
