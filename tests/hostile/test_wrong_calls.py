# SPDX-License-Identifier: Apache-2.0
"""Calls with invalid and hostile arguments, both random ones and fixed ones that once caused a
failure.
"""

import itertools
import os
import re
import subprocess
import sys
from decimal import Decimal
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
import torch

pytest.importorskip("fastapi")  # required to import `kvcache_serve.server`

import kvcache_lab as replay
from kvcache import (
    BlockPool,
    BlockTables,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    Pages,
    Request,
    ops,
)
from kvcache.allocator import check_invariants
from kvcache.checks import as_array, listed
from kvcache.compat import BlockSpaceManager, KVTopology, RemoteEngine
from kvcache.kinds import make_kind
from kvcache.transfer import CacheDescription, StateDescription, StateTensor
from kvcache_serve import demo, engine, server
from tests.machinery.emulation import ASAN, build_cpu_library
from tests.machinery.hostile import wrong_calls
from tests.machinery.hostile.scenes import SCENES, Liar
from tests.machinery.hostile.surface import (
    EXCLUDED,
    LACKS,
    MADE,
    modules,
)
from tests.machinery.hostile.values import HUGE, ClaimsMany, ManyMembers, NegativeLength
from tests.machinery.hostile.world import right_call, walked
from tests.machinery.shared import REPO, sampled
from tests.ops.test_kernels_under_asan import run_with_asan
from tests.simulator.sequences import Group, Seq

SEED = int(os.environ.get("KVCACHE_FUZZ_SEED", "1"))


