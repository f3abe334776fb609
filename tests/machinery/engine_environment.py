# SPDX-License-Identifier: Apache-2.0
"""Virtual environments with an inference engine, in which this checkout of kvcache is tested."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import tomllib

from tests.machinery import roots
from tests.machinery.shared import REPO

TEST_NEEDS = ("pytest", "hypothesis", "xxhash")
REQUIREMENTS = (
    "from importlib.metadata import requires; "
    "print(*(r for r in requires('{}') if 'extra ==' not in r), sep='\\n')"
)
METADATA = "Metadata-Version: 2.1\nName: kvcache-checkout\nVersion: 1\n"


class Unavailable(Exception):
    """Raised if the engine cannot be installed on this machine. The message states the reason in
    one line.
    """


class EngineEnvironment:
    """A virtual environment with torch and one version of an engine, created once.

    Args:
        folder: Folder of the environment.
        stamp: Name of the file that marks a complete environment.
    """

    def __init__(self, folder: Path, stamp: str) -> None:
        self.folder, self.python = folder, folder / "bin" / "python"
        self._stamp = folder / stamp
        self._torch = f"torch=={version('torch').partition('+')[0]}"

    @property
    def is_complete(self) -> bool:
        """Whether the environment has already been created."""
        return self._stamp.exists()

    def create(self, title: str) -> None:
        """Create the environment with torch and the packages that tests need. Raises
        Unavailable.
        """
        print(f"installing {title} into {self.folder}, once", flush=True)
        call([sys.executable, "-m", "venv", str(self.folder)])
        self.pip("--upgrade", "pip", "setuptools>=77", "wheel", "numpy", *TEST_NEEDS, self._torch)

    def pip(self, *arguments: str) -> None:
        """Install packages. Raises Unavailable."""
        call([str(self.python), "-m", "pip", "install", "--quiet", *arguments])

    def add_requirements(self, package: str, left_out: set[str]) -> None:
        """Install the requirements of a package, except those in `left_out`, and mark the
        environment as complete.

        Raises Unavailable.
        """
        needed = call([str(self.python), "-c", REQUIREMENTS.format(package)]).splitlines()
        names = {each: re.split(r"[ <>=!;\[]", each)[0].lower() for each in needed}
        held = self.folder / "held.txt"
        held.write_text(f"{self._torch}\n")
        self.pip("-c", str(held), *(each for each, name in names.items() if name not in left_out))
        self._stamp.touch()

    def add_entry_points(self, more: str = "") -> None:
        """Write the entry points of the checkout, which is not installed in the environment.

        Args:
            more: Additional entry points, for the tests.
        """
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        folder = (
            Path(call([str(self.python), "-c", where]).strip()) / "kvcache_checkout-1.dist-info"
        )
        folder.mkdir(exist_ok=True)
        groups: dict[str, list[str]] = {}
        for root in (REPO, *roots.PACKAGES):
            project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
            for group, entries in project.get("entry-points", {}).items():
                found = [f"{name} = {value}" for name, value in entries.items()]
                groups.setdefault(group, []).extend(found)
        lines = [line for group, found in groups.items() for line in (f"[{group}]", *found)]
        (folder / "METADATA").write_text(METADATA)
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n" + more)

    def run(
        self, module: str, arguments: list[str], tests: list[str], settings: dict[str, str]
    ) -> int:
        """Run a module in the environment.

        Args:
            module: The module to run. If it is pytest and no argument names a file, `tests` are run.
            arguments: Arguments of the module.
            tests: Paths of test files, relative to the checkout.
            settings: Environment variables. `PYTHONPATH` is appended to the path of the checkout.

        Returns:
            The exit code.
        """
        if module == "pytest":
            names_files = any(each.startswith(("tests/", "packages/")) for each in arguments)
            arguments = ["-p", "no:cacheprovider", *arguments, *([] if names_files else tests)]
        path = os.pathsep.join([roots.python_path(), *filter(None, [settings.get("PYTHONPATH")])])
        settings = {**os.environ, **settings, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [str(self.python), "-m", module, *arguments], cwd=REPO, env=settings
        ).returncode


def call(command: list[str]) -> str:
    """Run an installation step and return its output.

    Raises Unavailable with the last line if it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise Unavailable(f"{' '.join(command[-3:])} failed: {last}")
    return done.stdout


def test_files(*patterns: str) -> list[str]:
    """Return the test files that match glob patterns relative to the checkout, as such paths."""
    found = sorted(
        str(each.relative_to(REPO)) for pattern in patterns for each in REPO.glob(pattern)
    )
    if len(found) < len(patterns):
        raise ValueError(f"patterns is {patterns}: expected patterns of existing files")
    return found
