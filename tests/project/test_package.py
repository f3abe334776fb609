# SPDX-License-Identifier: Apache-2.0
"""Checks that the files that describe the package are consistent, and tests the check of wheels."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import tomllib

import kvcache
from tests.machinery import roots, wheel_check
from tests.machinery.shared import REPO

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
LICENSE = re.compile(r"(#|//) SPDX-License-Identifier: Apache-2.0")
RELEASE = REPO / ".github" / "workflows" / "release.yml"


def test_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+) \(", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == kvcache.__version__
    assert f"\nversion: {kvcache.__version__}\n" in (REPO / "CITATION.cff").read_text()


def test_pre_commit_runs_the_linters_of_the_extra_dev():
    config = (REPO / ".pre-commit-config.yaml").read_text()
    pinned = dict(re.findall(r"repo: \S+/(?:mirrors-)?([a-z-]+)\n +rev: v(\S+)", config))
    assert set(pinned) == {"ruff-pre-commit", "clang-format"}
    dev = PROJECT["project"]["optional-dependencies"]["dev"]
    assert f"ruff=={pinned['ruff-pre-commit']}" in dev
    assert f"clang-format=={pinned['clang-format']}" in dev


def test_wheels_are_built_and_tested_for_the_pythons_of_the_classifiers():
    classifiers = "\n".join(PROJECT["project"]["classifiers"])
    versions = re.findall(r"Python :: (3\.\d+)$", classifiers, re.MULTILINE)
    assert PROJECT["project"]["requires-python"] == f">={versions[0]}"
    built = PROJECT["tool"]["cibuildwheel"]["build"]
    assert built == [f"cp{version.replace('.', '')}-*" for version in versions]
    if not RELEASE.exists():
        pytest.skip("a source distribution contains no workflows")
    tested = ", ".join(f'"{version}"' for version in versions)
    assert f"python: [{tested}]" in RELEASE.read_text()


# Names that were added to `typing` in Python 3.11 or later.
NEW_IN_TYPING = {
    *("LiteralString", "Never", "NotRequired", "Required", "Self", "TypeVarTuple", "Unpack"),
    *("assert_never", "assert_type", "dataclass_transform", "override", "reveal_type", "ReadOnly"),
    *("TypeAliasType", "TypeIs"),
}


@pytest.mark.slow
def test_imports_exist_in_python_3_10():
    """This is checked statically, because the tests run with a newer Python."""
    for path in roots.files(".py"):
        for node in ast.walk(ast.parse(path.read_text(), feature_version=(3, 10))):
            if isinstance(node, ast.ImportFrom) and node.module == "typing":
                names = {alias.name for alias in node.names} & NEW_IN_TYPING
                assert not names, f"{path.relative_to(REPO)}: {names}"
            elif isinstance(node, ast.Import):
                assert "tomllib" not in {alias.name for alias in node.names}, path


@pytest.mark.slow
def test_editable_install_is_found_beside_a_checkout_named_like_the_package(tmp_path):
    def run(*command, cwd=tmp_path):
        environment = {**os.environ, "KVCACHE_PREBUILT": str(REPO / "kvcache"), "KVCACHE_CUDA": "0"}
        environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    checkout, python = tmp_path / "kvcache", str(tmp_path / "venv" / "bin" / "python")
    skip = shutil.ignore_patterns("*.so", "__pycache__", "csrc")
    shutil.copytree(REPO / "kvcache", checkout / "kvcache", ignore=skip)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, checkout)
    run(sys.executable, "-m", "venv", "--without-pip", "venv")
    (installed,) = tmp_path.glob("venv/lib/python*/site-packages")
    # Makes the installed packages available, but not what their .pth files add.
    (installed / "base.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--python", str(tmp_path / "venv"), "install", "--no-deps"]
    run(*pip, "--no-build-isolation", "-e", str(checkout))
    program = "from kvcache import Admit\nimport kvcache\nprint(kvcache.__file__)\n"
    for folder in (tmp_path, Path("/")):
        assert run(python, "-c", program, cwd=folder) == f"{checkout}/kvcache/__init__.py\n"
    program = "from kvcache import Admit\nreveal_type(Admit)"
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-numpy.*,torch.*]\nfollow_imports = skip\n")
    says = run(python, "-m", "mypy", "-c", program)
    assert 'Revealed type is "def (' in says


# --- the check of wheels --------------------------------------------------------------------------


def wheel(tmp_path, tag):
    path = tmp_path / f"torch_kvcache-0.1.0-{tag}-{tag}-manylinux_2_28_x86_64.whl"
    path.write_bytes(b"PK\5\6" + bytes(18))  # an empty zip file
    return path


def test_wheel_check_fails_without_the_python_version(tmp_path, capsys):
    assert wheel_check.main([str(wheel(tmp_path, "cp399"))]) == 1
    assert "FAILED: there is no Python 3.99: expected one" in capsys.readouterr().out


def test_every_source_file_states_its_license():
    folders = ("csrc", "kvcache", "packages", "tools", "tests", "benchmarks", "examples", "docs")
    paths = [REPO / "setup.py", *(p for folder in folders for p in (REPO / folder).rglob("*"))]
    sources = [p for p in paths if p.suffix in {".py", ".pyi", ".h", ".cpp", ".cu"}]
    sources = [p for p in sources if REPO / "kvcache" / "csrc" not in p.parents]
    assert len(sources) > 800
    for path in sources:
        lines = path.read_text().splitlines()[:2]  # the first line may be a shebang
        assert not lines or any(LICENSE.fullmatch(line) for line in lines), path.relative_to(REPO)
