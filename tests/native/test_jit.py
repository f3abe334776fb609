# SPDX-License-Identifier: Apache-2.0
"""The build at first use, in an unpacked source distribution that has no built libraries."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import sys
import tarfile

import pytest

from kvcache.native import build, jit
from tests.machinery.shared import REPO, sampled

# Two compiler stand-ins. The first takes only seconds, because it copies this checkout's
# libraries instead of compiling and linking. The second compiles without optimization.
COPIES = f"""#!/bin/sh
for word in "$@"; do
  case "$before" in -o) out=$word ;; -MF) dependencies=$word ;; esac
  [ "$word" = -c ] && compiles=yes
  before=$word
done
[ -n "$out" ] || exec g++ "$@"
[ -z "$dependencies" ] || echo "$out:" >"$dependencies"
if [ -n "$compiles" ]; then : >"$out"; else cp "{REPO}/kvcache/$(basename "$out")" "$out"; fi
"""
COMPILES = '#!/bin/sh\nexec g++ "$@" -O0\n'
COMPILERS = {"copies": COPIES, "compiles": COMPILES}
USE = """
import kvcache
assert kvcache.hash_blocks(range(32), 16).shape == (2, 32)
import torch
from kvcache.native import load
table = kvcache.BlockTables([kvcache.TableShape(16, 8)], max_num_reqs=4, max_num_tokens=64)[0]
table.add_row([1, 2, 3, 4], 0)
table.add_row([5, 6, 7, 8], 1)
table.commit_block_table(2)
rows = torch.tensor([0, 1, -1], dtype=torch.int32)
table.compute_slot_mapping(rows, torch.tensor([0, 63, 5]))
assert table.slot_mapping.gpu[:5].tolist() == [16, 143, -1, -1, -1]
how = load.describe()
assert all(how[name].startswith("JIT") for name in ("_core", "libkvcache_cpu")), how
print("works")
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the checkout that resembles a source distribution, in which nothing has been built."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    skip = shutil.ignore_patterns(".*", "build", "dist", "*.so", "*.egg-info", "__pycache__")
    shutil.copytree(REPO, folder / "repository", ignore=skip)
    shutil.copytree(REPO / ".ci", folder / "repository" / ".ci")
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "sdist"],
        cwd=folder / "repository",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (archive,) = (folder / "repository" / "dist").iterdir()
    with tarfile.open(archive) as file:
        file.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    checkout = folder / archive.name.removesuffix(".tar.gz")
    for name, program in COMPILERS.items():
        (checkout / name).mkdir()
        (checkout / name / "g++").write_text(program)
        (checkout / name / "g++").chmod(0o755)
    return checkout


def environment_for(checkout, compiler="copies", **changes):
    variables = {**os.environ, "PYTHONPATH": str(checkout)}
    variables.pop("KVCACHE_JIT", None)
    variables["KVCACHE_JIT_DIR"] = str(checkout / "jit" / compiler)
    # CXX contains a launcher and arguments, as in "ccache g++ -m64".
    variables["CXX"] = f"env {checkout / compiler / 'g++'} -pipe"
    return {**variables, **changes}


def run(folder, program, *, checkout=None, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment_for(checkout or folder, **environment),
        capture_output=True,
        text=True,
        cwd=folder,
    )


@pytest.fixture(scope="module", params=sampled(COMPILERS))
def compiler(request):
    return request.param


@pytest.fixture(scope="module")
def built(checkout, compiler):
    """Let two processes use the package for the first time at once. Return their results and output."""
    both = [
        subprocess.Popen(
            [sys.executable, "-c", USE],
            env=environment_for(checkout, compiler),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=checkout,
        )
        for _ in range(2)
    ]
    return [process.communicate() for process in both]


@pytest.mark.slow
def test_source_distribution_contains_the_checkout(checkout):
    wanted = ["Makefile", "CMakeLists.txt", "MANIFEST.in", "README.md", "LICENSE", ".ci/run"]
    for folder in [
        "csrc",
        "kvcache",
        "packages",
        "tools",
        "tests",
        "benchmarks",
        "docs",
        "examples",
    ]:
        for path in (REPO / folder).rglob("*"):
            if path.suffix in {".h", ".cpp", ".cu", ".py", ".md"}:
                wanted.append(str(path.relative_to(REPO)))
    wanted = [name for name in wanted if not name.startswith("kvcache/csrc")]
    assert len(wanted) > 80
    assert not [name for name in wanted if not (checkout / name).is_file()]
    assert not list(checkout.rglob("*.so"))


@pytest.mark.slow
def test_first_use_builds_in_one_process_while_others_wait(built):
    for out, err in built:
        assert out.endswith("works\n"), err
    said = built[0][1] + built[1][1]
    for name in ("_core", "libkvcache_cpu"):
        assert said.count(f"no built {name} found, building it in") == 1


@pytest.mark.slow
def test_later_uses_load_the_built_library(checkout, compiler, built):
    again = run(checkout, USE, compiler=compiler)
    assert again.stdout.endswith("works\n") and "building" not in again.stderr


