# SPDX-License-Identifier: Apache-2.0
"""Selection of native libraries, messages about missing libraries, and rebuilds by make."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.machinery.shared import REPO

# --- a CUDA build of torch without a CUDA library -------------------------------------------------

# If there is a CUDA device, the program uses real CUDA tensors. Otherwise, it calls the functions
# that the dispatcher would select for CUDA tensors.
USE_WITHOUT_CUDA_LIBRARY = """
import torch
torch.version.cuda = torch.version.cuda or "13.0"
{setup}
import kvcache
from kvcache import ops
from kvcache.native import load
from kvcache.cli import main

assert main(["replay", "--verify", "--json", "--requests", "20"]) == 0
for _ in range(2):
    how = load.describe()
    assert how["libkvcache_cpu"].startswith("ahead of time") or "JIT" in how["libkvcache_cpu"]
    print("reason:", how["libkvcache_cuda"])
    load.load_ops()

on_cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("kvcache::")]
assert "kvcache::write_kv" in names and "kvcache::slot_mapping" in names
for name in names:
    op = getattr(torch.ops.kvcache, name.partition("::")[2]).default
    # All other arguments are optional.
    some = {{"int": 0, "bool": True, "float": 1.0, "Tensor": torch.zeros(1)}}
    try:
        op.redispatch(on_cuda, *[some.get(str(a.type)) for a in op._schema.arguments])
    except RuntimeError as error:
        print(f"{{name}}: {{error}}")
if {has_device}:
    kv, slots = torch.zeros(1, 1, 1, 8), torch.zeros(1, dtype=torch.int64)
    try:
        ops.write_kv(*[x.cuda() for x in (kv, kv, kv[None], kv[None], slots)])
    except RuntimeError as error:
        assert "got CUDA tensors" in str(error)
    else:
        raise AssertionError("wrote without a CUDA kernel")
