# SPDX-License-Identifier: Apache-2.0
"""kvcache's manager in vLLM's own schedulers makes the same decisions as vLLM's own manager.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import collections
import copy
import functools
import gc
import itertools
import pickle
import types
import weakref

import pytest

pytest.importorskip("vllm")

import prometheus_client
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.lora.request import LoRARequest
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    RSWASpec,
    SlidingWindowMLASpec,
)
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvcache_vllm import VllmAsyncScheduler, VllmCacheManager, VllmScheduler, compatibility, metrics
from kvcache_vllm import scheduler as ours_scheduler
from tests.machinery import vllm_schedulers
from tests.machinery.vllm_models import write_config
from tests.machinery.vllm_schedulers import (
    BLOCK,
    HAS_LOOKAHEAD,
    IS_032,
    LONGEST,
    MAMBA_MODES,
    NUM_SEEDS,
    PAIRS,
    RETENTIONS,
    SideBySide,
    answer,
    block_hasher,
    engine_config,
    image,
    make_request,
    make_scheduler,
)


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Return the folders of tiny models' configurations, keyed by name."""
    return {"llama": write_config(tmp_path_factory.mktemp("llama"), "llama")}


BOTH, HITS = (False, True), {"hit tokens": 0}


def alike(
    groups, num_blocks, num_steps, *, seeds=(0,), modes=(False,), events=True, config=None,
    wanted=HITS, is_tight=None, **options,
):  # fmt: skip
    """Yield cases: `events` may be None, for all but the asynchronous scheduler. `wanted` are counts
    that must be exceeded. In a tight pool, requests are preempted, and only there.
    """
    for seed in seeds:
        for is_async in modes:
            used = {"events": not is_async if events is None else events, **(config or {})}
            yield groups, num_blocks, num_steps, seed, is_async, used, wanted, is_tight, options


