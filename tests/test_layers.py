"""Imports go downwards only; a package may touch what lies below it and nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import REPO

PACKAGE = REPO / "kvcache"
GROUND = {
    f"kvcache.{name}"
    for name in ("native", "checks", "kinds", "step", "specs", "layouts", "events", "lazy")
}


# Package -> the packages it may import, besides itself and the ground all stand on.
MAY_IMPORT = {
    "kvcache": set(),
    "kvcache.checks": set(),
    "kvcache.lazy": set(),
    "kvcache.kinds": set(),
    "kvcache.step": set(),
    "kvcache.specs": set(),
    "kvcache.events": set(),
    "kvcache.memory_plan": set(),
    "kvcache.layouts": set(),
    "kvcache.native": set(),
    "kvcache.ops": {"kvcache.ops_by_copies"},
    "kvcache.ops_by_copies": set(),
    "kvcache.allocator": set(),
    "kvcache.router_events": {"kvcache.allocator"},
    "kvcache.worker": {"kvcache.memory_plan", "kvcache.ops", "kvcache.ops_by_copies"},
    "kvcache.assembly": {"kvcache.allocator", "kvcache.memory_plan", "kvcache.worker"},
    "kvcache.serving": {"kvcache.allocator", "kvcache.assembly", "kvcache.worker"},
    "kvcache.integrations": {
        *("kvcache.allocator", "kvcache.assembly", "kvcache.memory_plan", "kvcache.serving"),
        *("kvcache.disaggregation", "kvcache.transfer", "kvcache.worker"),
    },
    "kvcache.disaggregation": {
        *("kvcache.allocator", "kvcache.memory_plan", "kvcache.transfer", "kvcache.worker"),
    },
    "kvcache.transfer": {"kvcache.ops", "kvcache.ops_by_copies", "kvcache.worker"},
    "kvcache.replay": {
        *("kvcache.allocator", "kvcache.disaggregation", "kvcache.store", "kvcache.transfer"),
        "kvcache.worker",
    },
    "kvcache.store": {"kvcache.allocator", "kvcache.worker"},
    "kvcache.demo": {"kvcache.integrations", "kvcache.memory_plan", "kvcache.serving"},
    "kvcache.metrics": {"kvcache.allocator"},
    "kvcache.serve": {"kvcache.metrics", "kvcache.router_events", "kvcache.serving"},
    "kvcache.cli": {
        *("kvcache", "kvcache.allocator", "kvcache.demo", "kvcache.integrations", "kvcache.replay"),
        "kvcache.serve",
        *("kvcache.router_events", "kvcache.serving", "kvcache.worker"),
    },
    "kvcache.__main__": {"kvcache.cli"},
}
TORCH_FREE = {
    "kvcache",
    "kvcache.lazy",
    "kvcache.checks",
    "kvcache.kinds",
    "kvcache.step",
    "kvcache.specs",
    "kvcache.events",
    "kvcache.memory_plan",
    "kvcache.allocator",
    "kvcache.router_events",
    "kvcache.metrics",
    "kvcache.native",
    "kvcache.layouts",
    "kvcache.cli",
}
# In a package that otherwise needs torch: modules that do without it.
TORCH_FREE_MODULES = {
    "kvcache.disaggregation",
    "kvcache.disaggregation.connector",
    "kvcache.disaggregation.layout",
    "kvcache.disaggregation.leases",
    "kvcache.disaggregation.offer",
    "kvcache.disaggregation.options",
    "kvcache.disaggregation.steps",
    "kvcache.transfer",
    "kvcache.transfer.connector.aggregate",
    "kvcache.transfer.connector.cache_events",
    "kvcache.transfer.description",
    "kvcache.transfer.plan.fragments",
    "kvcache.transfer.fetching",
    "kvcache.transfer.plan.patterns",
    "kvcache.transfer.plan.token_range",
    "kvcache.transfer.plan.transfer_plan",
    "kvcache.transfer.connector.requests",
    "kvcache.transfer.sharding",
    "kvcache.transfer.states",
    "kvcache.transfer.transport.base",
    "kvcache.transfer.transport.spans",
    "kvcache.transfer.topology",
    "kvcache.store",
    "kvcache.store.base",
    "kvcache.store.circuit",
    "kvcache.store.identity",
    "kvcache.store.prefixes",
    "kvcache.store.stats",
    "kvcache.store.values",
    "kvcache.store.writes",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def is_torch_free(module: str) -> bool:
    return package_of(module) in TORCH_FREE or module in TORCH_FREE_MODULES


def imports_of(path: Path):
    """(module, whether at import time) for every import, also those inside functions."""
    tree = ast.parse(path.read_text())
    parents = {c: node for node in ast.walk(tree) for c in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
            if node.module == "kvcache":
                names = [f"kvcache.{alias.name}" for alias in node.names]
        else:
            continue
        at_import = True
        above = parents.get(node)
        while above is not None:
            lazy = isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef)
            typing_only = isinstance(above, ast.If) and "TYPE_CHECKING" in ast.dump(above.test)
            at_import &= not (lazy or typing_only)
            above = parents.get(above)
        yield from ((name, at_import) for name in names)


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_downwards(path):
    package = package_of(module_name(path))
    allowed = MAY_IMPORT[package] | {package}
    for name, _ in imports_of(path):
        if not name.startswith("kvcache"):
            continue
        target = package_of(name)
        below = target in allowed or target in GROUND
        assert below, f"{path.relative_to(REPO)} imports {name}: {package} may not import {target}"


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_the_control_plane_does_not_name_torch(path):
    if is_torch_free(module_name(path)):
        assert not [
            n for n, at_import in imports_of(path) if at_import and n.split(".")[0] == "torch"
        ]


@pytest.mark.parametrize("module", sorted(TORCH_FREE_MODULES))
def test_modules_without_torch_import_none_that_needs_it(module):
    (path,) = [p for p in FILES if module_name(p) == module]
    for name, at_import in imports_of(path):
        free = is_torch_free(name)
        assert free or not at_import or not name.startswith("kvcache"), name


def test_core_has_no_torch_and_no_cuda():
    for path in [p for package in ("core", "worker") for p in (REPO / "csrc" / package).rglob("*")]:
        if path.suffix in {".h", ".cpp"}:
            text = path.read_text()
            assert "#include <torch" not in text and "cuda" not in text.replace("no CUDA", "")


WITHOUT_TORCH = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch' (blocked)", name="torch")
sys.meta_path.insert(0, Blocked())
from kvcache import BlockPool, BlockSpaceManager, KVCacheManager, Request, StepPlan, hash_blocks
manager = KVCacheManager(16, 100, 1000)
request = Request("a", range(40))
plan = manager.step(new=[request])
assert plan.append_ids[0].size and isinstance(plan, StepPlan)
manager.free(request)
assert manager.get_computed_blocks(request)[1] == 32
assert hash_blocks(range(40), 16).shape == (2, 32) and BlockPool(4).num_free == 3
assert BlockSpaceManager(16, 100, 0).get_num_free_gpu_blocks() == 99
from kvcache.transfer import KVOutputAggregator, KVTopology, choose_layout, yield_req_data
from kvcache.transfer import CacheDescription, plan_transfer
assert choose_layout("HND") == "HND" and KVOutputAggregator(2).aggregate([None, None]) is None
topology = KVTopology("a", tp_rank=1, tp_size=4, total_num_kv_heads=8)
assert topology.heads == range(2, 4) and topology.get_target_remote_ranks(2) == [(0, 0, 0)]
cache = CacheDescription(
    engine_id="a", num_layers=2, total_num_kv_heads=2, head_size=8, block_size=4
)
assert plan_transfer(cache, cache, 0).num_fragments == 4
assert "torch" not in sys.modules
import importlib
for package, name in ("kvcache", "BlockTable"), ("kvcache.transfer", "copy_kv_blocks"):
    try:
        getattr(importlib.import_module(package), name)
    except ModuleNotFoundError as error:
        assert error.name == "torch"
    else:
        raise AssertionError(f"{name} imported without torch")
print("works")
"""


def test_the_control_plane_works_where_torch_is_not_installed():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.stdout == "works\n", done.stderr
