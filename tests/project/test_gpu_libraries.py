# SPDX-License-Identifier: Apache-2.0
"""The libraries that `make gpu-libraries` has built load in the versions of the machine with the GPU."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from benchmarks.gpu import machine, workspace
from benchmarks.gpu.__main__ import LIBRARIES
from tests.machinery.gpu_less.build import environment_folder, has_torch
from tests.machinery.shared import REPO

pytestmark = pytest.mark.slow


@pytest.fixture
def libraries():
    folder = REPO / LIBRARIES
    try:
        return workspace.carried(folder)
    except ValueError as error:
        pytest.skip(f"run `make gpu-libraries` first: {error}")


def run(python, program, *arguments, path=""):
    done = subprocess.run(
        [str(python), "-c", textwrap.dedent(program), *map(str, arguments)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_op_libraries_load_in_an_older_torch(libraries):
    python = environment_folder() / "bin" / "python"
    if not has_torch(python):
        pytest.skip(f"no torch 2.11 in {environment_folder()}: run `make gpu-less` first")
    program = """
        import json, sys, torch
        for path in sys.argv[1:]:
            torch.ops.load_library(path)
        out = torch.full((1, 3), -7)
        tables = torch.tensor([5, 6], dtype=torch.int32)
        groups = torch.tensor([[0, 2, 16, 1, 0, 1, 0, 0]])
        rows = torch.zeros(2, dtype=torch.int32)
        positions = torch.tensor([3, 17])
        torch.ops.kvcache.slot_mapping(tables, groups, 1, rows, None, positions, None, out)
        print(json.dumps({"torch": torch.__version__, "slots": out.tolist()}))
    """
    found = run(python, program, *(path for path in libraries if path.name in workspace.OPS))
    assert found["torch"].startswith("2.11.")
    assert found["slots"] == [[5 * 16 + 3, 6 * 16 + 1, -1]]


def test_core_loads_in_the_python_of_that_machine(libraries, tmp_path):
    (core,) = (path for path in libraries if path.name not in workspace.OPS)
    version = core.name.split("-")[1]  # 312
    python = workspace.python_with_headers(f"{version[0]}.{version[1:]}")
    install = [python, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), "numpy"]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"cannot install numpy: {(done.stderr.splitlines() or ['no message'])[-1]}")
    program = """
        import importlib.machinery, importlib.util, json, sys
        loader = importlib.machinery.ExtensionFileLoader("kvcache._core", sys.argv[1])
        spec = importlib.util.spec_from_loader("kvcache._core", loader)
        core = importlib.util.module_from_spec(spec)
        loader.exec_module(core)
        print(json.dumps({"python": list(sys.version_info[:2]), "names": len(dir(core))}))
    """
    found = run(python, program, core, path=tmp_path)
    assert found["python"] == [int(version[0]), int(version[1:])]
    assert found["names"] > 10


def test_missing_python_is_named(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.workspace", str(tmp_path), "--python", "9.9"],
        capture_output=True, text=True, cwd=machine.REPO,
    )  # fmt: skip
    assert done.returncode == 1 and not list(tmp_path.iterdir())
    assert done.stderr.startswith("make gpu-libraries: no Python 9.9 with its headers")