LOOKAHEADS = (1, 3) if HAS_LOOKAHEAD else ()  # hashes that also cover the tokens after their block
DECISIONS = {
    "full attention": [
        case for n in (40, 90, 300)
        for case in alike("full", n, 150, seeds=range(3), modes=BOTH, events=None,
                          wanted={**HITS, "aborts": 0}, is_tight=n < 100)
    ],
    "drafts without evictions":
        alike("full", 3_000, 150, seeds=range(3), wanted={**HITS, "drafts": 0}, drafts=True),
    # kvcache caches the drafts accepted in a request's last step, but vLLM 0.32 does not, so that
    # its evictions may differ.
    "drafts in a tight pool": alike("full", 40, 150, seeds=range(3), wanted={"drafts": 0},
                                    exact=not IS_032, drafts=True),
    "drafts and windows": alike("window, full", 3_000, 60, wanted={**HITS, "drafts": 0},
                                drafts=True, retention=0),
    "windows and enough space": [
        case for groups in ("window", "window, full", "window, window, full")
        for retention in RETENTIONS for case in alike(groups, 2_000, 60, retention=retention)
    ],
    # vLLM caches every block of these groups, including the last block of a chunk, which no hit reads.
    # Hits end at multiples of all groups' block sizes, of which the chunked group's is the largest.
    "chunked local attention": [
        case
        for groups in ("chunked, full", "chunked32, full", "chunked32, full32", "chunked48, full")
        for retention in (None, 0)
        for case in alike(groups, 2_000, 100, modes=BOTH, events=False, retention=retention)
    ],
    "chunked local attention and windows":
        alike("chunked32, window, window32, full", 2_000, 100, modes=BOTH, events=False),
    "states and enough space": [
        case
        for groups in (*(f"mamba {mode}, full" for mode in MAMBA_MODES),
                       "mamba align, mamba align, window, full")
        for retention in RETENTIONS
        for case in alike(groups, 3_000, 60, modes=BOTH, events=False, retention=retention)
    ],
    "states of drafts": [
        case
        for groups in ("mamba7 align, full", "mamba7 align, mamba7 align, window, full")
        for retention in RETENTIONS
        for case in alike(groups, 3_000, 60, modes=BOTH, events=None,
                          wanted={} if IS_032 else {**HITS, "scheduled drafts": 0}, drafts=True,
                          retention=retention, follow_ups=True, exact=not IS_032)
    ],
    "states of a drafter's drafts": [
        case
        # Longer lookaheads are those of drafters with several modules, which are refused.
        for options in ({"slots": 7}, *({"lookahead": n} for n in LOOKAHEADS if n == 1))
        for retention in (None, 0)
        for case in alike("mamba7 align, full", 3_000, 60, drafts=True,
                          wanted={} if IS_032 else {**HITS, "drafts": 0}, retention=retention,
                          follow_ups=True, exact=not IS_032, **options)
    ],
    "states of drafts without prefix caching": [
        case for n in (100, 3_000)
        for case in alike("mamba7 none, full", n, 80, modes=BOTH, events=False,
                          config={"enable_prefix_caching": False}, is_tight=n == 100,
                          wanted={"scheduled drafts": 0}, drafts=True)
    ],
    "DeepSeek-V4": [
        case
        for groups in ("mla window, mla", "mla window, mla, ring") for retention in (0, None)
        for drafts in (False, True)
        for case in alike(groups, 2_000, 60, modes=BOTH, events=None, retention=retention,
                          drafts=drafts, follow_ups=True)
    ],
    "one block per request in a tight pool":
        alike("ring, full", 60, 120, modes=BOTH, events=None, is_tight=True),
    "extracted hidden states": alike("hidden states, mla", 2_000, 120, modes=BOTH, events=None),
    # A session drops the last token of each answer, and keeps its blocks while it waits for input.
    # With either manager, vLLM 0.32 loses sessions that are preempted under asynchronous scheduling:
    # they have status WAITING but are in no queue.
    "sessions": [
        case
        for seed, n, mode in ((0, 3_000, False), (0, 3_000, True), (1, 60, False),
                              *([] if IS_032 else [(6, 60, True)]))
        for case in alike("full", n, 120, seeds=[seed], modes=[mode], wanted={**HITS, "parts": 20},
                          is_tight=n == 60, sessions=True)
    ],
    # Sessions stop while later steps are in flight, and their parts are computed in several chunks.
    "asynchronous sessions": [
        # With vLLM 0.32's own manager, drafts of sessions read slots that were never written.
        *(() if IS_032 else alike("full", 60, 60, seeds=[1703], modes=BOTH, is_tight=True,
                                  sessions=True, drafts=True)),
        *(case for groups in ("full", "window, full") for drafts in (False, True)
          for case in alike(groups, 30_000, 60, seeds=[1102], modes=[True],
                            config={"max_num_batched_tokens": 64}, wanted={**HITS, "parts": 20},
                            sessions=True, drafts=drafts)),
    ],
    # Drafters (EAGLE, MTP) also write to the slots after each step's tokens, so blocks are needed
    # earlier.
    "lookahead slots of drafters": [
        case for n in (60, 3_000)
        for case in alike("full", n, 120, seeds=[4], modes=BOTH, is_tight=n == 60, slots=7)
    ],
    "lookahead": [
        case for n in (60, 3_000) for lookahead in LOOKAHEADS
        for case in alike("full", n, 120, seeds=[4], modes=BOTH, is_tight=n == 60,
                          lookahead=lookahead)
    ],
    "lookahead and drafts": [
        case for lookahead in LOOKAHEADS
        for case in alike("full", 3_000, 120, seeds=[5], wanted={**HITS, "drafts": 0}, drafts=True,
                          lookahead=lookahead)
    ],
    "lookahead and sessions": [
        case for lookahead in LOOKAHEADS
        for case in alike("full", 3_000, 120, seeds=[6], modes=BOTH, wanted={**HITS, "parts": 20},
                          sessions=True, lookahead=lookahead)
    ],
    "lookahead and several groups": [
        case for lookahead in LOOKAHEADS for groups in ("window, full", "mamba align, full")
        for case in alike(groups, 3_000, 100, seeds=[7], lookahead=lookahead)
    ],
    "images": alike("full", 300, 150, modes=BOTH, images=True),
    "resets of the cache": alike("full", 300, 150, seeds=range(2), modes=BOTH, resets=True),
    "priorities": alike("full", 90, 150, modes=BOTH, config={"scheduling_policy": "priority"},
                        priorities=True),
    "context parallelism": [
        case for n in (40, 3_000)
        for case in alike("full", n, 120, is_tight=n == 40, context_parallel_size=2)
    ],
    "no prefix caching": [
        case for n in (60, 3_000)
        for groups in ("full", "window, full", "mamba none, full", *["chunked, full32"] * (n > 60))
        for case in alike(groups, n, 100, events=False, config={"enable_prefix_caching": False},
                          wanted={}, is_tight=n == 60)
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{name}: {', '.join(map(str, case[:5]))}, {case[8]}")
        for name, cases in DECISIONS.items()
        for case in cases
    ],
)
def test_decisions_are_the_same(case, models):
    groups, num_blocks, num_steps, seed, is_async, used, wanted, is_tight, options = case
    config = engine_config(models["llama"], is_async=is_async, **used)
    names, counts = tuple(groups.split(", ")), collections.Counter()
    for each in range(seed, seed + NUM_SEEDS):
        counts += SideBySide(each, config, names, num_blocks, **options).run(num_steps)
    print(f"{groups}: seeds {seed} to {seed + NUM_SEEDS - 1}, {dict(counts)}, 0 differences")
    assert all(counts[name] > least for name, least in wanted.items())
    assert is_tight is None or (counts["preemptions"] > 0) == is_tight
    assert used.get("enable_prefix_caching", True) or counts["hit tokens"] == 0


