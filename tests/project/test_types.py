# SPDX-License-Identifier: Apache-2.0
"""Public types: the type checker's findings in example callers, and stubs that match the code."""

import ast
import importlib
import inspect
import re
import subprocess
import sys

import pytest

from kvcache import KVCacheManager
from tests.machinery import roots
from tests.machinery.pages import code_of
from tests.machinery.shared import REPO, sampled

PACKAGE, TYPED = REPO / "kvcache", REPO / "tests" / "machinery" / "typed"
STUBS = roots.files(".pyi")


@pytest.fixture(
    scope="module",
    params=sampled([str(TYPED / "without_torch.ini"), ""]),
    ids=["without torch", "with torch"],
)
def found(request):
    """Return the lines that `mypy --strict` prints for both example callers.

    With `without_torch.ini`, tensors have the type Any.
    """
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    command += ["--follow-imports=silent", "--explicit-package-bases"]
    command += [f"--config-file={request.param}", f"--cache-dir={REPO / 'build' / 'mypy'}"]
    files = [str(TYPED / name) for name in ("caller.py", "mistakes.py")]
    done = subprocess.run([*command, *files], capture_output=True, text=True, cwd=REPO)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_stubs_and_a_file_without_mistakes_pass(found):
    assert [line for line in found if "mistakes.py" not in line] == []


@pytest.mark.slow
def test_engine_of_the_documentation_passes_the_type_checker(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "own_engine.py").write_text(code_of(REPO / "docs" / "own_engine.md"))
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary"]
    command += [f"--cache-dir={REPO / 'build' / 'mypy'}", str(tmp_path / "own_engine.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_common_mistakes_are_detected_by_the_type_checker(found):
    text = (TYPED / "mistakes.py").read_text()
    expected = {
        (number, kind)
        for number, line in enumerate(text.splitlines(), 1)
        for group in re.findall(r"# error: \[(.*)\]", line)
        for kind in group.split(", ")
    }
    pattern = re.compile(r"mistakes\.py:(\d+): error: .*\[([a-z-]+)\]$")
    came = {(int(m[1]), m[2]) for m in map(pattern.search, found) if m}
    assert came == expected


def signature_of(function):
    """Return (name, is keyword-only, has a default) for each parameter.

    The parameters of native functions are parsed from the docstring.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        first = inspect.getdoc(function).splitlines()[0]
        arguments = re.sub(r"\): \(|\) -> .*", ")", first).partition("(")[2].removesuffix(")")
        native = ast.parse(f"def f({re.sub(r': [^,=]*', '', arguments)}): ...").body[0]
        return arguments_of(native)
    return [
        (p.name, p.kind is p.KEYWORD_ONLY, p.default is not p.empty)
        for p in parameters
        if p.name != "self"
    ]


def arguments_of(node):
    """Return the same tuples for a definition in a stub."""
    plain = [*node.args.posonlyargs, *node.args.args]
    without = len(plain) - len(node.args.defaults)
    found = [(each.arg, False, i >= without) for i, each in enumerate(plain)]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults)
    found += [(each.arg, True, default is not None) for each, default in pairs]
    return [each for each in found if each[0] != "self"]


def module_of(stub):
    return importlib.import_module(roots.module_name(stub))


@pytest.mark.parametrize("stub", STUBS, ids=lambda p: str(p.relative_to(REPO)))
def test_stubs_match_the_modules(stub):
    if "kvcache_vllm" in stub.parts:
        pytest.importorskip("vllm")
    module = module_of(stub)
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.ImportFrom) and stub.name == "__init__.pyi":
            for name in node.names:
                assert hasattr(module, name.asname or name.name), name.name
        elif isinstance(node, ast.FunctionDef):
            assert arguments_of(node) == signature_of(getattr(module, node.name)), node.name
        elif isinstance(node, ast.ClassDef):
            check_class(node, getattr(module, node.name))


def check_class(node, there):
    defined = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    public = {name for name in dir(there) if not name.startswith("_")}
    assert {name for name in defined if name != "__init__"} == public
    for name, each in defined.items():
        if each.decorator_list:
            assert isinstance(inspect.getattr_static(there, name), property), name
        else:
            assert arguments_of(each) == signature_of(getattr(there, name)), name


def test_manager_has_at_most_thirty_public_members():
    """Every author of an engine has to read about each of them. Members that do not concern rows
    belong to `manager.cache` or `manager.pool`.
    """
    assert len([name for name in dir(KVCacheManager) if not name.startswith("_")]) <= 30


def test_wheels_and_source_distributions_have_the_types():
    import tomllib

    assert (PACKAGE / "py.typed").exists()
    project = tomllib.loads((REPO / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["kvcache"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert shipped == {*roots.files(".pyi", [PACKAGE]), PACKAGE / "py.typed"}
    included = "recursive-include kvcache *.pyi py.typed\ngraft packages\n"
    assert included in (REPO / "MANIFEST.in").read_text()


@pytest.mark.parametrize("package", roots.PACKAGES, ids=lambda package: package.name)
def test_wheels_of_packages_have_the_types(package):
    import tomllib

    project = tomllib.loads((package / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["*"]
    (init,) = (package / "src").glob("kvcache_*/__init__.py")
    assert init.with_name("py.typed").exists() and "*.pyi" in patterns and "py.typed" in patterns
