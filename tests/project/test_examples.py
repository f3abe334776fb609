# SPDX-License-Identifier: Apache-2.0
"""Runs the examples in `examples/` and in docstrings."""

import doctest
import importlib
import json

import numpy as np
import pytest

import kvcache
from tests.machinery import roots
from tests.machinery.forked import run_code
from tests.machinery.shared import REPO

# These need their engine, or end in a KeyboardInterrupt, which doctest cannot expect.
LEFT_OUT = ("kvcache_sglang", "kvcache_vllm", "kvcache_serve.engine.signals")
DOCUMENTED = {
    name: path
    for path in roots.files(".py")
    if ">>> " in path.read_text() and not (name := roots.module_name(path)).startswith(LEFT_OUT)
}
# Servers are tested elsewhere: prefill_decode_proxy.py in test_vllm_docs.py.
SERVERS = {"prefill_decode_proxy.py"}
EXAMPLES = [path for path in sorted((REPO / "examples").glob("*.py")) if path.name not in SERVERS]
NOTEBOOKS = sorted((REPO / "examples").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebooks_run_and_are_stored_without_outputs(path, tmp_path):
    pytest.importorskip("kvcache_lab")
    cells = [each for each in json.loads(path.read_text())["cells"] if each["cell_type"] == "code"]
    assert cells and all(not each["outputs"] for each in cells)
    code, errors = run_code(
        "\n".join("".join(each["source"]) for each in cells), tmp_path / "stderr"
    )
    assert code == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(path, tmp_path):
    program = f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')"
    code, errors = run_code(program, tmp_path / "stderr")
    assert code == 0, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_examples_give_the_documented_results(name):
    module = importlib.import_module(name)
    own = {name: getattr(module, name) for name in (*vars(module), *getattr(module, "__all__", ()))}
    names = {each: getattr(kvcache, each) for each in kvcache.__all__} | own | {"np": np}
    failed, attempted = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert failed == 0 and (attempted or "+SKIP" in DOCUMENTED[name].read_text())