@pytest.mark.parametrize("retention", RETENTIONS)
def test_in_a_tight_pool_only_the_order_of_a_requests_blocks_differs(
    retention, models, monkeypatch
):
    """vLLM releases a request's blocks group by group, so it evicts all sliding-window blocks
    before the full-attention blocks. kvcache releases the tails of all groups first. If vLLM's
    manager is patched to use this order, it makes the same decisions.
    """

    def free(self, request_id):
        groups = [manager.pop_blocks_for_free(request_id) for manager in self.single_type_managers]
        tails = itertools.zip_longest(*(reversed(blocks) for blocks in groups))
        self.block_pool.free_blocks([block for tail in tails for block in tail if block])

    monkeypatch.setattr(KVCacheCoordinator, "free", free)
    config = engine_config(models["llama"])
    counts = SideBySide(0, config, ("window", "full"), 150, retention=retention).run(80)
    assert counts["hit tokens"] > 0 and counts["preemptions"] > 0


STATES = (*(f"mamba {mode}" for mode in MAMBA_MODES), "mamba7 align")
TIGHT = [
    *((1, groups, 120, 150, {}) for groups in
      ("window", "window, full", "chunked, full", "chunked32, full")),
    *((2, f"{kind}, {kind}, full", n, 150, {"drafts": kind == "mamba7 align"})
      for kind in STATES for n in (60, 150)),
    # vLLM sends all blocks of a session to the worker again, and the worker copies the session's last
    # state from them.
    *((seed, "mamba align, full", n, 120, {"sessions": True, "retention": None})
      for seed, n in ((0, 3_000), (1000, 150), (1014, 150))),
]  # fmt: skip


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("seed,groups,num_blocks,num_steps,options", TIGHT)
def test_windows_and_states_are_correct_in_a_tight_pool(
    seed, groups, num_blocks, num_steps, options, is_async, models
):
    """Hits and preemptions differ from vLLM's, because blocks leave windows and are evicted in a
    different order. All requests must read their own KV, finish and release their blocks.
    """
    config = engine_config(models["llama"], is_async=is_async)
    options = {"exact": False, "retention": 0, **options}
    sides = SideBySide(seed, config, tuple(groups.split(", ")), num_blocks, **options)
    counts = sides.run(num_steps)
    assert counts["parts"] > 20 if "sessions" in options else counts["requests"] > 40


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_blocks", [150, 3_000])
def test_states_written_inside_chunks_overwrite_no_state_in_use(num_blocks, is_async, models):
    """Mamba 2 workers decide themselves where to write such states.

    vLLM's scheduler allocates the blocks for these states.
    """
    config = engine_config(models["llama"], is_async=is_async)
    sides = SideBySide(3, config, ("mamba2 align", "mamba2 align", "full"), num_blocks, exact=False)
    assert sides.run(120)["requests"] > 40
    assert min(contents.checkpoints for contents in sides.contents) > 10


