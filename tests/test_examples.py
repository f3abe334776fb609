"""Runs the examples in examples/ and in docstrings."""

import doctest
import importlib
import subprocess
import sys

import pytest

from tests.shared import REPO

DOCUMENTED = [
    "kvcache.assembly",
    "kvcache.kinds",
    "kvcache.allocator.hashing",
    "kvcache.allocator.manager",
    "kvcache.allocator.request",
    "kvcache.allocator.sequences.block_space_manager",
    "kvcache.memory_plan",
    "kvcache.metrics",
    "kvcache.router_events.publisher",
    "kvcache.router_events.subscriber",
    "kvcache.specs",
    "kvcache.integrations.transformers.layer_shapes",
    "kvcache.integrations.transformers.paged_model",
    "kvcache.replay.disaggregation",
    "kvcache.serving.batch",
    "kvcache.serving.drafters",
    "kvcache.serving.engine",
    "kvcache.serving.scheduler",
    "kvcache.transfer.connector.aggregate",
    "kvcache.transfer.connector.cache_events",
    "kvcache.transfer.description",
    "kvcache.layouts",
    "kvcache.transfer.memory",
    "kvcache.transfer.plan.transfer_plan",
    "kvcache.transfer.receive",
    "kvcache.transfer.connector.requests",
    "kvcache.transfer.sharding",
    "kvcache.transfer.topology",
    "kvcache.worker.worker",
    "kvcache.worker.tables.attention_metadata",
    "kvcache.worker.tables.block_table",
    "kvcache.worker.tables.multi_group",
    "kvcache.worker.pages.storage",
]


@pytest.mark.parametrize("path", sorted((REPO / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_run(path):
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", DOCUMENTED)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    names = {**vars(importlib.import_module("kvcache")), **vars(module)}
    for public in (
        "KVCacheManager",
        "Request",
        "BlockPool",
        "GroupSpec",
        "KVStorage",
        "BlockTable",
        "MultiGroupBlockTable",
        "np",
    ):
        source = importlib.import_module("kvcache") if public != "np" else None
        names[public] = getattr(source, public) if source else importlib.import_module("numpy")
    failed, attempted = doctest.testmod(module, extraglobs=names)
    assert attempted > 0 and failed == 0