def without(tmp_path, *tools):
    """Return a PATH without these tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        if not os.path.isdir(place):
            continue
        for name in os.listdir(place):
            if name not in tools and not (folder / name).exists():
                (folder / name).symlink_to(os.path.join(place, name))
    return str(folder)


@pytest.mark.slow
def test_missing_compiler_is_reported(checkout, tmp_path):
    path = without(tmp_path, "g++", "clang++", "c++")
    program, folder = "import kvcache.allocator", str(tmp_path / "j")
    done = run(checkout, program, PATH=path, CXX="", KVCACHE_JIT_DIR=folder)
    assert done.returncode != 0
    assert "no C++ compiler (g++ or clang++ is not on the PATH): install one" in done.stderr
    assert "apt-get install g++" in done.stderr


def test_unwritable_folder_is_reported(checkout, tmp_path):
    (tmp_path / "file").touch()
    done = run(checkout, "import kvcache.allocator", KVCACHE_JIT_DIR=str(tmp_path / "file"))
    assert "set KVCACHE_JIT_DIR" in done.stderr


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o1777])
def test_folder_writable_by_others_is_rejected(monkeypatch, tmp_path, mode):
    monkeypatch.setenv("KVCACHE_JIT_DIR", str(tmp_path))
    tmp_path.chmod(mode)
    with pytest.raises(jit.BuildError, match=rf"mode {mode & 0o777:o}: expected .*chmod go-w"):
        jit.build_core()
    assert [*tmp_path.iterdir()] == []


def test_folder_of_another_user_is_rejected(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCACHE_JIT_DIR", str(tmp_path))
    mine = tmp_path.stat().st_uid
    if mine == 0:
        os.chown(tmp_path, 4321, -1)
    else:
        monkeypatch.setattr(jit.os, "geteuid", lambda: mine + 1)
    with pytest.raises(jit.BuildError, match=r"belongs to user \d+, not user \d+: expected"):
        jit.build_core()


def test_created_folder_is_private(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCACHE_JIT_DIR", str(tmp_path / "made"))
    monkeypatch.setattr(jit.compiler, "build_library", lambda *_: None)
    before = os.umask(0)
    try:
        path = jit._cached("name", "file", tmp_path, [])
    finally:
        os.umask(before)
    assert {each.stat().st_mode & 0o777 for each in (path.parent, path.parent.parent)} == {0o700}


def test_compiler_error_is_shown(checkout, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(checkout / "kvcache", broken / "kvcache")
    (broken / "csrc" / "ops").mkdir(parents=True)
    (broken / "csrc" / "ops" / "library.cpp").touch()  # the file that identifies the sources
    (broken / "csrc" / "core").mkdir()
    (broken / "csrc" / "core" / "broken.cpp").write_text("this is not C++\n")
    program, folder = "import kvcache.allocator", str(tmp_path / "j")
    done = run(broken, program, CXX="", KVCACHE_JIT_DIR=folder)
    assert "building _core failed" in done.stderr and "broken.cpp" in done.stderr


# --- requirements for a build, tested in this process
# ----------------------------------------------


def refused(monkeypatch, tmp_path) -> str:
    """Build the core module, which must fail before the build is announced. Return the error
    message.
    """
    monkeypatch.setenv("KVCACHE_JIT_DIR", str(tmp_path))
    monkeypatch.setattr(jit, "_write", lambda line: pytest.fail(line))
    with pytest.raises(jit.BuildError) as error:
        jit.build_core()
    return str(error.value)


def test_missing_pybind11_is_reported_if_torch_is_also_missing(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    says = refused(monkeypatch, tmp_path)
    assert "building _core failed: the build needs pybind11" in says
    assert "`pip install pybind11`" in says and "torch" not in says


def test_pybind11_of_torch_is_used_if_pybind11_is_not_installed(monkeypatch):
    pytest.importorskip("torch")
    find = importlib.util.find_spec
    only_torch = lambda name, *_: None if name == "pybind11" else find(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", only_torch)
    assert (build.pybind11_include() / "pybind11" / "pybind11.h").is_file()


def test_missing_python_headers_are_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(build.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    says = refused(monkeypatch, tmp_path)
    assert f"headers are missing ({tmp_path / 'none' / 'Python.h'})" in says
    assert "apt-get install python3-dev" in says


def test_error_without_a_home_folder_names_the_variable_to_set(monkeypatch):
    def nobody(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for variable in ("HOME", "KVCACHE_JIT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(jit.BuildError, match=r"no home folder .* set KVCACHE_JIT_DIR"):
        jit.build_core()


@pytest.fixture
def tools(monkeypatch, tmp_path):
    """Return a PATH with only these programs."""
    (tmp_path / "my tools").mkdir()
    for name in ("g++", "clang++", "ccache", "my tools/g++"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(("asked", "command"), [
    ("", ["g++"]),
    ("clang++", ["clang++"]),
    ("ccache g++", ["ccache", "g++"]),
    ("g++ -m64", ["g++", "-m64"]),
    ("ccache g++ -m64 '-DA=b c'", ["ccache", "g++", "-m64", "-DA=b c"]),
    ("{tools}/my tools/g++", ["{tools}/my tools/g++"]),
])  # fmt: skip
def test_cxx_may_contain_a_launcher_and_arguments(monkeypatch, tools, asked, command):
    def absolute(word):
        return word.replace("{tools}", str(tools))

    def found(word):
        return shutil.which(absolute(word))

    monkeypatch.setenv("CXX", absolute(asked))
    assert build.cxx_command()[0] == found(command[0])
    assert build.cxx_command()[1:] == command[1:]


def test_missing_cxx_compiler_is_reported(monkeypatch, tools):
    monkeypatch.setenv("CXX", "icpc -fast")
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler \(icpc -fast is not on the PATH\)"):
        build.cxx_command()
