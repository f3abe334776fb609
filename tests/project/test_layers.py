# SPDX-License-Identifier: Apache-2.0
"""Checks that imports only go downwards, and that packages import only public names of the kernel."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.machinery import roots
from tests.machinery.shared import REPO

GROUND = {
    *("kvcache.checks", "kvcache.lazy", "kvcache.kinds", "kvcache.step", "kvcache.specs"),
    *("kvcache.events", "kvcache.layouts", "kvcache.native", "kvcache.placement"),
    *("kvcache.extensions", "kvcache.formats", "kvcache._core"),
}
EXCHANGE = {
    *("kvcache_exchange", "kvcache_exchange.transport", "kvcache_exchange.router_events"),
    *("kvcache_exchange.hints", "kvcache_exchange.store", "kvcache_exchange.disaggregation"),
    *("kvcache_exchange.peers", "kvcache_exchange.plugins", "kvcache_exchange.tracing"),
    "kvcache_exchange.cli",
}

# Maps each room to the rooms that it may import in addition to itself and the ground ring, from the
# inside out. Packages may also import the kernel.
MAY_IMPORT = {
    **{room: set() for room in GROUND},
    "kvcache": set(),
    "kvcache.memory_plan": set(),
    "kvcache.ops_by_copies": set(),
    "kvcache.ops": {"kvcache.ops_by_copies"},
    "kvcache.allocator": set(),
    "kvcache.worker": {"kvcache.memory_plan", "kvcache.ops", "kvcache.ops_by_copies"},
    "kvcache.assembly": {"kvcache.allocator", "kvcache.memory_plan", "kvcache.worker"},
    "kvcache.transfer": {"kvcache.ops", "kvcache.ops_by_copies", "kvcache.worker"},
    "kvcache.metrics": {"kvcache.allocator"},
    "kvcache.sanitizer": set(),
    "kvcache.sources": {"kvcache.allocator"},
    "kvcache.compat": {*("kvcache.allocator", "kvcache.ops", "kvcache.transfer", "kvcache.worker")},
    "kvcache.cli": {"kvcache", "kvcache.allocator"},
    "kvcache.__main__": {"kvcache.cli"},
    "kvcache_exchange": set(),
    "kvcache_exchange.transport": set(),
    "kvcache_exchange.router_events": set(),
    "kvcache_exchange.tracing": set(),
    "kvcache_exchange.hints": set(),
    "kvcache_exchange.store": {"kvcache_exchange"},
    "kvcache_exchange.disaggregation": {"kvcache_exchange", "kvcache_exchange.transport"},
    "kvcache_exchange.peers": {
        *("kvcache_exchange.router_events", "kvcache_exchange.disaggregation"),
        "kvcache_exchange.store",
    },
    "kvcache_exchange.plugins": {"kvcache_exchange.disaggregation", "kvcache_exchange.transport"},
    "kvcache_exchange.cli": EXCHANGE,
    "kvcache_serve": set(),
    "kvcache_serve.engine": {"kvcache_exchange.hints", "kvcache_exchange.plugins"},
    "kvcache_serve.engine.transformers": {"kvcache_serve.engine"},
    "kvcache_serve.server": {"kvcache_serve.engine", *EXCHANGE},
    "kvcache_serve.demo": {"kvcache_serve.engine", "kvcache_serve.engine.transformers"},
    "kvcache_serve.cli": {
        *("kvcache_serve", "kvcache_serve.engine", "kvcache_serve.engine.transformers"),
        *("kvcache_serve.server", "kvcache_serve.demo", *EXCHANGE),
    },
    "kvcache_lab": EXCHANGE,
    "kvcache_lab.cli": {"kvcache_lab", *EXCHANGE},
    "kvcache_sglang": EXCHANGE,
    "kvcache_sglang.sanitizer": {"kvcache_exchange.plugins", "kvcache_sglang"},
    "kvcache_vllm": EXCHANGE,
    "kvcache_vllm.sanitizer": {"kvcache_exchange.plugins"},
}
KERNEL = {room for room in MAY_IMPORT if room.split(".")[0] == "kvcache"}
# Modules of the kernel whose names without an underscore are public, in addition to the names in
# `__all__` of `kvcache` and its packages.
PUBLIC_MODULES = {
    *("kvcache.checks", "kvcache.lazy", "kvcache.extensions", "kvcache.metrics"),
    *("kvcache.step", "kvcache.specs", "kvcache.events", "kvcache.layouts", "kvcache.placement"),
    *("kvcache.ops", "kvcache.memory_plan", "kvcache.assembly", "kvcache.kinds"),
    *("kvcache.cli.errors", "kvcache.cli.output", "kvcache.cli.parts", "kvcache.formats"),
}
# These names are public, too, but only packages on top of the kernel need them.
FOR_PACKAGES = REPO / "docs" / "reference" / "packages.md"
# What works without torch. Other modules of `kvcache.transfer` and of the exchange need it.
WITHOUT_TORCH = [
    *("kvcache", "kvcache.lazy", "kvcache.extensions", "kvcache.checks", "kvcache.kinds"),
    *("kvcache.step", "kvcache.specs", "kvcache.formats", "kvcache.events", "kvcache.memory_plan"),
    *("kvcache.allocator", "kvcache.metrics", "kvcache.native", "kvcache.sanitizer"),
    *("kvcache.layouts", "kvcache.placement", "kvcache.cli", "kvcache.sources", "kvcache.transfer"),
    *("kvcache.sources.loads", "kvcache.transfer.fetching", "kvcache.transfer.plan.token_range"),
    *("kvcache.transfer.plan.transfer_plan", "kvcache.transfer.states"),
    *("kvcache.transfer.transport.base", "kvcache.compat.kv_transfer.aggregate"),
    *("kvcache.compat.kv_transfer.cache_events", "kvcache.compat.kv_transfer.connector_calls"),
    *("kvcache.compat.kv_transfer.topology", "kvcache_exchange", "kvcache_exchange.router_events"),
    *("kvcache_exchange.disaggregation", "kvcache_exchange.disaggregation.connector"),
    *("kvcache_exchange.disaggregation.leases", "kvcache_exchange.disaggregation.steps"),
    *("kvcache_exchange.store", "kvcache_exchange.store.identity", "kvcache_exchange.store.writes"),
    *("kvcache_exchange.store.prefixes", "kvcache_exchange.store.value_format"),
    *("kvcache_exchange.store.base", "kvcache_exchange.store.stats", "kvcache_exchange.circuit"),
]


def room_of(module: str) -> str:
    """Return the longest entry of `MAY_IMPORT` that contains the module, or its package."""
    parts = module.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((name for name in names if name in MAY_IMPORT), parts[0])


def imports_of(path: Path):
    """Yield the modules that a file imports, even inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "kvcache":
            yield from (f"kvcache.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def imported_modules(path: Path, modules: Collection[str]):
    """Return the modules of `modules` that a file imports, even inside functions and for type
    checkers.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & {*modules}) or {node.module}
    return found & {*modules}


FILES = roots.files(".py")
FILES_OF_PACKAGES = roots.files(".py", roots.SOURCES[1:])


@pytest.mark.slow
def test_imports_go_downwards():
    for path in FILES:
        room = room_of(roots.module_name(path))
        allowed = MAY_IMPORT[room] | {room} | (GROUND if room in KERNEL else KERNEL)
        for name in imports_of(path):
            is_below = not name.startswith("kvcache") or room_of(name) in allowed
            assert is_below, f"{path.relative_to(REPO)}: {room} may not import {name}"


def test_no_room_may_import_an_outer_room():
    order = list(MAY_IMPORT)
    for room, allowed in MAY_IMPORT.items():
        for target in allowed - {"kvcache"}:
            assert order.index(target) <= order.index(room), f"{room} may import {target}"


def names_for_packages() -> set[str]:
    """Return the names that the reference lists for packages on top of the kernel."""
    return set(re.findall(r"^::: ([\w.]+)$", FOR_PACKAGES.read_text(), re.MULTILINE))


def kernel_names_in(path: Path):
    """Yield the full name of each name that a file imports from the kernel."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "kvcache")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kvcache":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_public(name: str) -> bool:
    """Return whether a package may import a name of the kernel."""
    module, _, last = name.rpartition(".")
    if name == "kvcache" or last.startswith("_"):
        return name in ("kvcache", "kvcache.__version__")
    if name in PUBLIC_MODULES or module in PUBLIC_MODULES or name in names_for_packages():
        return True
    package = importlib.import_module(module)
    return last in getattr(package, "__all__", ())


def test_packages_import_only_public_names_of_the_kernel():
    found = {(name, path.name) for path in FILES_OF_PACKAGES for name in kernel_names_in(path)}
    assert found and not {(name, path) for name, path in found if not is_public(name)}


def test_no_string_of_the_kernel_names_a_module_of_a_package():
    """Lazy tables and `import_module` would import a package without an import statement."""
    for path in roots.files(".py", roots.SOURCES[:1]):
        tree = ast.parse(path.read_text())
        strings = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
        prose = {each for each in strings if isinstance(each, str) and " " in each}
        named = [
            s for s in strings - prose if isinstance(s, str) and re.match(r"kvcache_[a-z]+\.", s)
        ]
        assert not named, path


def test_packages_log_below_the_logger_of_the_kernel():
    """Users set the level of all messages through the logger `kvcache`."""
    for path in FILES_OF_PACKAGES:
        names = re.findall(r"getLogger\((?!name)(.*?)\)", path.read_text())
        assert all(name.startswith(('"kvcache', '"uvicorn', '"vllm.kvcache')) for name in names), (
            path
        )


def test_names_listed_for_packages_are_imported_by_one_and_not_public_otherwise():
    used = {name for path in FILES_OF_PACKAGES for name in kernel_names_in(path)}
    assert names_for_packages() <= used
    for name in names_for_packages():
        module, _, last = name.rpartition(".")
        package = importlib.import_module(".".join(module.split(".")[:2]))
        assert last not in getattr(package, "__all__", ()), name


def test_imports_contain_no_cycles():
    benchmarks = sorted((REPO / "benchmarks").rglob("*.py"))
    names = {path: roots.module_name(path) for path in FILES} | {
        path: ".".join(path.relative_to(REPO).with_suffix("").parts).removesuffix(".__init__")
        for path in benchmarks
    }
    modules = {*names.values()}
    imported = {name: imported_modules(path, modules) - {name} for path, name in names.items()}
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
                found.setdefault(node.name, []).append(roots.module_name(path))
    assert not {name: modules for name, modules in found.items() if len(modules) > 1}


def test_core_has_no_torch_and_no_cuda():
    for path in [p for package in ("core", "worker") for p in (REPO / "csrc" / package).rglob("*")]:
        if path.suffix in {".h", ".cpp"}:
            text = path.read_text()
            assert "#include <torch" not in text and "cuda" not in text.replace("no CUDA", "")


PROGRAM = """
import importlib, sys
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
assert topology.get_target_remote_ranks(2) == [(0, 0, 0)]
cache = CacheDescription(
    engine_id="a", num_layers=2, total_num_kv_heads=2, head_size=8, block_size=4
)
assert plan_transfer(cache, cache, 0).num_fragments == 2
for module in sys.argv[1:]:
    importlib.import_module(module)
assert "torch" not in sys.modules
for package, name in ("kvcache", "BlockTables"), ("kvcache.compat", "copy_kv_blocks"):
    try:
        getattr(importlib.import_module(package), name)
    except ModuleNotFoundError as error:
        assert error.name == "torch"
    else:
        raise AssertionError(f"{name} imported without torch")
print(*(name for name in sys.modules if name.startswith("kvcache")))
"""


@functools.cache
def modules_without_torch() -> set[str]:
    """Return the modules that a process without torch has imported."""
    command = [sys.executable, "-c", PROGRAM, *WITHOUT_TORCH]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_control_plane_works_without_torch():
    assert modules_without_torch() >= {*WITHOUT_TORCH}


def private_names_in(path: Path):
    """Yield what a file reads of other objects' private names."""
    # Of named tuples, and what we add to vLLM's objects.
    own = {"_replace", "_fields", "_kvcache_request"}
    attribute_functions = ("getattr", "hasattr", "setattr")
    for node in ast.walk(ast.parse(path.read_text())):
        name = None
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in ("self", "cls"):
            name = node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in attribute_functions:
            name = str(getattr(node.args[1], "value", ""))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
            yield from (each.name for each in node.names if each.name.startswith("_"))
        if name and name.startswith("_") and not name.startswith("__") and name not in own:
            yield name


def test_private_names_of_vllm_are_read_where_the_reasons_are():
    plugin = REPO / "packages/kvcache-vllm/src/kvcache_vllm"
    with_reasons = {plugin / each for each in ("private.py", "steady.py", "sanitizer/runners.py")}
    found = {
        (str(path.relative_to(plugin)), name)
        for path in plugin.rglob("*.py")
        for name in private_names_in(path)
        if path not in with_reasons
    }
    assert not found
    assert "_jobs" in {*private_names_in(plugin / "private.py")}
