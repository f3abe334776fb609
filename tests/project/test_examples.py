# SPDX-License-Identifier: Apache-2.0
"""Runs the examples in `examples/` and in docstrings."""

import doctest
import importlib
import json

import pytest

from tests.machinery.forked import run_code
from tests.machinery.shared import REPO

DOCUMENTED = [
    "kvcache.assembly", "kvcache.kinds", "kvcache.allocator.hashing", "kvcache.allocator.manager",
    "kvcache.allocator.prefix_cache", "kvcache.allocator.request",
    "kvcache.compat.ascend_block_table", "kvcache.compat.block_space_manager",
    "kvcache.compat.block_space_manager.manager", "kvcache.compat.kv_cache_manager",
    "kvcache.compat.kv_transfer", "kvcache.compat.vllm_block_table", "kvcache.memory_plan",
    "kvcache.metrics", "kvcache_exchange.router_events.publisher",
    "kvcache_exchange.router_events.subscriber", "kvcache.specs",
    "kvcache_serve.engine.transformers.layer_shapes",
    "kvcache_serve.engine.transformers.paged_model", "kvcache_serve.engine.batch",
    "kvcache_serve.engine.drafters", "kvcache_serve.engine.engine",
    "kvcache_serve.engine.scheduler", "kvcache.compat.kv_transfer.aggregate",
    "kvcache.compat.kv_transfer.cache_events", "kvcache.transfer.description", "kvcache.layouts",
    "kvcache.placement", "kvcache.transfer.memory", "kvcache.transfer.plan.transfer_plan",
    "kvcache.compat.kv_transfer.postprocess", "kvcache.compat.kv_transfer.connector_calls",
    "kvcache.transfer.sharding", "kvcache.compat.kv_transfer.topology", "kvcache.worker.worker",
    "kvcache.worker.tables.attention_metadata", "kvcache.worker.tables.block_tables",
    "kvcache.worker.pages.storage",
]  # fmt: skip


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
    names = {**vars(importlib.import_module("kvcache")), **own}
    for public in (
        "KVCacheManager",
        "Request",
        "BlockPool",
        "GroupSpec",
        "KVStorage",
        "GroupTable",
        "BlockTables",
        "np",
    ):
        source = importlib.import_module("kvcache") if public != "np" else None
        names[public] = getattr(source, public) if source else importlib.import_module("numpy")
    failed, attempted = doctest.testmod(module, extraglobs={**names, **own})
    assert attempted > 0 and failed == 0