class FakeConnector:
    """A connector that claims to have 192 tokens of every request.

    If `is_async` is set, the tokens arrive while the request waits.
    """

    requires_kv_delivery = supports_divergent_local_hybrid_hits = False

    def __init__(self, is_async):
        self.is_async, self.is_on, self.unhashed = is_async, True, []

    def get_num_new_matched_tokens(self, request, num_computed):
        count = max(192 - num_computed, 0) if self.is_on else 0
        return count, self.is_async and count > 0

    def update_state_after_alloc(self, request, blocks, count, *_):
        if count:
            ids = blocks.get_block_ids()[0]
            self.unhashed.append([ids.index(each) for each in blocks.get_unhashed_block_ids()])

    def get_loaded_kv_cache_group_ids(self, request):
        return (0,)

    def request_finished(self, request, ids):
        return False, None

    def build_connector_meta(self, scheduled):
        return KVConnectorMetadata()

    def get_external_cache_hit_sources(self, *_, **__):
        return {}

    def __getattr__(self, name):
        if name.startswith(("has_", "get_", "take_", "on_", "update_", "register_")):
            return lambda *_, **__: None
        raise AttributeError(name)


def with_connector(cls, is_async, models):
    scheduler = make_scheduler(cls, engine_config(models["llama"]), ("full",), 300)
    scheduler.connector = FakeConnector(is_async)
    scheduler.connector.take_events = lambda: ()
    return scheduler


def test_blocks_receiving_external_kv_are_not_hits(models):
    found = []
    for cls in PAIRS[False]:
        scheduler = with_connector(cls, True, models)
        scheduler.connector.is_on = False
        hasher, tokens = block_hasher(ours=cls is VllmScheduler), [3 + i % 400 for i in range(200)]
        scheduler.add_request(make_request(0, [*tokens[:128], 5, 6], hasher, 3))
        while scheduler.requests:
            scheduled = scheduler.schedule()
            scheduler.update_from_output(scheduled, answer(scheduler, scheduled))
        scheduler.connector.is_on = True
        scheduler.add_request(make_request(1, tokens, hasher, 3))
        scheduler.schedule()
        found.append(scheduler.connector.unhashed)
    assert found[0] == found[1] == [[8, 9, 10, 11]]


@pytest.mark.parametrize("invalid", [0, 1, 7])
def test_tokens_of_a_failed_load_within_the_step_are_computed(invalid, models):
    found = []
    for cls in PAIRS[False]:
        scheduler, log = with_connector(cls, False, models), []
        scheduler.recompute_kv_load_failures = True
        hasher = block_hasher(ours=cls is VllmScheduler)
        scheduler.add_request(make_request(0, [3 + i % 400 for i in range(600)], hasher, 5))
        request = scheduler.requests["r0"]
        while scheduler.requests:
            scheduled = scheduler.schedule()
            output = answer(scheduler, scheduled)
            if not log:
                ids = scheduler.kv_cache_manager.get_block_ids("r0")[0]
                output.kv_connector_output = KVConnectorOutput(invalid_block_ids={ids[invalid]})
            scheduler.update_from_output(scheduled, output)
            log.append((scheduled.num_scheduled_tokens, request.num_computed_tokens))
        assert scheduler.kv_cache_manager.usage < 1e-9
        found.append(log)
    assert found[0] == found[1]


def test_request_hashes_are_a_list_for_other_readers():
    request = make_request(0, list(range(3, 103)), block_hasher(ours=True), 5)
    hashes = [*request.block_hashes]
    for copied in (pickle.loads(pickle.dumps(request.block_hashes)), copy.deepcopy(request)):
        assert getattr(copied, "block_hashes", copied) == hashes
    assert request.block_hashes == hashes and request.block_hashes + [b""] == [*hashes, b""]
    assert request.block_hashes != hashes[1:]


def test_encoders_get_the_same_number_of_blocks_as_in_vllm():
    spec = CrossAttentionSpec(**vllm_schedulers.SHAPE)
    groups = [
        KVCacheGroupSpec(["self"], vllm_schedulers.SPECS["full"]()),
        KVCacheGroupSpec(["cross"], spec),
    ]
    config = KVCacheConfig(num_blocks=40, kv_cache_tensors=[], kv_cache_groups=groups)
    pair = [
        cls(config, 512, BLOCK, BLOCK, enable_caching=False)
        for cls in (KVCacheManager, VllmCacheManager)
    ]
    for number, (num_tokens, num_encoder_tokens) in enumerate([(9, 100), (40, 200), (17, 1)]):
        request = make_request(number, range(3, 3 + num_tokens), None, 50)
        answers = []
        for manager in pair:
            manager.new_step_starts()
            given = manager.allocate_slots(
                request, num_tokens, num_encoder_tokens=num_encoder_tokens
            )
            again = given and manager.get_blocks(request.request_id).get_block_ids()
            answers.append(again and [len(ids) for ids in again])
        assert answers[0] == answers[1]
        assert abs(pair[0].usage - pair[1].usage) < 1e-9
    assert answers[1] is not None and answers[1][1] == 1


