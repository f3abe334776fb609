"""`make gpu`: build, test and measure on a machine with an NVIDIA GPU, in under nine minutes.

Uses that machine's own python3 and packages, installs nothing, needs no network. Builds both ways a
user would: ahead of time (into the checkout) and by torch.utils.cpp_extension. Every stage has a time
limit; results so far are written after each, as one JSON file in the folder given.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
TOTAL_S = 530

# Run in the build by torch.utils.cpp_extension; DEVICES is filled in.
JIT_CHECK = """
import torch, kvcache
from kvcache import _native
answers = []
for device in DEVICES:
    table = kvcache.BlockTable(16, 4, 8, 64, False, device, 16)
    table.add_row([1, 2, 3, 4], 0)
    table.add_row([5, 6, 7, 8], 1)
    table.commit_block_table(2)
    rows = torch.tensor([0, 1, -1], dtype=torch.int32, device=device)
    table.compute_slot_mapping(rows, torch.tensor([0, 63, 5], device=device))
    answers.append(table.slot_mapping.gpu[:5].tolist())
assert answers == [[16, 143, -1, -1, -1]] * len(DEVICES), answers
how = _native.describe()
assert all(found.startswith("JIT") for found in how.values()), how
print(sorted(how))
"""


def missing(rehearse: bool) -> list[str]:
    """What this machine lacks, in words."""
    found = []
    if sys.version_info < (3, 10):  # noqa: UP036  (run from a checkout, nobody checked it yet)
        found.append(f"Python 3.10 or newer (this is {sys.version.split()[0]})")
    for module in ("torch", "numpy", "pybind11", "setuptools", "pytest", "hypothesis"):
        if importlib.util.find_spec(module) is None:
            found.append(f"the Python package {module}")
    for tool in ("g++", "ninja", *(() if rehearse else ("nvcc",))):
        beside = Path(sys.executable).with_name(tool)
        cuda = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin" / tool
        if shutil.which(tool) is None and not beside.exists() and not cuda.exists():
            found.append(f"the program {tool}")
    if importlib.util.find_spec("torch") is not None:
        import torch

        if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 10):
            found.append(f"torch 2.10 or newer (this is {torch.__version__})")
        if not rehearse and not torch.version.cuda:
            found.append(f"a CUDA build of torch (this is {torch.__version__})")
        elif not rehearse and not torch.cuda.is_available():
            found.append("a CUDA device that torch can use")
    return found


class Run:
    """The stages of one run, and the JSON they leave."""

    def __init__(self, folder: Path, rehearse: bool) -> None:
        self.started = time.monotonic()
        self.rehearse = rehearse
        self.report = {**machine(rehearse), "stages": {}}
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{self.report['file']}.json"
        self.log = (folder / f"{self.report['file']}.log").open("w")
        self.environment = {**os.environ, "PYTHONPATH": str(REPO), "PYTHONUNBUFFERED": "1"}
        self.environment["KVCACHE_CUDA"] = "0" if rehearse else "1"
        if not rehearse:
            self.environment["KVCACHE_CUDA_ARCHS"] = self.report["arch"]

    def stage(self, name: str, limit_s: float, work: Callable[[float], dict]) -> bool:
        """Runs one stage in the time that it, and the whole, has left."""
        left = min(limit_s, TOTAL_S - (time.monotonic() - self.started))
        start = time.monotonic()
        print(f"== {name}", flush=True)
        if left <= 5:
            outcome = {"ok": False, "error": "no time left"}
        else:
            try:
                outcome = {"ok": True, **work(left)}
            except subprocess.TimeoutExpired:
                outcome = {"ok": False, "error": f"ran longer than {left:.0f} s"}
            except subprocess.CalledProcessError as error:
                outcome = {"ok": False, "error": (error.stdout or "")[-3000:]}
            except Exception as error:
                outcome = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        outcome["seconds"] = round(time.monotonic() - start, 1)
        self.report["stages"][name] = outcome
        self.path.write_text(json.dumps(self.report, indent=1) + "\n")
        shown = {key: value for key, value in outcome.items() if key != "results"}
        print(json.dumps(shown)[:3500], flush=True)
        return outcome["ok"]

    def call(self, command: list[str], limit_s: float, **environment: str) -> str:
        """Output of a command; CalledProcessError or TimeoutExpired where it fails."""
        child = subprocess.Popen(
            command,
            env={**self.environment, **environment},
            cwd=REPO,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            out, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with all that it has started
            child.communicate()
            raise
        self.log.write(f"$ {' '.join(command)}\n{out}\n")
        self.log.flush()
        if child.returncode != 0:
            raise subprocess.CalledProcessError(child.returncode, command, out)
        return out

    def build(self, limit_s: float) -> dict:
        self.call([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], limit_s)
        return {"libraries": sorted(path.name for path in (REPO / "kvcache").glob("*.so"))}

    def jit(self, limit_s: float) -> dict:
        devices = ["cpu"] if self.rehearse else ["cpu", "cuda"]
        with tempfile.TemporaryDirectory() as folder:
            out = self.call(
                [sys.executable, "-c", JIT_CHECK.replace("DEVICES", repr(devices))],
                limit_s,
                KVCACHE_JIT="1",
                KVCACHE_JIT_DIR=folder,
            )
        return {"libraries": out.strip().splitlines()[-1]}

    def kernels(self, limit_s: float) -> dict:
        tests = sorted(str(path) for path in (REPO / "tests").glob("test_*_op.py"))
        chosen = "cpu" if self.rehearse else "cuda or gpu"
        tests += ["tests/test_block_table.py", "tests/test_swap.py"]
        return self.pytest([*tests, "-k", chosen], limit_s)

    def tests(self, limit_s: float) -> dict:
        return self.pytest(["tests"], limit_s)

    def pytest(self, arguments: list[str], limit_s: float) -> dict:
        out = self.call([sys.executable, "-m", "pytest", "-q", "-rf", *arguments], limit_s)
        return {"summary": out.strip().splitlines()[-1]}

    def replay(self, limit_s: float) -> dict:
        device = "cpu" if self.rehearse else "cuda"
        command = [sys.executable, "-m", "kvcache.cli", "replay", "--verify", "--json"]
        command += ["--num-blocks", "301", "--host-blocks", "4001"]
        out = self.call([*command, "--device", device, "--concurrency", "4"], limit_s)
        return {"results": json.loads(out.strip().splitlines()[-1])}

    def sanitizer(self, limit_s: float) -> dict:
        tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
        if self.rehearse or not Path(tool).exists():
            return {"skipped": "no compute-sanitizer"}
        # A few examples per property: each launch costs a hundred times its own time here.
        tests = sorted(str(path) for path in (REPO / "tests").glob("test_*_op.py"))
        command = [tool, "--error-exitcode", "9", sys.executable, "-m", "pytest", "-q", *tests]
        selected = "cuda and not opcheck and not wrong"
        out = self.call([*command, "-k", selected], limit_s, HYPOTHESIS_PROFILE="few")
        return {"summary": out.strip().splitlines()[-1]}

    def measure(self, limit_s: float) -> dict:
        if self.rehearse:
            return {"skipped": "no GPU"}
        out = self.call([sys.executable, "-m", "benchmarks.gpu_kernels"], limit_s)
        return {"results": json.loads(out.strip().splitlines()[-1])}

    def swaps(self, limit_s: float) -> dict:
        """Calibrates, then measures with what was found: the stored file stays with the machine."""
        command = [sys.executable, "-m", "kvcache.cli", "bench", "--json"]
        command += ["--mib", "8"] if self.rehearse else ["--calibrate"]
        out = self.call(command, limit_s)
        return {"results": json.loads(out.strip().splitlines()[-1])}


def machine(rehearse: bool) -> dict:
    """What is measured on, and what."""
    import torch

    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPO, capture_output=True, text=True
    ).stdout.strip()
    facts = {
        "file": "rehearsal",
        "commit": commit or "unknown (no git history here)",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    if rehearse:
        return facts
    name = torch.cuda.get_device_name()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True)
    facts["file"] = "gpu-" + re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    facts["device"] = name
    facts["arch"] = "{}{}".format(*torch.cuda.get_device_capability())
    facts["driver"] = driver.stdout.strip().splitlines()[0] if driver.stdout else "unknown"
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--results", type=Path, default=REPO / "benchmarks" / "results")
    parser.add_argument(
        "--rehearse", action="store_true", help="run the stages without a GPU, to try this script"
    )
    args = parser.parse_args()
    lacking = missing(args.rehearse)
    if lacking:
        print("make gpu: this machine lacks " + "; ".join(lacking), file=sys.stderr)
        return 1
    run = Run(args.results, args.rehearse)
    ok = run.stage("build ahead of time", 120, run.build)
    if ok:
        ok &= run.stage("kernel tests", 120, run.kernels)
        ok &= run.stage("measurements", 120, run.measure)
        ok &= run.stage("swaps", 120, run.swaps)
        ok &= run.stage("build by torch.utils.cpp_extension", 150, run.jit)
        ok &= run.stage("replay --verify", 60, run.replay)
        ok &= run.stage("compute-sanitizer", 90, run.sanitizer)
        ok &= run.stage("all tests", 240, run.tests)
    run.report["seconds"] = round(time.monotonic() - run.started, 1)
    run.path.write_text(json.dumps(run.report, indent=1) + "\n")
    print(f"{'ok' if ok else 'FAILED'}: {run.path} after {run.report['seconds']} s")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
