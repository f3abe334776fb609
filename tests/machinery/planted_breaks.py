# SPDX-License-Identifier: Apache-2.0
"""Plants defects, one at a time, and checks that the tests detect each:

    python -m tests.machinery.planted_breaks                  # all; exit code 1 if one is missed
    python -m tests.machinery.planted_breaks demand publisher
    python -m tests.machinery.planted_breaks --list
    python -m tests.machinery.planted_breaks --mutants        # those of mutants.py; names are accepted
    python -m tests.machinery.planted_breaks --sanitizer [--mutants]  # which the sanitizer reports
    python -m tests.machinery.planted_breaks --simulator [--mutants]  # which the simulator finds

There is a defect for each component of the manager, for each op, and for the plans built in Python.
Each defect is planted in `build/planted/tree`, a copy of the checkout with a separate CMake build,
which recompiles only the files that a defect changes. Each defect names test files. The tests in
these files run, except for those marked exhaustive. If these files do not detect a mutant, all
other files are run as well, unless `--named-files-only` is given.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.machinery import roots
from tests.machinery.mutants import MUTANTS, SURVIVORS
from tests.machinery.shared import REPO

BUILD = REPO / "build" / "planted"
TREE = BUILD / "tree"
CMAKE = BUILD / "cmake"
NATIVE = ("_core", "kvcache_cpu")  # CMake targets


@dataclass(frozen=True)
class Defect:
    """A defect to plant. `old` must occur exactly once in the file. `tests` contains the names of
    test files without `test_` and `.py`. `report`: the public report of another engine's fault, or
    of one that this library once had, whose cause the defect puts back.
    """

    name: str
    path: str
    old: str
    new: str
    tests: str
    report: str = ""

    @property
    def is_native(self) -> bool:
        return self.path.startswith("csrc/")


# Code that determines which KV attention reads.
_CODE_OF_KV = (
    *("csrc/core/pool/", "csrc/core/manager/", "csrc/core/groups/", "csrc/core/hashing/"),
    *(
        "csrc/worker/",
        "csrc/ops/",
        "kvcache/worker/",
        "packages/kvcache-serve/src/kvcache_serve/engine/transformers/",
    ),
)
_MOST_SECONDS = 400  # time limit for the runs with one defect

POOL, MANAGER, OPS = "csrc/core/pool/", "csrc/core/manager/", "csrc/ops/"
RULES, SANITIZER = "csrc/core/groups/rules/", "csrc/sanitizer/"
EXCHANGE = "packages/kvcache-exchange/src/kvcache_exchange/"
OFFERS, STORE = EXCHANGE + "disaggregation/", EXCHANGE + "store/"
DEFECTS = [
    Defect(
        "pool",
        POOL + "block_pool.cpp",
        "out[i] = cached_free_.head();",
        "out[i] = cached_free_.tail();",  # evicts the most recently used block first
        "block_pool manager",
    ),
    Defect(
        "hash index",
        POOL + "hash_index.h",
        "return block.group == group && block.hash == hash;",
        "return block.group == group;",  # treats blocks with equal keys as equal
        "block_pool",
    ),
    Defect(
        "eviction",
        POOL + "block_pool_eviction.cpp",
        "block.ref_count == 0 && !has_pin(block));",
        "block.ref_count == 0);",  # pinned blocks become eviction candidates
        "eviction",
    ),
    Defect(
        "demand",
        RULES + "tokens.h",
        "*num_free += on.pool->ref_count(held[b]) == 1;",
        "*num_free += on.pool->ref_count(held[b]) >= 1;",  # counts shared blocks as freed
        "groups simulator",
    ),
    Defect(
        "states after drafts",
        RULES + "state.cpp",
        "/ group.block_size, held[current], spare);",
        "/ group.block_size, held[held.num_dropped], spare);",  # the state before the drafts
        "state_drafts",
    ),
    Defect(
        "row server",
        MANAGER + "row_server.h",
        "    parts_.intake->take_back(request, i);\n",
        "",  # a waiting row keeps its new token ids
        "manager simulator",
    ),
    Defect(
        "quiet rows",
        MANAGER + "row_table.h",
        "if (r.has_forked() || r.state",
        "if (r.state",  # a row writes to shared blocks
        "forks simulator",
    ),
    Defect(
        "cache tiers",
        MANAGER + "cache_tiers.h",
        "frees_.defers(steps_->numbers().num_steps)",
        "false",  # blocks are overwritten before they are copied to the host
        "tiers simulator",
    ),
    Defect(
        "steps",
        MANAGER + "steps.h",
        "if (!rows[row].is_on_host()) plan_",
        "plan_",  # puts host pages into a device table
        "tiers simulator",
    ),
    Defect(
        "publisher",
        MANAGER + "publisher.h",
        "std::min(c_.rows->info(row).num_marked, r.num_computed)",
        "r.num_computed",  # releases blocks before they are marked as computed
        "sequences",
    ),
    Defect(
        "plan builder",
        MANAGER + "plan_builder.h",
        "clear.erase(std::unique(clear.begin(), clear.end()), clear.end());",
        "",  # clears a row twice
        "manager manager_life simulator",
    ),
    Defect(
        "plan arrays",
        "csrc/python/plan_type.cpp",
        "if (value_of(plan.ptr(), slots_[field]) == nullptr) set(",
        "set(",  # overwrites entries that the caller has set
        "plan_arrays",
    ),
    Defect(
        "step journal",
        MANAGER + "step_journal.h",
        "copy(&step.dropped);",
        "",  # a fork does not inherit the parent's dropped blocks
        "forks simulator",
    ),
    Defect(
        "deferred frees",
        MANAGER + "deferred_frees.h",
        "fences_.front().step_id < steps_->num_completed",
        "fences_.front().step_id <= steps_->num_completed",  # ends a fence one step too early
        "manager_life simulator",
    ),
    Defect(
        "host tier",
        MANAGER + "host_tier.h",
        "onboards_.front().step_id < num_completed",
        "onboards_.front().step_id <= num_completed",  # publishes blocks before they have arrived
        "tiers simulator",
    ),
    Defect(
        "row swap",
        MANAGER + "row_swap.h",
        "host.retain(&page, 1);  // prevents",
        "// prevents",  # a row does not hold a page that it shares
        "tiers simulator",
    ),
    Defect(
        "invalidation",
        RULES + "tokens.h",
        "return is_own ? limit : limit - limit % group.block_size;",
        "return limit;",  # a row resumes inside a block that others hold
        "manager_life simulator",
    ),
    Defect(
        "session pins",
        MANAGER + "session_pins.h",
        "pool_->generation(pinned.id) == pinned.generation &&",
        "",  # keeps the pin of a reallocated block
        "tiers simulator",
    ),
    Defect(
        "worker tables",
        "csrc/worker/host_tables.cpp",
        "note(start_of(g, src), n);",
        "",  # only one of the two exchanged rows is uploaded to the device
        "host_tables block_table",
    ),
    Defect(
        "slot mapping",
        "csrc/worker/slot_formula.h",
        "offset = round * by_interleave.divisor + (offset - chunk * by_interleave.divisor);",
        # Tokens of one rank are apart by the chunks of the other ranks.
        "offset = chunk * by_interleave.divisor + (offset - chunk * by_interleave.divisor);",
        "slot_mapping_op block_table",
    ),
    Defect(
        "slots of the host",
        "csrc/worker/map_slots.cpp",
        "if (end > m.num_tokens) std::fill",
        # Stale slots of a longer previous step remain after this step's slots.
        "if (fill_to == nullptr) std::fill",
        "block_table",
    ),
    Defect(
        "null block",
        OPS + "token_io.cpp",
        "if (slot >= io.first_slot()) {",
        "if (slot >= 0) {",  # pads slots that slid out of a window, instead of keeping them
        "token_io_op worker",
    ),
    Defect(
        "order of plans",
        MANAGER + "step_journal.h",
        "    last_forgotten_ = in_flight_.front().id;\n",
        "",  # a lost plan is not detected, because no plan names the previous step
        "worker",
    ),
    Defect(
        "copy",
        OPS + "block_copy.cpp",
        "run.source == kCleared ? r.destination_stride == r.num_bytes : r.is_dense()",
        "run.source == kCleared || r.is_dense()",  # clears the gaps between pages
        "block_copy_op pages worker",
    ),
    Defect(
        "permute",
        OPS + "block_permute.h",
        "inner_rows /= run;",
        "",
        "block_permute_op receive",
    ),
    Defect(
        "write and gather kv",
        OPS + "token_io.cpp",
        "} else if (direction != Direction::kWrite) {",
        "} else if (false) {",  # a token without a slot keeps stale values
        "token_io_op token_io_fp8_op",
    ),
    Defect(
        "norm, rope and write",
        OPS + "rope_write.h",
        "has_float_weight ? x : rounded_to<Element>(x)",
        "x",  # the norm is not rounded before the product with its weight
        "rope_write_op",
    ),
    Defect(
        "attention metadata",
        OPS + "attention_metadata.h",
        "rest > 0 ? rest : group.block_size;",
        "rest;",  # treats a full last page as empty
        "attention_metadata_op attention_metadata",
    ),
    Defect(
        "duel with LRU",
        "csrc/core/eviction/learned/duel.h",
        "follows_lru_ = left() <= -part(learned::kStake) || best_ - lead_ >= capacity_;",
        "follows_lru_ = false;",  # the policy no longer bounds the hits lost compared with LRU
        "learned",
    ),
    Defect(
        "evidence for a trial",
        "csrc/core/eviction/learned/duel.h",
        "static_cast<double>(evidence_) >= needed &&",
        "",  # begins a trial even if the own order gains no hits
        "learned",
    ),
    Defect(
        "priorities of blocks",
        "csrc/core/eviction/priority.h",
        "if (given.is_set()) give(id, given);",
        "(void)id;",
        "learned",
    ),
    Defect(
        "sanitizer's reads",
        SANITIZER + "slot_reads.cpp",
        "if (shadow_->num_changes() == checked.checked_at) return false;",
        # This never checks changed blocks again.
        "if (shadow_->num_changes() != -1) return false;",
        "findings random",
    ),
    Defect(
        "sanitizer's writes",
        SANITIZER + "slot_writes.cpp",
        "token.overwrites = old != 0 && old != token.tag;",
        "token.overwrites = old != 0 && old == token.tag;",
        "findings random",
    ),
    Defect(
        "memory plan",
        "kvcache/memory_plan.py",
        "return self.request_bytes(size, num_tokens) + size * self.layer_page",
        "return self.request_bytes(size, num_tokens)",  # omits the null page
        "specs",
    ),
    Defect(
        "transfer plan",
        "kvcache/transfer/plan/transfer_plan.py",
        "(begin + cache.block_size > first)",
        "(begin + cache.block_size >= first)",  # includes the page before the first requested token
        "transfer_plan transfer_fragments",
    ),
    Defect(
        "other devices",
        "kvcache/ops_by_copies.py",
        "start = self._shift + first * self._stride",
        "start = self._shift + first * self._size",  # correct only for dense pages
        "other_device",
    ),
    Defect(
        "window of async drafts",
        "csrc/core/groups/row.h",
        "if (num_drafted <= 0 || chain",
        "if (num_drafted >= 0 || chain",  # releases what a step with rejected drafts still reads
        "draft_steps",
        "vLLM 47728",
    ),
    Defect(
        "known tokens rejected",
        MANAGER + "request_checks.h",
        "if (num_rejected <= num_unknown) return;",
        "if (num_rejected >= 0) return;",  # hashes of tokens that are replaced remain
        "draft_steps manager",
        "a known token that step takes back as a rejected draft",
    ),
    Defect(
        "adapter reloaded",
        MANAGER + "recovery.h",
        "    c_.pool->evict_adapter(adapter);",
        "    return;",  # the KV of the old weights stays in the cache
        "adapters",
        "vLLM 42125",
    ),
    Defect(
        "adapter of running rows",
        MANAGER + "recovery.h",
        "      r.chain = r.chain->uncached();",
        "      continue;",  # rows that began before the reload publish their KV
        "adapters",
        "vLLM 42125",
    ),
    Defect(
        "weights of running rows",
        MANAGER + "recovery.h",
        "for (int32_t row : c_.rows->in_use()) c_.row(row).stop_publishing();",
        "",  # KV of the old weights is cached as KV of the new ones
        "manager_life simulator",
        "offers and rows of an old epoch",
    ),
    Defect(
        "read_cache is ignored",
        "csrc/core/hashing/token_chain.h",
        "return read_cache.value_or(read_cache_) && num",
        "return num",
        "manager simulator",
        "take_cached of a request with read_cache=False",
    ),
    Defect(
        "fresh pages",
        MANAGER + "plan_builder.h",
        "    if (is_step_) plan_.fresh.insert(plan_.fresh.end(), pages, pages + n);",
        "",  # bytes of an earlier owner are read as NaN
        "fresh_pages simulator",
        "vLLM 35138",
    ),
]
DEFECTS += [
    # Faults of the exchange, as code that once was there.
    Defect(
        "version of an offer", EXCHANGE + "identity.py",
        '        compared.append(("version of the weights", self.version, other.version, change))\n', "",
        "epochs", "weights change while peers offer KV",
    ),
    Defect(
        "offer of a stale request", OFFERS + "connector.py",
        " or has_other_state or is_stale:", " or has_other_state:",
        "epochs", "offers and rows of an old epoch",
    ),
    Defect(
        "loads of an old epoch", OFFERS + "connector.py",
        "is_new_epoch = self._epoch != cache.epoch", "is_new_epoch = False",
        "epochs", "weights change between the offer and the load",
    ),
    Defect(
        "leases of invalid blocks", OFFERS + "connector.py",
        "if not is_new_epoch and self._num_invalidations == cache.num_invalidations:",
        "if not is_new_epoch:",
        "disaggregation disaggregation", "a peer reads a page that its sender has invalidated",
    ),
    Defect(
        "store of an old epoch", STORE + "tier.py",
        "        if cache.epoch == self._epoch:\n            return\n", "        return\n",
        "store", "weights change while a store has KV",
    ),
    Defect(
        "keys of an old epoch", STORE + "rank.py",
        "                self._identity = replace(self._identity, version=order.version)\n", "",
        "store", "weights change while a store has KV",
    ),
    Defect(
        "failed removal", STORE + "rank.py",
        "self._store.remove(self._invalid[0])\n            self._invalid.popleft()",
        "self._store.remove(self._invalid.popleft())",  # what the store failed to remove returns
        "store_ranks store", "a value that was removed returns",
    ),
    Defect(
        "load of a forgotten adapter", "kvcache/sources/loads.py",
        "return self._manager.cache.adapter_root(load.request) != load.root", "return False",
        "forgotten_adapters", "vLLM 42125",
    ),
    Defect(
        "scales of an offer", "kvcache/transfer/plan/transfer_plan.py",
        "    _check_scales(local, remote, sides)\n", "",
        "scales", "SGLang 34765",
    ),
    Defect(
        "scales of a store", STORE + "identity.py",
        "sorted((number, each) for number, each in pages.scales.items() if each is not None)", "[]",
        "scales", "SGLang 34765",
    ),
    Defect(
        "share of states", STORE + "identity.py",
        "    if isinstance(rank, Share) and has_rest:", "    if False:",
        "store_ranks", "vLLM 49499",
    ),
    Defect(
        "match without read_cache", OFFERS + "connector.py",
        " or not request.read_cache:", ":",
        "disaggregation", "take_cached of a request with read_cache=False",
    ),
    Defect(
        "topic of a replay", EXCHANGE + "router_events/replay_client.py",
        "if topic and frames[1] != topic:", "if False:",
        "router_events", "vLLM 45174",
    ),
    Defect(
        "numbers of a restart", EXCHANGE + "router_events/publisher.py",
        "            time.time_ns() // 1_000,\n", "            0,\n",
        "router_events", "Dynamo 14652",
    ),
    Defect(
        "announcement of a restart", EXCHANGE + "router_events/publisher.py",
        "        self._send([WireCleared()], time.time())  # the cache", "        # the cache",
        "router_events", "Dynamo 14652",
    ),
    Defect(
        "hashes of a stored prefix", STORE + "prefixes.py",
        "return min(request.num_tokens - 1, num_hashed) //", "return (request.num_tokens - 1) //",
        "store hit_ends", "checkpoints ignore tokens that hashes also cover",
    ),
    Defect(
        "ends of hits with lookahead", "csrc/core/groups/hit_ends.h",
        "chain.num_hashable(num_tokens) * chain.block_size(), with", "num_tokens, with",
        "hit_ends", "checkpoints ignore tokens that hashes also cover",
    ),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.machinery.planted_breaks")
    parser.add_argument("names", nargs="*", metavar="name", help="names of defects (default: all)")
    parser.add_argument("--list", action="store_true", help="print the defects and exit")
    parser.add_argument(
        "--mutants",
        action="store_true",
        help="plant the defects of tests/machinery/mutants.py instead",
    )
    parser.add_argument(
        "--named-files-only",
        action="store_true",
        help="run only the test files that a defect names",
    )
    parser.add_argument(
        "--sanitizer",
        action="store_true",
        help="instead of tests, run an engine with the sanitizer and defects in code that handles KV",
    )
    parser.add_argument(
        "--simulator",
        type=int,
        metavar="N",
        help="instead of tests, run N operations of the simulator with each defect",
    )
    arguments = parser.parse_args()
    all_defects = [Defect(*mutant) for mutant in MUTANTS] if arguments.mutants else DEFECTS
    known = {defect.name: defect for defect in all_defects}
    for name in arguments.names:
        if name not in known:
            parser.error(f"there is no defect {name!r}: expected one of {', '.join(known)}")
    defects = [known[name] for name in arguments.names] or all_defects
    if arguments.sanitizer:
        defects = [defect for defect in defects if defect.path.startswith(_CODE_OF_KV)]
    if arguments.list:
        print(*(f"{d.name}: {d.path}: {d.old}  ->  {d.new}" for d in defects), sep="\n")
        return 0
    # Before anything is built, check that every text to be replaced exists.
    stale = [text for text in map(problem, defects) if text]
    if stale:
        print(*stale, sep="\n")
        return 1
    _copy_tree()
    if any(defect.is_native for defect in defects):
        print("planted: the native build without defects", flush=True)
        _configure()
        built = _build_native()
        if built.returncode:
            print(built.stdout)
            return 1
    if arguments.sanitizer:
        return _judge_all(defects)
    if arguments.simulator is not None:
        return _simulate_all(defects, arguments.simulator)
    # A test that fails even without a defect would appear to detect every defect.
    files = sorted({path for defect in defects for path in _test_files(defect)})
    print("planted: their tests without defects", flush=True)
    sound = _run_tests(*files)
    if sound.returncode:
        print(sound.stdout)
        return 1
    tries_others = arguments.mutants and not arguments.named_files_only
    missed = [defect.name for defect in defects if not _is_caught(defect, tries_others)]
    print(
        f"planted: {len(defects) - len(missed)} caught of {len(defects)}, not caught: "
        f"{', '.join(missed) or 'none'}"
    )
    for name in missed:
        print(f"{name}: {SURVIVORS.get(name, 'no reason is known')}")
    return 0 if SURVIVORS.keys() >= {*missed} else 1


def _is_caught(defect: Defect, tries_others: bool) -> bool:
    started = time.monotonic()
    verdict, output = _try(defect, tries_others)
    print(f"{verdict}: {defect.name} ({time.monotonic() - started:.0f} s)", flush=True)
    if verdict != "caught":
        print(output, flush=True)
    return verdict == "caught"


def _judge_all(defects: list[Defect]) -> int:
    """Print which defects caused wrong answers, and which of these the sanitizer reported."""
    print(f"planted: without defects: {_judge()}", flush=True)
    wrong, reported = [], []
    for defect in defects:
        verdict = _with_defect(defect, _judge)
        print(f"{defect.name}: {verdict}", flush=True)
        if isinstance(verdict, dict) and verdict["wrong"]:
            wrong.append(defect.name)
            reported += [defect.name] if verdict["wrong_and_reported"] else []
    missed = [name for name in wrong if name not in reported]
    print(
        f"planted: {len(defects)} defects, {len(wrong)} gave wrong answers, of which the sanitizer "
        f"reported {len(reported)}, not: {', '.join(missed) or 'none'}"
    )
    return 0


def _simulate_all(defects: list[Defect], num_operations: int) -> int:
    """Print which defects the simulator finds, and after how many operations."""
    print(f"planted: without defects: {_simulate(num_operations)}", flush=True)
    missed = []
    for defect in defects:
        verdict = _with_defect(defect, lambda: _simulate(num_operations))
        print(f"{defect.name}: {verdict}", flush=True)
        if verdict.startswith("seeds"):
            missed.append(defect.name)
    print(
        f"planted: {len(defects)} defects, of which the simulator found {len(defects) - len(missed)}, "
        f"not: {', '.join(missed) or 'none'}"
    )
    return 0


def _simulate(num_operations: int) -> str:
    """Run the simulator in the copy. Return the first line that it prints."""
    command = [sys.executable, "-m", "tests.simulator", "--as-found"]
    try:
        ended = subprocess.run(
            [*command, "--operations", str(num_operations)],
            cwd=TREE,
            env={**os.environ, "PYTHONPATH": roots.python_path(TREE)},
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "the simulator does not end"
    lines = (ended.stdout or ended.stderr).strip().splitlines()
    return lines[0 if ended.stdout else -1] if lines else f"exit code {ended.returncode}"


def _judge() -> dict[str, object] | str:
    """Run an engine in the copy. Return the findings, or how the runs ended."""
    command = [sys.executable, "-m", "tests.simulator.served_models", "18"]
    environment = {
        **os.environ,
        "PYTHONPATH": roots.python_path(TREE),
        "KVCACHE_SANITIZE": "report",
    }
    try:
        ended = subprocess.run(
            command,
            cwd=TREE,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_MOST_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return "the runs do not end"
    if ended.returncode:
        return f"exit code {ended.returncode}: {ended.stderr.strip().splitlines()[-1:]}"
    return json.loads(ended.stdout.splitlines()[-1])


def problem(defect: Defect) -> str | None:
    """Return the reason why a defect cannot be planted, or None."""
    path = REPO / defect.path
    if not path.is_file():
        return f"{defect.name}: {defect.path} is not there"
    count = path.read_text().count(defect.old)
    if count != 1:
        return f"{defect.name}: {defect.path} contains this text {count} times: {defect.old}"
    missing = [path for path in _test_files(defect) if not (REPO / path).is_file()]
    return f"{defect.name}: {missing[0]} is not there" if missing else None


def _test_files(defect: Defect) -> list[str]:
    found = {path.name: path for path in roots.test_files()}
    names = [f"test_{name}.py" for name in defect.tests.split()]
    return [str(found[name].relative_to(REPO)) if name in found else name for name in names]


def _try(defect: Defect, tries_others: bool) -> tuple[str, str]:
    """Plant a defect and run its tests.

    If these tests pass and `tries_others` is set, run all other files too. Return the verdict and
    the output.
    """

    def run() -> subprocess.CompletedProcess:
        tests = _run_tests(*_test_files(defect))
        if tests.returncode == 0 and tries_others:
            named = [f"--ignore={path}" for path in _test_files(defect)]
            tests = _run_tests("-n", "auto", "--dist", "worksteal", *named)
        return tests

    tests = _with_defect(defect, run)
    if isinstance(tests, str):
        return "NOT BUILT", tests
    if tests.returncode == 0:
        return "MISSED", tests.stdout
    # Exit code 1 means that a test failed, and a negative one that a test killed the process.
    # Otherwise, pytest itself failed to run.
    is_caught = tests.returncode == 1 or tests.returncode < 0
    return ("caught" if is_caught else "NOT TESTED"), tests.stdout


def _with_defect(defect: Defect, run: Callable[[], Any]) -> Any:
    """Return the result of `run` with a defect planted, or the output of the build if it fails."""
    path = TREE / defect.path
    sound = path.read_text()
    path.write_text(sound.replace(defect.old, defect.new))
    try:
        if defect.is_native:
            built = _build_native()
            if built.returncode:
                return built.stdout
        return run()
    finally:
        path.write_text(sound)


def _run_tests(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-rN", *arguments],
        cwd=TREE,
        env={**os.environ, "PYTHONPATH": roots.python_path(TREE)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _copy_tree() -> None:
    """Update the copy of the checkout.

    Unchanged files keep their modification time, so that they are not rebuilt.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO,
        check=True,
        capture_output=True,
        text=True,
    )
    names = {name for name in listed.stdout.split("\0") if name and (REPO / name).is_file()}
    for path in [path for path in TREE.rglob("*") if path.is_file()]:
        name = path.relative_to(TREE).as_posix()
        if name not in names and path.suffix != ".so" and not name.startswith("build/"):
            path.unlink()
    for name in names:
        source, target = REPO / name, TREE / name
        if target.is_file() and target.read_bytes() == source.read_bytes():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


def _configure() -> None:
    scripts = Path(sys.executable).parent
    subprocess.run(
        [
            shutil.which("cmake", path=f"{scripts}{os.pathsep}{os.environ['PATH']}") or "cmake",
            *("-S", str(TREE), "-B", str(CMAKE), "-G", "Ninja"),
            f"-DPython3_EXECUTABLE={sys.executable}",
            *("-DCMAKE_BUILD_TYPE=Planted", "-DCMAKE_CXX_FLAGS=-O1 -w"),
        ],
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _build_native() -> subprocess.CompletedProcess:
    cmake = ["cmake", "--build", str(CMAKE), "--target", *NATIVE]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    built = subprocess.run(
        cmake,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if built.returncode == 0:
        for library in CMAKE.glob("*.so"):
            if library.name.startswith(("_core", "libkvcache_cpu")):
                shutil.copyfile(library, TREE / "kvcache" / library.name)
    return built


if __name__ == "__main__":
    sys.exit(main())