@pytest.mark.parametrize("lookahead", [0, *([1, 2, 3, 15, 40] if HAS_LOOKAHEAD else [])])
@pytest.mark.parametrize("name", ["sha256_cbor", "xxhash_cbor", "sha256", "xxhash"])
def test_hashes_equal_vllms_byte_for_byte(name, lookahead):
    theirs, ours = (block_hasher(name, ours=ours, lookahead=lookahead) for ours in (False, True))
    images = [image("cat", 20, 30), image("dog", 64, 1), image("cat", 96, 40)]
    for options in (
        {},
        {"cache_salt": "s"},
        {"lora_request": LoRARequest("ad", 1, "/no/such")},
        {"mm_features": images},
        {"mm_features": images, "cache_salt": "s"},
    ):
        requests = [
            Request(
                request_id="r",
                prompt_token_ids=[7 * i % 1_000 for i in range(333)],
                sampling_params=SamplingParams(max_tokens=9),
                pooling_params=None,
                block_hasher=hasher,
                **options,
            )
            for hasher in (theirs, ours)
        ]
        for token in range(40):
            for request in requests:
                request.append_output_token_ids(token)
        assert requests[0].block_hashes == list(requests[1].block_hashes)
        assert len(requests[0].block_hashes) == (373 - lookahead) // BLOCK


class TestRefusals:
    """Unsupported options are rejected before any request is served, with a one-line error that
    says what to change.
    """

    def test_invalid_retention_interval_is_rejected(self, models):
        config = engine_config(models["llama"])
        with pytest.raises(ValueError, match="retention_interval is 40: expected None, 0 or a"):
            make_scheduler(VllmScheduler, config, ("window", "full"), 100, retention=40)

    @pytest.mark.parametrize("spec,message", [
        (RSWASpec(**vllm_schedulers.SHAPE, rswa_window=64),
         "KV cache group of RSWASpec: kvcache's scheduler for vLLM does not .*, because blocks"),
        (SlidingWindowMLASpec(**vllm_schedulers.SHAPE, sliding_window=64, bounded_replay=True),
         "use --no-swa-bounded-replay, or serve"),
        (vllm_schedulers.state_spec("align", block_size=64),
         "blocks of states 64: .*; use --prefix-match-unit with"),
    ])  # fmt: skip
    def test_unsupported_kinds_of_groups_are_rejected(self, spec, message, models, monkeypatch):
        monkeypatch.setitem(vllm_schedulers.SPECS, "other", lambda: spec)
        with pytest.raises(ValueError, match=message):
            make_scheduler(VllmScheduler, engine_config(models["llama"]), ("other", "full"), 100)

    def test_unknown_options_are_rejected(self, models):
        for name in ("evict", "num_host_blocks", "hash_bytes"):
            config = engine_config(models["llama"], additional_config={"kvcache": {name: 1}})
            with pytest.raises(ValueError, match=f"the option '{name}' for kvcache: expected"):
                make_scheduler(VllmScheduler, config, ("full",), 100)
        config = engine_config(models["llama"], additional_config={"kvcache": "learned"})
        with pytest.raises(
            ValueError, match="additional_config has 'learned' for kvcache: expected"
        ):
            make_scheduler(VllmAsyncScheduler, config, ("full",), 100)

    def test_old_vllm_version_is_rejected(self, monkeypatch):
        monkeypatch.setattr(compatibility, "version", lambda name: "0.20.1")
        with pytest.raises(ImportError, match=r"vLLM is 0.20.1: .* needs 0.32 or later"):
            compatibility.check_version()

    def test_auxiliary_outputs_are_rejected(self, models):
        config = engine_config(models["llama"])
        config.aux_output_config.enable_return_routed_experts = True
        with pytest.raises(ValueError, match="aux_output_config is enabled: kvcache's scheduler"):
            make_scheduler(VllmScheduler, config, ("full",), 100)