assert main(["doctor"]) == int(torch.cuda.is_available())  # an error only if there is a device
"""


@pytest.fixture
def package(tmp_path):
    """Copy the built package without the CUDA library."""
    skip = shutil.ignore_patterns("libkvcache_cuda.so", "__pycache__", "csrc")
    shutil.copytree(REPO / "kvcache", tmp_path / "kvcache", ignore=skip)
    (tmp_path / "csrc").symlink_to(REPO / "csrc")
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        pytest.param(
            "from kvcache.native import build; build.cuda_home = lambda: None",
            "not built: no nvcc found (in CUDA_HOME, in /usr/local/cuda, on the PATH)",
            id="no nvcc",
        ),
        pytest.param(
            "from kvcache.native import build; build.cuda_home = lambda: '/usr/local/cuda'; "
            "torch.cuda.is_available = lambda: False",
            "not built: torch finds no CUDA device to build for",
            id="no device",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "import kvcache, pathlib; folder = pathlib.Path(kvcache.__file__).parent; "
            "(folder / 'libkvcache_cuda.so').write_text('of another CUDA')",
            "not loadable: ",
            id="unusable",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_cuda_torch_without_the_cuda_library_has_cpu_ops_and_reports_the_reason(
    package, setup, reason
):
    torch = pytest.importorskip("torch")
    program = USE_WITHOUT_CUDA_LIBRARY.format(setup=setup, has_device=torch.cuda.is_available())
    variables = {**os.environ, "PYTHONPATH": str(package), "KVCACHE_JIT_DIR": str(package / "jit")}
    variables["COLUMNS"] = "500"  # prevents the doctor from wrapping its output lines
    variables.pop("KVCACHE_JIT", None)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=package, env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    found = [line.removeprefix("reason: ") for line in lines if line.startswith("reason: ")]
    assert len(found) == 2 and found[0] == found[1] and found[0].startswith(reason)
    refusals = [line for line in lines if line.startswith("kvcache::")]
    assert len(refusals) >= 5
    for line in refusals:
        assert f"got CUDA tensors, but libkvcache_cuda is {reason}" in line
    assert reason in done.stdout.partition("CUDA ops")[2]


@pytest.mark.slow
def test_cpu_library_that_fails_to_load_fails_again(package):
    pytest.importorskip("torch")
    program = (
        "import pathlib, kvcache; from kvcache.native import load\n"
        "(pathlib.Path(kvcache.__file__).parent / 'libkvcache_cpu.so').write_text('no library')\n"
        "for _ in range(2):\n"
        "    try: load.load_ops()\n"
        "    except OSError as error: print('failed')\n"
        "assert 'libkvcache_cpu' not in load.describe()\n"
    )
    (package / "kvcache" / "libkvcache_cpu.so").unlink(missing_ok=True)
    variables = {**os.environ, "PYTHONPATH": str(package)}
    variables.pop("KVCACHE_JIT", None)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=package, env=variables, capture_output=True, text=True
    )
    assert done.stdout == "failed\n" * 2, done.stderr


# --- make -----------------------------------------------------------------------------------------

needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="no make")
NOW = 1_700_000_000


@pytest.fixture
def made(tmp_path):
    """A checkout that make considers to be fully built."""
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(REPO / name, tmp_path)
    skip = shutil.ignore_patterns("*.so", "__pycache__")
    for name in ("csrc", "kvcache"):
        shutil.copytree(REPO / name, tmp_path / name, ignore=skip)
    (tmp_path / "kvcache" / "libkvcache_cpu.so").touch()
    (tmp_path / ".venv").mkdir()
    for path in tmp_path.rglob("*"):
        os.utime(path, (NOW, NOW))
    for path, when in ((".deps", NOW + 1), (".built", NOW + 2)):
        (tmp_path / ".venv" / path).touch()
        os.utime(tmp_path / ".venv" / path, (when, when))
    return tmp_path


def would_build(checkout) -> bool:
    done = subprocess.run(["make", "-q", ".venv/.built"], cwd=checkout, capture_output=True)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode == 1


@pytest.mark.slow
@needs_make
@pytest.mark.parametrize(("changed", "builds"), [
    (None, False),
    ("kvcache/cli/__init__.py", False),
    ("kvcache/worker/pages/storage.py", False),
    ("csrc/core/manager/manager.cpp", True),
    ("csrc/ops/token_io.h", True),
    ("csrc/ops/token_io.cu", True),
    ("csrc/python/module.cpp", True),
    ("setup.py", True),
    ("kvcache/native/build.py", True),
    ("pyproject.toml", True),
])  # fmt: skip
def test_make_rebuilds_only_after_changes(made, changed, builds):
    if changed:
        assert (made / changed).is_file()
        os.utime(made / changed, (NOW + 9, NOW + 9))
    assert would_build(made) == builds


@needs_make
def test_make_rebuilds_after_clean(made):
    assert not would_build(made)
    subprocess.run(["make", "clean"], cwd=made, check=True, capture_output=True)
    assert not (made / "kvcache" / "libkvcache_cpu.so").exists()
    assert would_build(made)
    assert (made / ".venv" / ".deps").exists()  # torch must not be downloaded again


# --- steps of CI ----------------------------------------------------------------------------------

# The steps are listed in the order of their output, although gpu-rehearsal starts two steps
# earlier. LAST_BESIDE maps each background step to the last step that runs concurrently with it.
STEPS = tuple(
    """
    setup lint test-vllm sanitize sanitize-thread gpu-less test-sglang gpu-rehearsal docs demo
    test-wheel fuzz bench test test-slow test-real test-exhaustive
    """.split()  # noqa: SIM905
)
LAST_BESIDE = {"test-vllm": "gpu-less", "gpu-rehearsal": "bench"}


def run_ci(tmp_path, failing: str) -> tuple[int, str]:
    """Run .ci/run with a `make` that only prints its target. Return the exit code and the output."""
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "ran $1"\n[ "$1" != "{failing}" ]\n')
    make.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(REPO / ".ci" / "run")],
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("step", ["nothing", *STEPS])
def test_ci_runs_every_step_and_stops_at_the_failing_one(tmp_path, step):
    code, out = run_ci(tmp_path, failing=step)
    if step == "nothing":
        assert code == 0 and "== all passed in " in out
        assert [step for step in STEPS if f"ran {step}\n" in out] == list(STEPS)
        # One more line reports the CUDA check, even if it is skipped.
        assert out.count("== took ") == len(STEPS) + 1
        return
    assert code != 0 and "== FAILED after " in out and "all passed" not in out
    assert out.count(f"ran {step}\n") == 1
    not_begun = STEPS[STEPS.index(LAST_BESIDE.get(step, step)) + 1 :]
    assert not [later for later in not_begun if f"ran {later}\n" in out]


def test_pull_requests_never_run_on_the_gpu_runner():
    path = REPO / ".github" / "workflows" / "ci.yml"
    if not path.exists():
        pytest.skip("a source distribution contains no workflows")
    gpu_job = path.read_text().partition("\n  gpu:\n")[2]
    assert "runs-on: [self-hosted, gpu]" in gpu_job
    assert "\n    if: github.event_name != 'pull_request'\n" in gpu_job


@pytest.mark.parametrize(
    ("compiled", "driver", "problem"),
    [
        (13000, 13000, None),
        (13010, 13000, None),  # both have the same major version
        (12080, 13000, None),
        (13000, 0, None),  # there is no driver, which torch itself reports
        (
            13000,
            12040,
            "not usable: compiled with CUDA 13.0, but the driver supports CUDA 12.4 at most: ",
        ),
    ],
)
def test_driver_older_than_the_toolkit_is_reported(compiled, driver, problem):
    from kvcache.native import load

    found = load._driver_problem(compiled, driver)
    if problem is None:
        assert found is None
        return
    assert found.startswith(problem)
    assert found.endswith("update the driver, or build with a CUDA 12 toolkit (CUDA_HOME)")


OLD_DRIVER = """
import torch
from kvcache.native import load
load._driver_problem = lambda compiled, driver: "not usable: compiled with CUDA 99.0"
from kvcache import Pages, SwapEngine, ops
from kvcache.cli import main
for use in (ops.warm_up, lambda: Pages.allocate(2, [[64]], device="cuda")):
    try:
        use()
    except RuntimeError as error:
        print("error:", error)
raise SystemExit(main(["doctor"]))
"""


@pytest.mark.gpu
def test_first_use_and_doctor_report_an_old_driver():
    done = subprocess.run(
        [sys.executable, "-c", OLD_DRIVER],
        cwd=REPO,
        env={**os.environ, "COLUMNS": "500"},
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert len(errors) == 2, done.stderr
    for line in errors:
        assert line.endswith("libkvcache_cuda is not usable: compiled with CUDA 99.0")
    assert done.returncode == 1 and done.stdout.count("not usable: compiled with CUDA 99.0") == 3


def test_error_of_a_library_for_another_cuda_explains_how_to_rebuild():
    from kvcache.native import load

    for error in (
        "libkvcache_cuda.so: undefined symbol: cudaMemcpyBatchAsync, version libcudart.so.12",
        "libcudart.so.13: cannot open shared object file: No such file or directory",
    ):
        assert "rebuild it with a CUDA" in load._advice(error)
    assert load._advice("of another kind") == ""
