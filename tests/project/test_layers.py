# SPDX-License-Identifier: Apache-2.0
"""Checks that imports only go downwards: a package may import only the layers below it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machinery.shared import REPO

PACKAGE = REPO / "kvcache"

# Listed from the inside out. A ring may import only from itself and from earlier rings.
RINGS = {
    "ground": {
        *("kvcache.checks", "kvcache.lazy", "kvcache.kinds", "kvcache.step", "kvcache.specs"),
        *("kvcache.events", "kvcache.layouts", "kvcache.native", "kvcache.placement"),
        "kvcache.extensions",
    },
    "embedded": {
        *("kvcache", "kvcache.allocator", "kvcache.memory_plan", "kvcache.ops", "kvcache.worker"),
        *(
            "kvcache.ops_by_copies",
            "kvcache.assembly",
            "kvcache.transfer",
            "kvcache_exchange.router_events",
        ),
        *("kvcache_exchange.disaggregation", "kvcache_exchange.store", "kvcache.sources"),
        *("kvcache_exchange.peers", "kvcache_exchange.hints"),
        *("kvcache.metrics", "kvcache_exchange.tracing", "kvcache.sanitizer"),
    },
    "compat": {"kvcache.compat"},
    "engine": {"kvcache_serve.engine", "kvcache_serve.engine.transformers", "kvcache_serve.server"},
    "plugins": {
        *("kvcache.plugins", "kvcache_vllm", "kvcache_vllm.sanitizer"),
        *("kvcache_sglang.sanitizer", "kvcache_sglang"),
        "kvcache_exchange.plugins",
    },
    "laboratory": {"kvcache_lab", "kvcache_serve.demo", "kvcache.cli", "kvcache.__main__"},
}
GROUND = RINGS["ground"]

# Maps each package to the packages that it may import in addition to itself and the ground ring.
MAY_IMPORT = {
    "kvcache": set(),
    "kvcache.checks": set(),
    "kvcache.lazy": set(),
    "kvcache.extensions": set(),
    "kvcache.kinds": set(),
    "kvcache.step": set(),
    "kvcache.specs": set(),
    "kvcache.events": set(),
    "kvcache.memory_plan": set(),
    "kvcache.layouts": set(),
    "kvcache.placement": set(),
    "kvcache.native": set(),
    "kvcache.ops": {"kvcache.ops_by_copies"},
    "kvcache.ops_by_copies": set(),
    "kvcache.allocator": set(),
    "kvcache_exchange.router_events": {"kvcache.allocator"},
    "kvcache.worker": {"kvcache.memory_plan", "kvcache.ops", "kvcache.ops_by_copies"},
    "kvcache.assembly": {"kvcache.allocator", "kvcache.memory_plan", "kvcache.worker"},
    "kvcache.transfer": {"kvcache.ops", "kvcache.ops_by_copies", "kvcache.worker"},
    "kvcache.metrics": {"kvcache.allocator"},
    "kvcache_exchange.tracing": {"kvcache.allocator", "kvcache.sources", "kvcache.worker"},
    "kvcache.sanitizer": set(),
    "kvcache.sources": {"kvcache.allocator"},
    "kvcache_exchange.hints": {"kvcache.allocator", "kvcache.sources"},
    "kvcache_exchange.disaggregation": {
        *(
            "kvcache.sources",
            "kvcache.allocator",
            "kvcache.memory_plan",
            "kvcache.transfer",
            "kvcache.worker",
        ),
    },
    "kvcache_exchange.store": {"kvcache.allocator", "kvcache.sources", "kvcache.worker"},
    "kvcache_exchange.peers": {
        *("kvcache.allocator", "kvcache_exchange.router_events", "kvcache.sources"),
        *("kvcache_exchange.disaggregation", "kvcache_exchange.store"),
    },
    "kvcache.compat": {
        *("kvcache.allocator", "kvcache.ops", "kvcache.transfer", "kvcache.worker"),
    },
    "kvcache_serve.engine": {
        *("kvcache.allocator", "kvcache.assembly", "kvcache.sources", "kvcache.worker"),
        *("kvcache.sanitizer", "kvcache_exchange.hints"),
    },
    "kvcache_serve.engine.transformers": {
        *("kvcache.allocator", "kvcache.assembly", "kvcache_serve.engine", "kvcache.memory_plan"),
        "kvcache.worker",
    },
    "kvcache_serve.server": {
        *("kvcache", "kvcache_serve.engine", "kvcache.metrics", "kvcache_exchange.router_events"),
        *("kvcache.sanitizer", "kvcache_exchange.hints"),
        *("kvcache.allocator", "kvcache.sources", "kvcache_exchange.disaggregation"),
        "kvcache_exchange.peers",
    },
    "kvcache.plugins": set(),
    "kvcache_exchange.plugins": {
        *("kvcache_exchange.disaggregation", "kvcache.transfer", "kvcache.worker"),
    },
    "kvcache_sglang": {
        *("kvcache.plugins", "kvcache_exchange.plugins", "kvcache.sources"),
        *("kvcache_exchange.disaggregation", "kvcache_exchange.store", "kvcache.transfer"),
    },
    "kvcache_vllm": {
        *("kvcache", "kvcache.allocator", "kvcache.sources", "kvcache_exchange.disaggregation"),
        *("kvcache.transfer", "kvcache.worker", "kvcache_exchange.plugins"),
    },
    "kvcache_vllm.sanitizer": {"kvcache.plugins", "kvcache.sanitizer"},
    "kvcache_sglang.sanitizer": {"kvcache.plugins", "kvcache.sanitizer"},
    "kvcache_lab": {
        *("kvcache.allocator", "kvcache_exchange.disaggregation", "kvcache_exchange.store"),
        *("kvcache.sources", "kvcache.transfer", "kvcache.worker", "kvcache_exchange.hints"),
    },
    "kvcache_serve.demo": {
        *("kvcache_serve.engine", "kvcache_serve.engine.transformers", "kvcache.memory_plan"),
    },
    "kvcache.cli": {
        *(
            "kvcache",
            "kvcache.allocator",
            "kvcache.assembly",
            "kvcache_serve.demo",
            "kvcache_serve.engine",
        ),
        "kvcache_exchange.tracing",
        "kvcache_lab",
        *(
            "kvcache_serve.engine.transformers",
            "kvcache_exchange.router_events",
            "kvcache_serve.server",
        ),
        *("kvcache.sources", "kvcache_exchange.disaggregation", "kvcache_exchange.store"),
        "kvcache_exchange.peers",
        *("kvcache.worker", "kvcache_vllm", "kvcache.sanitizer"),
    },
    "kvcache.__main__": {"kvcache.cli"},
}
TORCH_FREE = {
    "kvcache",
    "kvcache.lazy",
    "kvcache.extensions",
    "kvcache.checks",
    "kvcache.kinds",
    "kvcache.step",
    "kvcache.specs",
    "kvcache.events",
    "kvcache.memory_plan",
    "kvcache.allocator",
    "kvcache_exchange.router_events",
    "kvcache.metrics",
    "kvcache.native",
    "kvcache.sanitizer",
    "kvcache.layouts",
    "kvcache.placement",
    "kvcache.cli",
}
# Modules that do not need torch, in packages that otherwise do.
TORCH_FREE_MODULES = {
    "kvcache.sources",
    "kvcache.sources.base",
    "kvcache_exchange.identity",
    "kvcache.sources.loads",
    "kvcache_exchange.disaggregation",
    "kvcache_exchange.disaggregation.connector",
    "kvcache_exchange.disaggregation.layout",
    "kvcache_exchange.disaggregation.leases",
    "kvcache_exchange.disaggregation.offer",
    "kvcache_exchange.disaggregation.options",
    "kvcache_exchange.disaggregation.steps",
    "kvcache.transfer",
    "kvcache.compat.aggregate",
    "kvcache.compat.cache_events",
    "kvcache.transfer.description",
    "kvcache.transfer.plan.fragments",
    "kvcache.transfer.fetching",
    "kvcache.transfer.plan.patterns",
    "kvcache.transfer.plan.token_range",
    "kvcache.transfer.plan.transfer_plan",
    "kvcache.compat.requests",
    "kvcache.transfer.sharding",
    "kvcache.transfer.states",
    "kvcache.transfer.transport.base",
    "kvcache.transfer.transport.spans",
    "kvcache.compat.topology",
    "kvcache_exchange.store",
    "kvcache_exchange.store.base",
    "kvcache_exchange.circuit",
    "kvcache_exchange.store.identity",
    "kvcache_exchange.store.prefixes",
    "kvcache_exchange.store.stats",
    "kvcache_exchange.store.value_format",
    "kvcache_exchange.store.writes",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(REPO).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_of(module: str) -> str:
    """Return the longest entry of `MAY_IMPORT` that contains the module."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(min(len(parts), 3), 0, -1))
    return next((name for name in names if name in MAY_IMPORT and "." in name), parts[0])