def no_skipped_tokens(monkeypatch):
    """Patch vLLM's manager to keep the blocks that have left a window."""
    monkeypatch.setattr(
        SlidingWindowManager, "get_num_skipped_tokens", lambda self, *args, **options: 0
    )


def no_lookahead_slots(monkeypatch):
    """Patch vLLM's manager to allocate no slots for drafts."""
    own = KVCacheManager.allocate_slots

    @functools.wraps(own)
    def allocate(self, *args, num_lookahead_tokens=0, **options):
        return own(self, *args, **options)

    monkeypatch.setattr(KVCacheManager, "allocate_slots", allocate)


class TestLaterVersions:
    """An unknown version of vLLM is accepted or rejected based on its interfaces and decisions."""

    @staticmethod
    def later(method):
        """Return a subclass of vLLM's manager with this method added or replaced."""
        return type("KVCacheManager", (KVCacheManager,), {method.__name__: method})

    @pytest.fixture
    def ours(self):
        """Return a subclass of kvcache's manager, so that adapting it does not affect other tests."""
        return type("Ours", (VllmCacheManager,), {})

    def test_a_new_parameter_is_accepted_with_vllms_default(self, ours):
        def usage_of(self, request_id, *, unit="blocks", fast=False):
            raise NotImplementedError

        ours.usage_of = lambda self, request_id: request_id
        ours.usage_of.__name__ = "usage_of"
        compatibility.accept_new_parameters(ours, self.later(usage_of))
        manager = object.__new__(ours)
        assert manager.usage_of("r") == manager.usage_of(request_id="r", unit="blocks") == "r"
        with pytest.raises(
            ValueError, match="fast is True: kvcache's usage_of supports only vLLM's"
        ):
            manager.usage_of("r", fast=True)

    def test_a_new_parameter_without_a_default_is_rejected_by_name(self, ours):
        def free(self, request, reason):
            raise NotImplementedError

        with pytest.raises(ValueError, match=r"KVCacheManager\.free has the parameter 'reason'"):
            compatibility.accept_new_parameters(ours, self.later(free))

    def test_installed_vllm_has_no_parameter_that_ours_lacks(self):
        before = dict(vars(VllmCacheManager))
        compatibility.accept_new_parameters(VllmCacheManager, KVCacheManager)
        assert dict(vars(VllmCacheManager)) == before

    def test_a_new_call_of_the_scheduler_is_rejected_by_name(self, models, monkeypatch):
        config = engine_config(models["llama"])
        module = types.ModuleType("later")
        monkeypatch.setattr(
            compatibility.inspect,
            "getsource",
            lambda each: "self.kv_cache_manager.block_pool.shrink() or self.kv_cache_manager.usage",
        )
        scheduler = make_scheduler(PAIRS[False][0], config, ("full",), 99)
        found = compatibility.missing_attributes(scheduler.kv_cache_manager, [module])
        assert found == ["block_pool.shrink"]
        with pytest.raises(ValueError, match=r"uses block_pool\.shrink of its KV cache manager"):
            make_scheduler(VllmScheduler, config, ("full",), 99)

    @pytest.mark.parametrize("found,is_warned", [("0.33.1", False), ("0.99.0", True)])
    def test_unknown_vllm_version_gives_a_warning(self, found, is_warned, models, monkeypatch):
        warnings = []
        monkeypatch.setattr(compatibility, "version", lambda name: found)
        monkeypatch.setattr(
            ours_scheduler._log, "warning", lambda *args: warnings.append(args[0] % args[1:])
        )
        make_scheduler(VllmScheduler, engine_config(models["llama"]), ("full",), 99)
        assert len(warnings) == is_warned
        assert not is_warned or "vLLM 0.99.0 is installed. It has all required" in warnings[0]

    def test_managers_that_differ_are_rejected_in_an_unknown_version(self, models, monkeypatch):
        def too_few(self, request, *args):
            return self.empty_kv_cache_blocks, 0, find(self, request, *args)[2]

        find = VllmCacheManager.get_computed_blocks
        monkeypatch.setattr(VllmCacheManager, "get_computed_blocks", too_few)
        scheduler = make_scheduler(VllmScheduler, engine_config(models["llama"]), ("full",), 99)
        assert scheduler.compared.startswith(
            "hit tokens of a request"
        )  # a tested version only gives a warning
        monkeypatch.setattr(compatibility, "version", lambda name: "0.99.0")
        with pytest.raises(
            ValueError, match=r"differ at startup \(hit tokens of a request .*: 0, vLLM"
        ):
            make_scheduler(VllmScheduler, engine_config(models["llama"]), ("full",), 99)

    @pytest.mark.parametrize(
        "groups,broken", [(("window", "full"), no_skipped_tokens), (("full",), no_lookahead_slots)]
    )
    def test_managers_that_differ_in_rare_steps_are_detected(
        self, groups, broken, models, monkeypatch
    ):
        config = engine_config(models["llama"])
        assert make_scheduler(VllmScheduler, config, groups, 99).compared.num_hit_tokens > 0
        broken(monkeypatch)
        compared = make_scheduler(VllmScheduler, config, groups, 99).compared
        assert isinstance(compared, str) and "vLLM's" in compared

    def test_a_manager_that_fails_is_rejected(self, models, monkeypatch):
        def fail(self, *args, **options):
            raise KeyError("r1")

        monkeypatch.setattr(VllmCacheManager, "allocate_slots", fail)
        with pytest.raises(ValueError, match=r"fails at startup \(KeyError: 'r1'\); serve with"):
            make_scheduler(VllmScheduler, engine_config(models["llama"]), ("full",), 99)

    def test_groups_with_which_vllms_own_manager_fails_are_rejected(self, models):
        with pytest.raises(ValueError, match=r"vLLM's own manager fails .*chunked local attention"):
            make_scheduler(VllmScheduler, engine_config(models["llama"]), ("chunked", "full32"), 99)


