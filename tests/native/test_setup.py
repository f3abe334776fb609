# SPDX-License-Identifier: Apache-2.0
"""A build that cannot succeed ends with a one-line message that says what to do."""

import importlib.machinery
import subprocess
import sys

import pytest

from tests.machinery.shared import REPO

# Runs setup.py after a statement that makes a requirement appear to be missing.
PROGRAM = """
import importlib.util, os, runpy, sys
{without}
sys.argv = ["setup.py", *{command!r}]
runpy.run_path("setup.py", run_name="__main__")
"""
NO_TORCH = """
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
"""
NO_LIBRARIES = "os.environ.pop('KVCACHE_CUDA', None); os.environ['KVCACHE_PREBUILT'] = 'x'"
OLD_TORCH = "import importlib.metadata; importlib.metadata.version = lambda name: '2.9.1+cpu'"


def setup(without, *command):
    program = PROGRAM.format(without=without, command=command)
    return subprocess.run([sys.executable, "-c", program], cwd=REPO, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize(("without", "says"), [
    ("sys.version_info = (3, 9, 18)", "expected 3.10 or newer; create a virtual environment"),
    (NO_TORCH, "the build does not find torch: `pip install 'torch>=2.10' "),
    (OLD_TORCH, "torch is 2.9.1+cpu: expected 2.10 or newer; `pip install -U torch`"),
    ("os.environ |= {'PATH': '/none', 'CXX': ''}", "no C++ compiler (g++ or clang++ is not on"),
    ("os.environ['KVCACHE_CUDA'] = 'yes'", "KVCACHE_CUDA is 'yes': expected 0 or 1"),
    (NO_LIBRARIES, "KVCACHE_PREBUILT is 'x': expected a folder with"),
], ids=["Python", "no torch", "torch", "compiler", "KVCACHE_CUDA", "KVCACHE_PREBUILT"])  # fmt: skip
def test_missing_requirement_is_reported_in_one_line(without, says):
    done = setup(without, "dist_info", "--help")
    assert done.returncode == 1
    assert done.stderr.startswith("kvcache: ") and done.stderr.count("\n") == 1
    assert says in done.stderr and done.stdout == ""


@pytest.mark.slow
def test_prebuilt_libraries_are_copied(tmp_path):
    suffix = importlib.machinery.EXTENSION_SUFFIXES[0]
    names = [f"_core{suffix}", "libkvcache_cpu.so", "libkvcache_cuda.so"]
    (tmp_path / "from").mkdir()
    for name in names:
        (tmp_path / "from" / name).write_text(name)
    without = f"os.environ |= {{'KVCACHE_PREBUILT': {str(tmp_path / 'from')!r}, 'CXX': 'false'}}"
    to = ("--build-lib", str(tmp_path / "to"), "--build-temp", str(tmp_path / "objects"))
    done = setup(f"{without}; os.environ.pop('KVCACHE_CUDA', None)", "build_ext", *to)
    assert done.returncode == 0, done.stderr
    assert [
        each for each in names if f"/3] copy {tmp_path / 'from' / each}" in done.stdout
    ] == names
    assert {p.name: p.read_text() for p in (tmp_path / "to" / "kvcache").iterdir()} == {
        name: name for name in names
    }


def test_a_source_distribution_does_not_need_torch():
    done = setup(NO_TORCH, "sdist", "--help")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("found", "is_refused"), [("2.9.1", True), ("2.10.0a0+git1", False)])
def test_torch_version_is_checked_before_its_libraries_are_used(found, is_refused):
    from kvcache.native import build

    if is_refused:
        with pytest.raises(RuntimeError, match=f"^torch is {found}: expected 2.10 or newer"):
            build.check_torch_version(found)
    else:
        build.check_torch_version(found)