def is_torch_free(module: str) -> bool:
    return package_of(module) in TORCH_FREE or module in TORCH_FREE_MODULES


def imports_of(path: Path):
    """Yield (module, is_at_import_time) for every import in a file, even inside functions."""
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


def imported_modules(path: Path):
    """Return every module that a file imports, including imports inside functions and for type
    checkers.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found = {
                n
                for n in names
                if (PACKAGE.parent / n.replace(".", "/")).with_suffix(".py").exists()
            }
            packages = {n for n in names if (PACKAGE.parent / n.replace(".", "/")).is_dir()}
            yield from found | packages or {node.module}


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.slow
def test_imports_go_downwards():
    for path in FILES:
        package = package_of(module_name(path))
        allowed = MAY_IMPORT[package] | {package} | GROUND
        for name, _ in imports_of(path):
            is_below = not name.startswith("kvcache") or package_of(name) in allowed
            assert is_below, f"{path.relative_to(REPO)}: {package} may not import {name}"


def test_no_ring_may_import_an_outer_ring():
    order = {package: i for i, ring in enumerate(RINGS.values()) for package in ring}
    assert set(order) == set(MAY_IMPORT)
    for package, allowed in MAY_IMPORT.items():
        for target in allowed - {"kvcache"}:
            assert order[target] <= order[package], f"{package} may import {target}, an outer layer"


@pytest.mark.slow
def test_imports_contain_no_cycles():
    modules = {module_name(path) for path in FILES}
    imported = {}
    for path in FILES:
        module = module_name(path)
        imported[module] = {m for m in imported_modules(path) if m in modules} - {module}
    while free := [m for m, targets in imported.items() if not targets & imported.keys()]:
        for module in free:
            del imported[module]
    assert not imported, f"import cycle among {sorted(imported)}"


@pytest.mark.slow
def test_no_two_classes_share_a_name():
    found = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module_name(path))
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}


@pytest.mark.slow
def test_control_plane_does_not_mention_torch():
    for path in FILES:
        if is_torch_free(module_name(path)):
            names = [name for name, at_import in imports_of(path) if at_import]
            assert not [n for n in names if n.split(".")[0] == "torch"], path


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
from kvcache import BlockPool, KVCacheManager, Request, StepPlan, hash_blocks
from kvcache.compat import BlockSpaceManager
manager = KVCacheManager(16, 100, 1000)
request = Request("a", range(40))
plan = manager.step(new=[request])
assert plan.append_ids[0].size and isinstance(plan, StepPlan)
manager.free(request)
assert manager.cache.find_prefix(request).num_tokens == 32
assert hash_blocks(range(40), 16).shape == (2, 32) and BlockPool(4).num_free == 3
assert BlockSpaceManager(16, 100, 0).get_num_free_gpu_blocks() == 99
from kvcache.transfer import choose_layout
from kvcache.compat import KVOutputAggregator, KVTopology, yield_req_data
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
for package, name in ("kvcache", "BlockTables"), ("kvcache.compat", "copy_kv_blocks"):
    try:
        getattr(importlib.import_module(package), name)
    except ModuleNotFoundError as error:
        assert error.name == "torch"
    else:
        raise AssertionError(f"{name} imported without torch")
print("works")
"""


def test_control_plane_works_without_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.stdout == "works\n", done.stderr