def test_eviction_policy_is_an_option(models):
    config = engine_config(models["llama"], additional_config={"kvcache": {"eviction": "learned"}})
    scheduler = make_scheduler(VllmScheduler, config, ("full",), 100)
    assert scheduler.kv_cache_manager.native.options.eviction == "learned"


def test_request_of_maximum_length_is_released_after_its_end(models):
    scheduler = make_scheduler(VllmScheduler, engine_config(models["llama"]), ("full",), 200)
    request = make_request(0, range(3, LONGEST - 5), block_hasher(), 8)
    scheduler.add_request(request)
    ended = weakref.ref(request)
    del request
    while scheduler.has_unfinished_requests():
        scheduled = scheduler.schedule()
        scheduler.update_from_output(scheduled, answer(scheduler, scheduled))
    for _ in range(2 * BLOCK):  # long enough that the request would have needed more blocks
        scheduled = scheduler.schedule()
        scheduler.update_from_output(scheduled, answer(scheduler, scheduled))
    del scheduled
    gc.collect()
    assert ended() is None


def test_counts_are_not_logged_as_loads():
    """vLLM logs the entries of this dictionary as loads if any value is nonzero, so the counts must
    not appear there.
    """
    stats = SchedulerStats()
    metrics.add_counts(stats, {"native_calls": 3, "stored_blocks 1": 5})
    assert not any(stats.num_kv_fetch_reqs_by_stage.values())
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(served_model_name="counts"))
    metrics.KVCacheStatLogger(config).record(stats, None)
    labels = {"model_name": "counts", "engine": "0"}
    value_of = prometheus_client.REGISTRY.get_sample_value
    assert value_of("kvcache:native_calls_total", labels) == 3
    assert value_of("kvcache:stored_blocks_total", labels | {"group": "1"}) == 5


def test_block_whose_last_token_was_not_computed_is_not_cached(models):
    """The drafts of two steps were rejected."""
    config = engine_config(models["llama"])
    manager = make_scheduler(VllmAsyncScheduler, config, ("full",), 40).kv_cache_manager
    request = make_request(0, range(61), block_hasher(ours=True), 100)
    assert manager.allocate_slots(request, 61) is not None
    request.status = RequestStatus.RUNNING
    # Each step has one token and 7 drafts; the second assumes that all drafts were accepted.
    for start in (61, 69):
        request.num_computed_tokens = start
        assert manager.allocate_slots(request, 8, num_lookahead_tokens=7) is not None
    request.append_output_token_ids([1, 2, 3])
    request.num_computed_tokens = 63
    manager.free(request)
    again = make_request(1, [*request.all_token_ids, 5, 6], block_hasher(ours=True), 100)
    assert manager.get_computed_blocks(again)[1] == 48
