# SPDX-License-Identifier: Apache-2.0
"""Builds everything that a run without a GPU needs: runtime, emulated kernels, and a tree with the
package.

Uses only the standard library, so that it runs under any Python before the package is built. Builds
into `build/gpu-less`, and rebuilds only when sources have changed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.machinery import roots
from tests.machinery.compilers import cxx
from tests.machinery.gpu_less import limits

REPO = roots.REPO
BUILD = REPO / "build" / "gpu-less"
TREE = BUILD / "tree"
EMULATOR = REPO / "tools" / "cuda_emulator"
# Files needed to build, test and measure in the tree.
COPIED = [
    *("csrc", "kvcache", "packages", "tools", "tests", "benchmarks", "examples", "docs"),
    *("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "Makefile", "CMakeLists.txt"),
    "conftest.py",
]
LEFT_OUT = ("__pycache__", "*.so", "*.pyc", ".hypothesis")

TORCH = "torch==2.11.0"
TORCH_INDEX = os.environ.get(
    "KVCACHE_GPULESS_TORCH_INDEX", "https://download.pytorch.org/whl/cu130"
)
PACKAGES = ["setuptools>=77", "wheel", "numpy", "pybind11>=2.13", "ninja", "pytest", "hypothesis"]
# Optional packages. If one is missing, the tests that need it are skipped.
EXTRAS = ["transformers>=5.16.1,<6", "msgspec>=0.18", "pyzmq>=25", "prometheus-client>=0.20"]


class Unavailable(Exception):
    """Raised if a required component is missing on this machine. The message names it in one
    line.
    """


@dataclass(frozen=True)
class Built:
    """Paths of the built components for a run without a GPU."""

    python: Path
    runtime: Path  # libcudart.so.13
    driver: Path  # libcuda.so.1
    kernels: Path
    limits: Path | None  # file with the kernels' launch limits; None if cuobjdump is missing
    toolkit: Path

    def environment(self, tree: Path = TREE) -> dict[str, str]:
        """Return the environment variables for a process that uses the package in `tree`, and for
        its subprocesses.
        """
        site = tree / "tests" / "machinery" / "gpu_less" / "site"
        environment = {
            **os.environ,
            "KVCACHE_GPULESS_RUNTIME": str(self.runtime),
            "KVCACHE_GPULESS_DRIVER": str(self.driver),
            "KVCACHE_GPULESS_KERNELS": str(self.kernels),
            "KVCACHE_GPULESS_LIMITS": str(self.limits or ""),
            "PYTHONPATH": os.pathsep.join(
                [str(site), roots.python_path(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
            ),
            "PATH": os.pathsep.join([str(self.python.parent), os.environ.get("PATH", "")]),
            "KVCACHE_CUDA_ARCHS": "90",
            "CUDA_HOME": str(self.toolkit),
        }
        seed = environment.get("KVCACHE_GPULESS_SEED")
        if seed is not None:
            environment.setdefault("KVCACHE_EMUL_SEED", seed)
        return environment


def build() -> Built:
    """Build or update everything. Raises Unavailable if this machine cannot build a component."""
    rules = _build_rules()
    cuda = rules.cuda_home()
    if cuda is None:
        raise Unavailable("no nvcc found (CUDA_HOME, /usr/local/cuda, PATH)")
    python = _environment()
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _copy_tree()
        runtime, driver = _runtime(rules, cuda), _driver(rules)
        kernels = _kernels(rules, python)
        toolkit = _toolkit(cuda)
        _package(python, toolkit)
        return Built(python, runtime, driver, kernels, _limits(cuda), toolkit)


def _build_rules():
    """Load kvcache/native/build.py without importing the package."""
    spec = importlib.util.spec_from_file_location(
        "_build", REPO / "kvcache" / "native" / "build.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment_folder() -> Path:
    """Return the folder of the virtual environment with a CUDA build of torch.

    It may not exist yet.
    """
    return Path(os.environ.get("KVCACHE_GPULESS_VENV") or "~/.cache/kvcache/gpu-less").expanduser()


def _environment() -> Path:
    """Return the Python in `environment_folder()`. Creates the environment on first use."""
    folder = environment_folder()
    python = folder / "bin" / "python"
    if not has_torch(python):
        _install_torch(folder, python)
    with contextlib.suppress(Unavailable):
        _call([str(python), "-m", "pip", "install", "--quiet", "--retries", "1", *EXTRAS])
    return python


def _install_torch(folder: Path, python: Path) -> None:
    print(f"gpu-less: installing {TORCH} into {folder}, once (gigabytes)", flush=True)
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    _call([sys.executable, "-m", "venv", str(folder)])
    _call([*pip, "--upgrade", "pip", *PACKAGES])
    # The default index has a CUDA build for most machines. The other index is a fallback.
    with contextlib.suppress(Unavailable):
        _call([*pip, TORCH])
    if not has_torch(python):
        _call([*pip, "--force-reinstall", "--extra-index-url", TORCH_INDEX, TORCH])
    if not has_torch(python):
        raise Unavailable(f"{TORCH} in {folder} is not a build for CUDA 13")


def _call(command: list[str]) -> None:
    """Run an installation step. Raises Unavailable with the last printed line if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"cannot install {TORCH}: {shlex.join(command)}: {last}")