# Modules whose public calls are fuzzed here. `make fuzz` covers all modules.
MENDED = [
    *("kvcache_serve.demo", "kvcache_exchange.disaggregation", "kvcache.events"),
    *("kvcache.kinds", "kvcache.layouts", "kvcache.metrics", "kvcache.ops", "kvcache_lab"),
    *(
        "kvcache_exchange.router_events",
        "kvcache_serve.server.",
        "kvcache_serve.engine",
        "kvcache_exchange.store",
    ),
    "kvcache.sanitizer",
    *("kvcache.transfer", "kvcache.worker", "kvcache.Pages", "kvcache.KVStorage"),
    *("kvcache.SwapEngine", "kvcache.Worker", "kvcache.GroupTable", "kvcache.BlockTables"),
    "kvcache.AttentionMetadata",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", walked())
def test_each_public_call_accepts_its_valid_arguments(name):
    """The fuzzer derives invalid arguments from valid ones, so it can only test calls whose valid
    arguments are known.
    """
    right_call(name)


def test_names_excluded_from_the_fuzzer_exist():
    modules()
    if LACKS:
        pytest.skip(f"modules that were not walked: {LACKS}")
    for name in [*EXCLUDED, *MADE]:
        module, _, attribute = name.rpartition(".")
        while module not in sys.modules:
            module, _, of = module.rpartition(".")
            attribute = f"{of}.{attribute}"
        attrgetter(attribute)(sys.modules[module])


BROKEN = """
import ctypes, os, sys, threading, time
class Broken:
    def __init__(self): self.count, self.kept = 0, []
    def dies(self, a: int): ctypes.string_at(0) if a != 1 else None
    def hangs(self, a: int):
        while a != 1: pass
    def changes(self, a: int):
        self.count += a != 1
        if a != 1: raise ValueError("a is wrong")
    def leaks(self, a: int):
        if a != 1:
            _KEPT.append(os.open("/dev/null", os.O_RDONLY))
            raise ValueError("a is wrong")
    def closes(self, a: int):
        if a != 1: os.close(1)
    def mumbles(self, a: int):
        if a != 1: raise ValueError("no")
_KEPT = []
__all__ = ["Broken"]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "count"),
    sampled(
        [
            ({"dies": "crash", "changes": "changed", "closes": "closed"}, 200),
            ({"hangs": "hang", "leaks": "leak"}, 400),
        ]
    ),
)
def test_fuzzer_finds_planted_defects(kinds, count, tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text(BROKEN)
    monkeypatch.setenv("KVCACHE_FUZZ_PATH", str(tmp_path))
    methods = [f"kvcache.broken_module.Broken.{method}" for method in (*kinds, "mumbles")]
    counts = wrong_calls.run(SEED, 0, count, methods)
    found = {(each["name"], each["kind"]) for each in counts.findings}
    assert found == {(f"broken_module.Broken.{name}", kind) for name, kind in kinds.items()}
    mumbled = counts.by_name["broken_module.Broken.mumbles", "unclear"]
    assert mumbled > 0.9 * counts.kinds["unclear"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("share", sampled(range(3)))
def test_calls_with_invalid_arguments_are_rejected_by_name_and_change_nothing(share):
    counts = wrong_calls.run(SEED, 1000 * share, 600, [*MENDED, *SCENES])
    print(f"seed {SEED}", *wrong_calls.summary(counts), sep="\n")
    assert counts.findings == []
    assert not wrong_calls.is_unclear(counts)


@pytest.mark.parametrize("name", SCENES)
def test_scenes_accept_their_right_calls_and_equal_scenes_agree(name):
    assert SCENES[name]().follow() == SCENES[name]().follow()
    for at in range(len([*SCENES[name]().calls()])):
        scene = SCENES[name]()
        scene.right_call(at)()
        scene.end()


@pytest.mark.slow
def test_ops_with_invalid_arguments_change_nothing():
    command = [
        sys.executable,
        "-m",
        "tests.machinery.hostile.ops",
        str(REPO / "kvcache/libkvcache_cpu.so"),
    ]
    command += ["--calls", "2000", "--seed", str(SEED)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.skipif(ASAN, reason="already runs under sanitizers")
@pytest.mark.exhaustive
def test_ops_with_invalid_arguments_stay_inside_their_tensors():
    library = str(build_cpu_library(asan=True))
    done = run_with_asan(
        "-m", "tests.machinery.hostile.ops", library, "--calls", "20000", "--seed", str(SEED)
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "20000 calls" in done.stdout


# Errors that the fuzzer found to be missing or unclear.


def huge(dtype: type = np.int32) -> np.ndarray:
    return np.broadcast_to(dtype(1), (HUGE,))


@pytest.mark.parametrize(("call", "message"), [
    (lambda: listed(NegativeLength([1]), "values"), "values is "),
    (lambda: BlockPool(5).retain(NegativeLength([1.5])), "ids has a length below 0"),
    (lambda: BlockPool(5, eviction=5), "eviction is 5: expected a string"),
    (lambda: BlockPool(5, eviction="\ud800"), "eviction is .*: expected text that UTF-8"),
    (lambda: BlockPool(5, eviction_options=[1]), "eviction_options is .*: expected a dict"),
    (lambda: make_kind("sliding_window", {"window": 8}).first_needed_token("a"),
        "num_computed_tokens is 'a': expected an integer"),
    (lambda: Request("r", [1]).chain({}), "key is {}: expected a HashKey"),
    (lambda: server.Limits().body_bytes([1]), r"max_model_len is \[1\]: expected an integer"),
    (lambda: server.ByteTexts().encode(5), "text is 5: expected a string"),
    (lambda: server.ByteTexts().decode(huge()), "token_ids has 1099511627776 entries"),
    (lambda: server.ByteTexts().decode([-1]), r"token_ids\[0\] is -1: expected 0 to"),
    (lambda: server.ByteTexts().encode_chat([{"role": "a"}]), r"messages\[0\] is {"),
    (lambda: server.TokenizerTexts(5), "tokenizer is 5: expected a transformers tokenizer"),
    (lambda: demo.make_chats(np.uint64(2**64 - 1), 1, 8, 9, 0), "num_users is 18446744"),
    (lambda: demo.make_chats(1, 0, 8, 9, 0), "num_turns is 0: expected 1 to"),
    (lambda: demo.summary(5), "report is 5: expected a DemoReport"),
    (lambda: replay.compare([], ["lru"], []), "sizes is empty: expected one or more"),
    (lambda: replay.compare([], ["t"], [1]), r"policies\[0\] is 't': expected one of"),
    (lambda: replay.Comparison("", 1, 16, (1,), {"lru": [object()]}),
        "token hit rates of lru is <object"),
    (lambda: replay.Comparison("", 1, 16, (1, 2), {"lru": [0.5]}),
        r"token hit rates of lru are \[0.5\]: expected 2, one per size"),
    (lambda: replay.WorkloadRequest(0, 0, np.array([-2]), 1, np.zeros(0, int)),
        r"token_ids\[0\] is -2"),
    (lambda: replay.Replayer(num_blocks=9, block_size=4).run(torch.tensor(1)),
        r"workload is tensor\(1\): expected requests"),
    (lambda: engine.Sequence(Request("r", [1]), state=5), "state is 5: expected a State"),
    (lambda: engine.NgramDrafter(shortest=17), "shortest is 17: expected at most longest, 4"),
])  # fmt: skip
def test_errors_of_calls_found_by_the_fuzzer_name_the_argument(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_failed_calls_of_serving_and_demo_change_nothing():
    manager = KVCacheManager(4, 20, 32, max_num_reqs=4)
    scheduler = engine.Scheduler(manager, max_num_batched_tokens=16)
    parent = engine.Sequence(Request("a", range(6)), num_rows=3)
    scheduler.add(parent)
    scheduler.complete(scheduler.schedule())
    child = engine.Sequence(Request("b", range(50, 56)))
    with pytest.raises(ValueError):
        scheduler.fork(parent, child)  # the child's tokens differ from the parent's
    assert (parent.num_rows, child.has_begun, scheduler.num_unfinished) == (3, False, 1)
    chat = demo.Chat([[1], [2]], [3])
    for answers in ([], [[1.5]], 5):
        with pytest.raises((TypeError, ValueError), match="answers"):
            chat.end_turn([3, 1], answers)
    assert (chat.history, chat.turns) == ([3], [])


# Pages and tensors whose memory overlaps or exceeds the range of addresses.


@pytest.mark.parametrize(("num_blocks", "sizes", "error", "message"), [
    (2**57 + 1, [[128]], ValueError, r"num_blocks is 144115188075855873: expected 1 to 2147483647"),
    (2**63 - 1, [[64, 64], [64]], ValueError, r"num_blocks is 9223372036854775807: expected"),
    (Decimal(1), [[64]], TypeError, r"num_blocks is Decimal\('1'\): expected an integer"),
    (True, [[64]], TypeError, "num_blocks is True: expected an integer"),
    (2**31 - 1, [[2**40]], ValueError, r"sizes has 1099511627776 bytes a page .* fewer than 2\^63"),
    (2, [[2**62, 2**62]], ValueError, r"sizes has 9223372036854775808 bytes a page"),
    (2, [[2**64]], ValueError, r"sizes\[0\]\[0\] is 18446744073709551616: expected 0 to"),
    (2, [[1.5]], TypeError, r"sizes\[0\]\[0\] is 1.5: expected an integer"),
    (2, [ClaimsMany()], ValueError, r"sizes\[0\] has 1099511627776 entries"),
    (2, 64, TypeError, "sizes is 64: expected a sequence"),
])  # fmt: skip
def test_pages_with_more_bytes_than_int64_are_rejected(num_blocks, sizes, error, message):
    with pytest.raises(error, match=message):
        Pages.allocate(num_blocks, sizes)


def part(memory, start, dtype, *shape):
    """Return the bytes from `start` on as a tensor."""
    num_bytes = dtype.itemsize * int(np.prod(shape))
    return memory[start : start + num_bytes].view(dtype).view(shape)


INT32, INT64, BF16, FP8 = torch.int32, torch.int64, torch.bfloat16, torch.float8_e4m3fn
TOKENS, CACHE = torch.ones(8, 2, 8, dtype=BF16), (BF16, 4, 4, 2, 8)
ONE, ROWS = torch.ones(1, 2, 8), torch.zeros(2, dtype=INT32)
REGIONS, PAIRS = torch.tensor([[0, 32, 0, 32, 32]]), torch.tensor([[0, 1]], dtype=INT32)
GROUPS, TABLES = torch.tensor([[0, 2, 4, 1, 0, 1, 0, 0]]), torch.tensor([1, 2], dtype=INT32)
IDS, ZERO = torch.tensor([[1, 2]], dtype=INT32), torch.zeros(1, dtype=INT64)


def write_kv(memory, start, at):
    """Write tokens, with the slots inside the cache of K (0) or V (1)."""
    caches = [torch.zeros(CACHE[1:], dtype=BF16)] * 2
    caches[at] = part(memory, 0, *CACHE)
    ops.write_kv(TOKENS, TOKENS.clone(), *caches, part(memory, start, INT64, 8))


def write_fp8(memory, value, v_scale):
    cache, slots = part(memory, 0, FP8, 4, 4, 2, 8), torch.tensor([5])
    ops.write_kv(ONE, value, cache, cache.clone(), slots, torch.ones(1), v_scale)


def permute(memory, offsets, ids):
    ops.permute_blocks_(part(memory, 0, torch.float32, 4, 2, 2, 8), offsets, ids, 4, True)


def copy(memory, regions=REGIONS, pairs=PAIRS):
    ops.copy_blocks(None, memory[:256], regions, pairs, 8, 8)


def slots(rows, counts, out):
    ops.slot_mapping(TABLES, GROUPS, 1, rows, None, torch.tensor([1] * len(rows)), counts, out)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        *(
            (f"{name} shares memory with slot_mapping", partial(write_kv, start=start, at=at))
            for start in (0, 64, 504)
            for at, name in enumerate(("key_cache", "value_cache"))
        ),
        (
            "key shares memory with slot_mapping",
            lambda m: ops.gather_kv(
                part(m, 0, *CACHE), part(m, 0, *CACHE).clone(), part(m, 1024, INT64, 8),
                part(m, 1024, BF16, 8, 2, 8), TOKENS.clone(),
            ),
        ),
        (
            "key_cache shares memory with v_scale",
            lambda m: write_fp8(m, ONE, part(m, 8, torch.float32, 1)),
        ),
        (
            "key_cache shares memory with value",
            lambda m: write_fp8(m, part(m, 0, torch.float32, 1, 2, 8), torch.ones(1)),
        ),
        ("cache shares memory with offsets", lambda m: permute(m, part(m, 256, INT64, 1), IDS)),
        (
            "cache at offset 1024 shares memory with indices",
            lambda m: permute(m, torch.tensor([0, 1024]), part(m, 1032, INT32, 1, 2).copy_(IDS)),
        ),
        *(
            (
                r"offsets has -?\d+: expected bytes from the cache",
                lambda m, wrong=wrong: permute(m, torch.tensor(wrong), IDS),
            )
            for wrong in ([-(2**63), 2**63 - 1], [2**62])
        ),
        (
            r"dst in regions\[0\] shares memory with pairs",
            lambda m: copy(m, pairs=part(m, 64, INT32, 1, 2)),
        ),
        (
            r"dst in regions\[0\] shares memory with regions",
            lambda m: copy(m, regions=part(m, 64, INT64, 1, 5).copy_(REGIONS)),
        ),
        *(
            (r"regions\[0\] (extends beyond|has \d+ bytes)", partial(copy, regions=torch.tensor([x])))
            for x in ([2**62, 32, 0, 32, 32], [0, 2**61, 0, 32, 32], [0, 32, 0, 32, 2**62])
        ),
        (
            "out shares memory with num_blocks_per_row",
            lambda m: slots(ROWS, part(m, 0, INT32, 1, 1), part(m, 0, INT32, 1, 4)),
        ),
        (
            "out shares memory with rows",
            lambda m: slots(part(m, 4, INT32, 1), PAIRS[:, 1:], part(m, 0, INT64, 1, 1)),
        ),
    ],
)  # fmt: skip
def test_arguments_inside_written_memory_are_rejected(message, call):
    memory = torch.zeros(1 << 12, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=message):
        call(memory)
    # The call itself has placed 3 or REGIONS in memory.
    assert memory.sum() in (0, 3, REGIONS.view(torch.uint8).sum())


@pytest.mark.parametrize("side", ["src", "dst"])
def test_offsets_from_a_tensor_without_elements_are_rejected(side):
    """Found by the fuzzer: an empty tensor has no address, so bytes were written starting at
    address 0.
    """
    memory = torch.zeros(256, dtype=torch.uint8)
    sides = {"src": memory, "dst": memory.clone(), side: memory.view(1, 256)[:0]}
    regions, pairs = torch.tensor([[0, 32, 0, 32, 32]]), torch.tensor([[0, 1]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"pages at offset 0 of {side} that lie outside"):
        ops.copy_blocks(*sides.values(), regions, pairs, 8, 8)


@pytest.mark.parametrize(
    ("region", "is_refused"),
    [
        ([100, 32, 0, 32, 32], True),  # found by the fuzzer: `memcpy` with overlapping bytes
        ([0, 32, 32, 32, 32], True),  # page i of one side is page i + 1 of the other side
        ([0, 16, 0, 16, 32], True),  # consecutive pages overlap
        ([0, 32, 0, 64, 32], True),
        ([16, 64, 0, 64, 32], True),
        ([0, 64, 32, 64, 32], False),  # pages of src and dst alternate in memory
        ([128, 64, 0, 64, 32], True),
        ([0, 32, 0, 32, 32], False),
        ([0, 32, 256, 32, 32], False),
    ],
)
@pytest.mark.parametrize("src", [True, False])
def test_copies_between_partially_overlapping_pages_are_rejected(region, is_refused, src):
    memory = torch.arange(512).to(torch.uint8)
    before = memory.clone()
    pairs = torch.tensor([[0, 3], [1, 4], [-1, 5]], dtype=torch.int32)
    arguments = memory if src else None, memory, torch.tensor([region]), pairs, 6, 6
    if is_refused:
        with pytest.raises(
            RuntimeError, match=r"regions\[0\] has pages of dst that partially overlap pages of src"
        ):
            ops.copy_blocks(*arguments)
        assert torch.equal(memory, before)
        return
    ops.copy_blocks(*arguments)
    source, source_stride, destination, stride, size = region
    for first, to in pairs.tolist():
        page = before[source + first * source_stride :][:size] if first >= 0 else torch.zeros(size)
        assert torch.equal(memory[destination + to * stride :][:size], page.to(torch.uint8))


@pytest.mark.parametrize("src", [True, False])
def test_page_both_read_and_written_is_rejected_for_any_form_of_memory(src):
    memory = torch.arange(256).to(torch.uint8)
    before, regions = memory.clone(), torch.tensor([[0, 32, 0, 32, 32]])
    pairs = torch.tensor([[0, 1], [1, 2]], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"pairs\[1\] reads page 1, which pairs\[0\] writes to"):
        ops.copy_blocks(memory if src else None, memory, regions, pairs, 8, 8)
    assert torch.equal(memory, before)


def test_owners_other_than_a_list_or_tuple_are_rejected():
    """Found by the fuzzer: torch never returns if it is given an infinite iterator."""
    memory, pairs = torch.zeros(256, dtype=torch.uint8), torch.zeros(0, 2, dtype=torch.int32)
    regions = torch.tensor([[0, 32, 0, 32, 32]])
    with pytest.raises(TypeError, match=r"owners is .*: expected a list or tuple of tensors"):
        ops.copy_blocks(None, memory, regions, pairs, 8, 8, owners=itertools.repeat(memory))
    cache = torch.zeros(4, 2, 4, 8)
    with pytest.raises(TypeError, match=r"owners is .*: expected a list or tuple of tensors"):
        ops.permute_blocks_(cache, pairs[:, 0].long(), pairs, 4, True, itertools.repeat(cache))


# Infinite iterables and excessive sizes.


def test_infinite_iterables_are_rejected():
    def endless():
        while True:
            yield 1

    for tokens in (ClaimsMany(), ManyMembers(), range(HUGE), np.broadcast_to(np.int32(1), (HUGE,))):
        with pytest.raises(
            ValueError, match="token_ids has 1099511627776 entries: expected at most"
        ):
            Request("r", tokens)
    with pytest.raises(TypeError, match=r"token_ids is <generator .*: expected integers"):
        Request("r", endless())


def test_errors_state_the_number_of_entries_of_nested_lists():
    """Found by the fuzzer: numpy reads every sequence inside a list to its end."""
    for values, inner in (
        ([ClaimsMany()], "[0]"),
        ([[1], ClaimsMany()], "[1]"),
        (([[1, 2]], [[ClaimsMany(), 1]]), "[1][0][0]"),
        ([range(HUGE)], "[0]"),
    ):
        with pytest.raises(ValueError, match=re.escape(f"ids{inner} has 1099511627776 entries")):
            as_array(values, "ids")
    with pytest.raises(TypeError, match=r"ids is \[1, .*: expected an array of integers"):
        as_array([1, ClaimsMany()], "ids")
    in_itself = []
    in_itself.append(in_itself)
    with pytest.raises(ValueError, match="is a sequence: expected at most 8 dimensions"):
        as_array(in_itself, "ids")
    assert as_array([[1, 2], range(2), (3, 4), np.arange(2)], "ids").shape == (4, 2)


def test_infinite_iterables_of_requests_are_rejected():
    manager = KVCacheManager(4, 9, 16)
    for new in (ClaimsMany(), ManyMembers()):
        with pytest.raises(ValueError, match="new has 1099511627776 entries: expected at most"):
            manager.step(new=new)
    with pytest.raises(ValueError, match="new has more than 1048576 entries"):
        manager.step(new=itertools.repeat(Request("r", [1])))
    assert manager.pool.num_free == 8


def test_infinite_candidates_are_rejected():
    groups = [GroupSpec("full_attention", 4)]
    sizes = {"max_num_reqs": 4, "max_model_len": 32, "max_num_tokens": 16}
    for many in (ClaimsMany(), range(HUGE)):
        with pytest.raises(ValueError, match="kernel_sizes has 1099511627776 entries"):
            BlockTables.for_groups(groups, **sizes, kernel_sizes=many)


@pytest.mark.parametrize(("make", "sizes", "message"), [
    (CacheDescription, {"cp_world_size": 4097}, "world_size is 4097 ranks: expected at most 4096"),
    (CacheDescription, {"tp_size": 2**31 - 1}, "world_size is 2147483647 ranks"),
    (CacheDescription, {"stages": [(1, 4096), (1, 1)]}, "world_size is 4097 ranks"),
    (CacheDescription, {"num_layers": 4097}, "num_layers is 4097: expected 1 to 4096"),
    (StateDescription, {"cp_world_size": 4097}, "world_size is 4097 ranks"),
    (StateDescription, {"num_layers": 4097}, "num_layers is 4097: expected 1 to 4096"),
    (RemoteEngine, {"tp_size": 64, "pp_size": 65}, "world_size is 4160 ranks"),
    (RemoteEngine, {"stages": [(1, 4096), (1, 1)]}, "world_size is 4097 ranks"),
    (KVTopology, {"tp_size": 64, "pp_size": 65}, "world_size is 4160 ranks"),
    (KVTopology, {"stages": [(1, 1), (1, 4096)], "pp_size": 2}, "world_size is 4097 ranks"),
    (KVStorage, {"num_layers": 4097}, "num_layers is 4097: expected 1 to 4096"),
])  # fmt: skip
def test_sizes_with_excessive_loops_are_rejected(make, sizes, message):
    """Found by the fuzzer: planning for 65,536 ranks took 12 s, and laying out 65,536 layers took 6
    s.
    """
    heads = {"total_num_kv_heads": 1, "block_size": 1}
    needed = {
        CacheDescription: {"engine_id": "a", "num_layers": 2, "head_size": 1, **heads},
        StateDescription: {
            "engine_id": "a",
            "num_layers": 2,
            "tensors": [StateTensor(sections=((1, 1),))],
        },
        RemoteEngine: {},
        KVTopology: {"engine_id": "a", "tp_rank": 0, "tp_size": 1, **heads},
        KVStorage: {"num_blocks": 1, "block_size": 1, "num_kv_heads": 1, "head_size": 1},
    }[make]
    make(**needed)
    with pytest.raises(ValueError, match=message):
        make(**{**needed, **sizes})


# Calls that must leave a consistent state.


def test_request_whose_name_frees_another_is_freed_with_its_earlier_row():
    manager = KVCacheManager(4, 20, 32)
    first, second, taken = (Request(name, range(i, i + 9)) for i, name in enumerate("abc"))

    class Freeing:
        @property
        def request_id(self):
            manager.free(first, second)
            manager.step(new=[taken])
            return "b"

    manager.step(new=[first, second])
    manager.free(first, Freeing())
    for gone in (first, second):
        with pytest.raises(ValueError, match="is not admitted"):
            manager.row(gone)
    assert manager.step([manager.row(taken)], [1], token_ids=[7]).status.tolist() == [0]
    check_invariants(manager)


def test_sequence_with_an_incorrect_length_leaves_no_blocks():
    class Changing(Seq):
        def get_len(self):
            self.asked = getattr(self, "asked", 0) + 1
            return 5 if self.asked % 2 else 19

    for caching in (False, True):
        manager = BlockSpaceManager(4, 12, 0, enable_caching=caching)
        liar = Liar(1, [1, 2, 3])
        for seq in (liar, Changing(2, list(range(19)))):
            group = Group(seq.seq_id, [seq], Changing(9, [1] * 5))
            for each in (group, Group(seq.seq_id, [seq])):
                try:
                    manager.allocate(each)
                except ValueError:
                    pass
                else:
                    manager.free(seq)
                    manager.free_cross(each)
                manager.check_invariants()
                assert manager.get_num_free_gpu_blocks() == 11
