# SPDX-License-Identifier: Apache-2.0
"""A build compiles only what has changed, and continues after an interrupt."""

import os
import signal
import subprocess
import sys
import time

import pytest

from kvcache.native import build, compiler
from tests.machinery.shared import REPO

NAMES = [f"{letter}.cpp" for letter in "abcde"]  # compiled as two units: a, c, e and b, d


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "g++ -O0")
    folder = tmp_path / "csrc" / "core"
    folder.mkdir(parents=True)
    (folder / "shared.h").write_text("inline int shared() { return 1; }\n")
    for name in NAMES:
        include = '#include "core/shared.h"\n' if name == "b.cpp" else ""
        (folder / name).write_text(f"{include}int {name[0]}() {{ return 1; }}\n")
    old = time.time() - 10  # a file that is edited during a build is compiled again
    for path in folder.iterdir():
        os.utime(path, (old, old))
    return folder.parent


def built(root):
    """Build the library, and return its progress: the subject of each step, without its number."""
    lines = []
    sources = [root / "core" / name for name in NAMES]
    progress = compiler.BuildProgress(len(compiler.units(sources)) + 1, lines.append)
    folder = root.parent / "objects"
    compiler.build_library("_core", sources, root, folder, root.parent / "out.so", progress)
    assert sorted(line.partition(" ")[0] for line in lines) == ["[1/3]", "[2/3]", "[3/3]"]
    return {line.partition(" ")[2] for line in lines}


FIRST, SECOND, LINK = "csrc/core: a.cpp c.cpp e.cpp", "csrc/core: b.cpp d.cpp", "link out.so"


def test_only_what_has_changed_is_compiled_again(root, monkeypatch):
    assert built(root) == {FIRST, SECOND, LINK}
    assert built(root) == {f"{FIRST} (unchanged)", f"{SECOND} (unchanged)", LINK}
    old = os.stat(root / "core" / "shared.h").st_mtime
    (root / "core" / "shared.h").write_text("inline int shared() { return 2; }\n")
    os.utime(root / "core" / "shared.h", (old, old))
    assert built(root) == {f"{FIRST} (unchanged)", SECOND, LINK}
    (root.parent / "objects" / "core_a.o").unlink()
    assert built(root) == {FIRST, f"{SECOND} (unchanged)", LINK}
    monkeypatch.setenv("CXX", "g++ -O1")
    assert built(root) == {FIRST, SECOND, LINK}
    monkeypatch.setattr(compiler, "_version", lambda *_: "another version")
    assert built(root) == {FIRST, SECOND, LINK}


def test_what_was_compiled_before_a_failure_is_kept(root):
    text = (root / "core" / "d.cpp").read_text()
    (root / "core" / "d.cpp").write_text("this is not C++\n")
    with pytest.raises(RuntimeError, match=r"d.cpp:1:1: error: "):
        built(root)
    (root / "core" / "d.cpp").write_text(text)
    assert built(root) == {f"{FIRST} (unchanged)", SECOND, LINK}


def test_file_that_is_edited_during_a_build_is_compiled_again(root):
    soon = time.time() + 10
    os.utime(root / "core" / "b.cpp", (soon, soon))
    built(root)
    assert built(root) == {f"{FIRST} (unchanged)", SECOND, LINK}


@pytest.mark.parametrize("target", ["unit.o:", "unit.o :"])  # written by g++ and by nvcc
def test_rules_of_compilers_are_read(target):
    rule = f"{target} a.cpp \\\n  my\\ folder/b.h\n"
    assert compiler._dependencies(rule) == ["a.cpp", "my folder/b.h"]


# Compiles one unit, then stops until it is interrupted.
COMPILER = """#!/bin/sh
for word in "$@"; do
  case "$before" in -o) out=$word ;; -MF) dependencies=$word ;; esac
  before=$word
done
[ -n "$out" ] || { echo version; exit; }
mkdir "$0.used" 2>/dev/null || exec sleep 60
echo "$out:" >"$dependencies"
: >"$out"
"""
# A shell that starts the tests in the background makes them ignore SIGINT.
JIT = """
import signal
from kvcache.native import jit
signal.signal(signal.SIGINT, signal.default_int_handler)
jit.build_core()
"""


@pytest.mark.slow
def test_interrupted_build_at_first_use_continues(tmp_path):
    (tmp_path / "g++").write_text(COMPILER)
    (tmp_path / "g++").chmod(0o755)
    environment = {**os.environ, "CXX": str(tmp_path / "g++"), "KVCACHE_JIT_DIR": str(tmp_path)}

    def interrupted(num_steps):
        """Interrupt the build after this number of steps. Return what it printed."""
        process = subprocess.Popen(
            [sys.executable, "-c", JIT],
            cwd=REPO,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        lines = [process.stderr.readline() for _ in range(1 + num_steps)]
        os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C in a terminal
        lines += process.communicate()[1].splitlines()
        assert process.returncode != 0
        return "\n".join(lines)

    says = interrupted(1)
    assert "kvcache: no built _core found, building it in" in says
    assert "kvcache: [1/" in says and "(unchanged)" not in says
    assert "kvcache: interrupted: the next use continues the build" in says
    (unit,) = (line for line in says.splitlines() if "[1/" in line)
    assert f"{unit} (unchanged)" in interrupted(1)


@pytest.mark.parametrize(
    ("runtime", "in_toolkit"), [("lib64/libcudart.so", True), ("lib/libcudart.so.13", False)]
)
def test_cuda_library_is_linked_with_the_toolkits_runtime(
    monkeypatch, tmp_path, runtime, in_toolkit
):
    toolkit = tmp_path / "toolkit"
    (toolkit / runtime).parent.mkdir(parents=True)
    (toolkit / runtime).touch()
    monkeypatch.setattr(build, "cuda_home", lambda: toolkit)
    out, scratch = tmp_path / "libkvcache_cuda.so", tmp_path / "scratch"
    command = compiler._link_command("libkvcache_cuda", [], out, scratch)
    folder = command[command.index("-lcudart") - 1].removeprefix("-L")
    assert folder == str(toolkit / "lib64" if in_toolkit else scratch)
    assert os.path.exists(f"{folder}/libcudart.so")