def has_torch(python: Path) -> bool:
    """Whether torch is installed with a matching major version of the CUDA runtime.

    Does not import torch.
    """
    program = (
        "from importlib.metadata import version; version('torch'); "
        "print(version('nvidia-cuda-runtime'))"
    )
    if not python.exists():
        return False
    done = subprocess.run([str(python), "-c", program], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.startswith("13.")


def _copy_tree() -> None:
    """Make TREE equal to the checkout, except for build products.

    Unchanged files are not touched.
    """
    wanted = set()
    for name in COPIED:
        source = REPO / name
        if source.is_dir():
            shutil.copytree(
                source,
                TREE / name,
                dirs_exist_ok=True,
                ignore=shutil.ignore_patterns(*LEFT_OUT),
                copy_function=_copy_if_changed,
            )
            wanted |= {TREE / name / p.relative_to(source) for p in source.rglob("*")}
        elif source.exists():
            _copy_if_changed(source, TREE / name)
            wanted.add(TREE / name)
    for folder in (TREE / name for name in COPIED if (REPO / name).is_dir()):
        for path in folder.rglob("*"):
            built = path.suffix in (".so", ".pyc") or ".hypothesis" in path.parts
            if path.is_file() and path not in wanted and not built:
                path.unlink()


def _copy_if_changed(source: str | Path, target: str | Path) -> None:
    source, target = Path(source), Path(target)
    if target.exists() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def _key(paths: list[Path], *facts: object) -> str:
    digest = hashlib.sha256(repr(facts).encode())
    for path in sorted(paths):
        digest.update(str(path.relative_to(REPO)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _sources(*folders: str) -> list[Path]:
    endings = (".h", ".cpp", ".cu", ".map")
    roots_of = {name: EMULATOR if name.startswith("emul") else REPO / "csrc" for name in folders}
    paths = [p for name, root in roots_of.items() for p in (root / name).rglob("*")]
    return [path for path in paths if path.suffix in endings]


def _compile(
    sources: list[Path], out: Path, compile_flags: list[str], link_flags: list[str]
) -> None:
    """Compile in parallel and link. `out` is created only after everything has succeeded."""
    out.parent.mkdir(parents=True, exist_ok=True)
    objects = [out.parent / f"{source.name}.o" for source in sources]
    commands = [
        [*compile_flags, "-c", str(source), "-o", str(obj)]
        for source, obj in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(_run, commands):
            pass
    unfinished = out.with_suffix(".unfinished")
    _run([compile_flags[0], "-shared", "-o", str(unfinished), *map(str, objects), *link_flags])
    unfinished.rename(out)


def _run(command: list[str], **options) -> None:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def _runtime(rules, cuda: Path) -> Path:
    folder = EMULATOR / "emul" / "runtime"
    apart = ("driver.cpp", "kernel_library.cpp")
    sources = sorted(p for p in folder.glob("*.cpp") if p.name not in apart)
    flags = [cxx(rules), "-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden"]
    flags += [f"-I{REPO / 'csrc'}", f"-I{EMULATOR}", f"-isystem{cuda / 'include'}"]
    name = "libcudart.so.13"
    out = BUILD / f"runtime-{_key(_sources('emul/runtime'), flags)}" / name
    if not out.exists():
        print("gpu-less: building the runtime", flush=True)
        link = [f"-Wl,-soname,{name}", f"-Wl,--version-script={folder / 'libcudart.map'}"]
        _compile(sources, out, flags, [*link, "-ldl", "-lpthread"])
    return out


def _driver(rules) -> Path:
    source = EMULATOR / "emul" / "runtime" / "driver.cpp"
    name = "libcuda.so.1"
    out = BUILD / f"driver-{_key([source])}" / name
    if not out.exists():
        _compile([source], out, [cxx(rules), "-O1", "-fPIC"], [f"-Wl,-soname,{name}"])
    return out


def _kernels(rules, python: Path) -> Path:
    root = REPO / "csrc"
    sources = [*rules.cuda_sources(root), EMULATOR / "emul" / "runtime" / "kernel_library.cpp"]
    find = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    torch = subprocess.run([str(python), "-c", find], capture_output=True, text=True, check=True)
    include = Path(torch.stdout.strip()) / "include"
    flags = [cxx(rules), "-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-w"]
    flags += ["-DKVCACHE_GPULESS", f"-D{rules.TORCH_TARGET}", f"-I{root}", f"-I{EMULATOR}"]
    flags += [f"-isystem{include}"]
    key = _key(_sources("ops", "emul", "worker"), flags)
    out = BUILD / f"kernels-{key}" / "libkvcache_gpuless_kernels.so"
    if not out.exists():
        print("gpu-less: compiling the kernels for the emulator", flush=True)
        _compile(sources, out, [*flags, "-x", "c++"], [])
    return out


def _toolkit(cuda: Path) -> Path:
    """Lay out a toolkit like pip's wheels: `lib` instead of `lib64`, and only the versioned runtime
    library.

    A successful build shows that such a toolkit suffices.
    """
    folder = BUILD / "toolkit"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib").mkdir(parents=True)
    for name in ("bin", "include", "nvvm"):
        (folder / name).symlink_to((cuda / name).resolve())
    runtimes = [
        path for name in ("lib64", "lib") for path in (cuda / name).glob("libcudart.so.[0-9]*")
    ]
    for path in runtimes:
        link = folder / "lib" / ".".join(path.name.split(".")[:3])  # such as libcudart.so.13
        if not link.exists():
            link.symlink_to(path.resolve())
    return folder


def _package(python: Path, toolkit: Path) -> None:
    """Build the package's native libraries within TREE, for this Python and sm_90."""
    stamp = BUILD / "package"
    native = _sources("core", "worker", "python", "ops")
    rules = sorted((REPO / "kvcache" / "native").glob("*.py"))
    key = _key([*native, REPO / "setup.py", *rules], str(python))
    if stamp.exists() and stamp.read_text() == key:
        return
    print("gpu-less: building the package for CUDA, sm_90", flush=True)
    command = [str(python), "setup.py", "-q", "build_ext", "--inplace"]
    asked = {"KVCACHE_CUDA": "1", "KVCACHE_CUDA_ARCHS": "90", "CUDA_HOME": str(toolkit)}
    _run(command, cwd=TREE, env={**os.environ, **asked})
    stamp.write_text(key)


def _limits(cuda: Path) -> Path | None:
    """Write the launch limits from the package's machine code to a file for the runtime."""
    library, out = TREE / "kvcache" / "libkvcache_cuda.so", BUILD / "limits"
    if out.exists() and out.stat().st_mtime > library.stat().st_mtime:
        return out
    tool = limits.find_cuobjdump(cuda, environment_folder())
    if tool is None:
        print("gpu-less: no cuobjdump, so launches are not checked against the machine code")
        return None
    limits.write(limits.limits_of(tool, library, "sm_90"), out)
    return out
