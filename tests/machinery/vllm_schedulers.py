# SPDX-License-Identifier: Apache-2.0
"""Compares two vLLM schedulers, one with vLLM's cache manager and one with kvcache's, without
running a model.
"""

import collections
import contextlib
import math
import os
import random
import zlib
from unittest import mock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm import SamplingParams
from vllm.config import KVEventsConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched import async_scheduler
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

import kvcache_vllm as ours
from kvcache.allocator import check_invariants
from kvcache_vllm import hashing
from kvcache_vllm.compatibility import check_version
from tests.machinery.vllm_outputs import compare_outputs, compare_scheduled, compare_states

# Each comparison runs with this number of consecutive seeds.
NUM_SEEDS = int(os.environ.get("KVCACHE_VLLM_SEEDS", "1"))
BLOCK, LONGEST = 16, 2048  # tokens per block, and maximum tokens per request
NUM_DRAFTS = 7  # maximum number of drafts per request and step
MOST_ENCODER_TOKENS = 100_000
IMAGES = {"cat": 16, "dog": 40, "dot": 1}  # number of tokens of each image
IS_032 = check_version().startswith("0.32")
# vLLM 0.33 supports hashes that cover tokens after their block, and has no Mamba mode "all".
HAS_LOOKAHEAD = hasattr(VllmConfig, "num_hash_lookahead_tokens")
MAMBA_MODES = ("align", "all") if IS_032 else ("align",)
SHAPE = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
TINY = {
    **{"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512,
        "max_position_embeddings": 4096},
    **{"torch_dtype": "bfloat16", "rms_norm_eps": 1e-5},
}  # fmt: skip
TINY_LLAMA = {
    **TINY,
    **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2},
    **{"tie_word_embeddings": False},
}
SPECS = {
    "full": lambda: FullAttentionSpec(**SHAPE),
    "window": lambda: SlidingWindowSpec(**SHAPE, sliding_window=100),
    # DeepSeek-V4
    "mla": lambda: MLAAttentionSpec(**SHAPE),
    "mla window": lambda: SlidingWindowMLASpec(**SHAPE, sliding_window=100),
    "ring": lambda: CircularBufferSpec(**(SHAPE | {"block_size": 8})),
    "hidden states": lambda: HiddenStateCacheSpec(**SHAPE),
    "chunked": lambda: chunked_spec(BLOCK),
    # vLLM enlarges the blocks of groups with smaller pages.
    "full32": lambda: FullAttentionSpec(**(SHAPE | {"block_size": 32})),
    "window32": lambda: SlidingWindowSpec(**(SHAPE | {"block_size": 32}), sliding_window=100),
    "chunked32": lambda: chunked_spec(32),
    "chunked48": lambda: chunked_spec(48),
    "mamba align": lambda: state_spec("align"),
    "mamba2 align": lambda: state_spec(
        "align", num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1
    ),
    "mamba all": lambda: state_spec("all"),
    "mamba none": lambda: state_spec("none", block_size=LONGEST),
    # With pages for the states after drafts.
    "mamba7 align": lambda: state_spec("align", num_speculative_blocks=NUM_DRAFTS),
    "mamba7 none": lambda: state_spec("none", LONGEST, num_speculative_blocks=NUM_DRAFTS),
}


def chunked_spec(block_size):
    shape = SHAPE | {"block_size": block_size}
    return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=64)


def state_spec(mode, block_size=BLOCK, **options):
    return MambaSpec(
        block_size=block_size,
        shapes=((4,),),
        dtypes=(torch.float32,),
        mamba_cache_mode=mode,
        **options,
    )


PAIRS = {
    False: (vllm_scheduler.Scheduler, ours.VllmScheduler),
    True: (async_scheduler.AsyncScheduler, ours.VllmAsyncScheduler),
}


def engine_config(model, *, is_async=False, events=False, **options):
    """Return vLLM's configuration for the model in a folder."""
    if events:
        options["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    arguments = {
        **{"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True},
        **{"dtype": "bfloat16", "max_model_len": LONGEST, "block_size": 32, "seed": 0},
        **{"max_num_seqs": 32, "max_num_batched_tokens": 256},
    }
    config = EngineArgs(model=model, **(arguments | options)).create_engine_config()
    config.scheduler_config.async_scheduling = is_async
    return config


def make_scheduler(
    cls, config, groups, num_blocks, context_parallel_size=1, retention=None, slots=0, lookahead=0
):
    """Make a scheduler for groups of these kinds. `num_blocks` includes the null block.

    If `slots` is given, the configuration resembles that of a drafter (EAGLE, MTP) that writes to
    this number of slots after a step's tokens. The drafter's KV at a block's last position depends
    on `lookahead` later tokens.
    """
    config.parallel_config.decode_context_parallel_size = context_parallel_size
    config.cache_config.num_gpu_blocks = num_blocks
    modes = {kind.partition(" ")[2] for kind in groups if kind.startswith("mamba")}
    config.cache_config.mamba_cache_mode = modes.pop() if modes else "none"
    config.cache_config.block_size = BLOCK
    cache = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=some_tensor(num_blocks) if config.kv_transfer_config else [],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer{i}"], SPECS[kind]()) for i, kind in enumerate(groups)
        ],
        prefix_cache_retention_interval=retention,
    )
    block_size = math.lcm(*(group.kv_cache_spec.block_size for group in cache.kv_cache_groups))
    is_hashed = config.cache_config.enable_prefix_caching
    with with_drafter(slots, lookahead):
        return cls(
            vllm_config=config,
            kv_cache_config=cache,
            log_stats=True,
            block_size=block_size * context_parallel_size,
            hash_block_size=(BLOCK if is_hashed else block_size) * context_parallel_size,
            structured_output_manager=StructuredOutputManager(config),
        )


def some_tensor(num_blocks):
    """Return a tensor that gives each block one byte, so that sizes in bytes are numbers of blocks."""
    sizes = {"layer_stride": num_blocks, "block_stride": 1, "offset": 0}
    return [KVCacheTensor(size=num_blocks, layers=["layer0"], **sizes)]


@contextlib.contextmanager
def with_drafter(slots, lookahead):
    """Patch vLLM's configuration; see `make_scheduler`."""
    values = {}
    if slots:
        values["num_lookahead_tokens"] = slots
        # kvcache's manager rejects drafters with several modules, which read more tokens.
        values["num_prefill_lookahead_tokens"] = 1
    if lookahead:
        values["num_hash_lookahead_tokens"] = lookahead
    with contextlib.ExitStack() as patches:
        for name, value in values.items():
            patches.enter_context(mock.patch.object(VllmConfig, name, value))
        yield


def block_hasher(name="sha256_cbor", size=BLOCK, *, ours=False, lookahead=0):
    """Return vLLM's or kvcache's hasher for blocks of `size` tokens."""
    function = get_hash_fn_by_name(name)
    init_none_hash(function)
    make = hashing.get_request_block_hasher if ours else get_request_block_hasher
    return make(size, function, *([lookahead] if lookahead else []))


def make_request(number, token_ids, hasher, max_tokens, **options):
    """Create a request that generates `max_tokens` tokens."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    params.update_from_generation_config({}, None)
    return Request(
        request_id=f"r{number}",
        arrival_time=float(number),
        prompt_token_ids=list(token_ids),
        sampling_params=params,
        pooling_params=None,
        block_hasher=hasher,
        **options,
    )


def image(identifier, offset, length):
    """Return an image of a request, without data."""
    position = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(None, "image", identifier, position, identifier)


def image_at(request, position):
    """Return (image, position in the image) for a token, or None if it is not part of an image."""
    for each in request.mm_features:
        place = position - each.mm_position.offset
        if 0 <= place < each.mm_position.length:
            return each.identifier, place
    return None


def answer(scheduler, scheduled):
    """Return a model's output: one token for each request whose prompt has been computed, plus
    accepted drafts.
    """
    ids, sampled = list(scheduled.num_scheduled_tokens), []
    for request_id in ids:
        request = scheduler.requests[request_id]
        is_done = request.num_computed_tokens >= request.num_tokens
        tokens = [(request.num_tokens * 7919 + len(request_id)) % 500 + 3] if is_done else []
        drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
        if is_done and drafts:
            if drafts[0] < 0:  # only the worker knows these drafts
                drafts = [(request.num_tokens * 13 + i) % 500 + 3 for i in range(len(drafts))]
            # Not a function of the number of tokens alone, which would accept up to block ends.
            accepted = zlib.crc32(f"{request_id} {request.num_tokens}".encode())
            tokens = drafts[: accepted % (len(drafts) + 1)] + tokens
        sampled.append(tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=sampled,
    )


class Contents:
    """Tracks what a model would have written to each slot, and checks everything that the model
    would read.

    A token's KV depends on this token and all tokens before it, so a slot's content is represented
    by their digest. If a token is not known yet, the slot stores the request and the position, from
    which the digest is computed later.

    With `lookahead`, KV also depends on this number of later tokens, like that of a drafter.
    """

    def __init__(self, scheduler, lookahead=0):
        self.scheduler, self.lookahead = scheduler, lookahead
        self.is_async = isinstance(scheduler, async_scheduler.AsyncScheduler)
        self.specs = [g.kv_cache_spec for g in scheduler.kv_cache_config.kv_cache_groups]
        self.sizes = [  # tokens per block of each group
            spec.block_size * (scheduler.dcp_world_size if spec.dcp_sharded else 1)
            for spec in self.specs
        ]
        self.tables = {}  # request id -> block ids of each group
        self.digests = {}  # request id -> digest of each prefix so far
        self.slots = {}  # (group, block, offset) -> digest, or (request id, position)
        self.requests = {}
        # Per request: the column of the state in the last step, and the number of tokens that this
        # step has sampled, that is, one plus the accepted drafts (see vLLM's mamba_utils.py).
        self.columns, self.accepted = {}, {}
        self.written = {}  # request id -> number of tokens in the last step's first state
        # request id -> number of computed tokens; an asynchronous scheduler still counts rejected drafts
        self.computed = {}
        self.checkpoints = 0  # number of checkpoints inside chunks

    def apply(self, scheduled):
        """Execute a step like a worker, and check what it reads."""
        for new in scheduled.scheduled_new_reqs:
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = scheduled.scheduled_cached_reqs
        for request_id, ids in zip(cached.req_ids, cached.new_block_ids):
            if request_id in cached.resumed_req_ids:
                self.tables[request_id] = [list(each) for each in ids]
            elif ids is not None:
                for own, more in zip(self.tables[request_id], ids):
                    own.extend(more)
        spans = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.requests[request_id] = self.scheduler.requests[request_id]
            drafts = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            # The scheduler has already counted this step's tokens.
            stop = request.num_computed_tokens
            spans.append((request, stop - count, stop, drafts))
        new = {request.req_id for request in scheduled.scheduled_new_reqs} | cached.resumed_req_ids
        for per_request in (self.columns, self.accepted):  # by request and group
            for key in [key for key in per_request if key[0] in new]:
                del per_request[key]
        for request_id in new:
            self.computed.pop(request_id, None)
        given = set()  # blocks that are cleared or overwritten by copies at the start of the step
        for each in scheduled.scheduled_new_reqs:
            own = zip(each.block_ids, self.sizes)
            given.update(*(ids[each.num_computed_tokens // size :] for ids, size in own))
        for request_id, ids in zip(cached.req_ids, cached.new_block_ids):
            if request_id not in new:
                given.update(*(ids or ()))
        for request, start, stop, _ in spans:  # states are also copied at the start of the step
            computed = self.computed.get(request.request_id, start)
            assert self.is_async or computed == start
            self.read_states(request, computed, stop - start + computed, given)
        for request, start, stop, drafts in spans:
            self.write(request, start, stop, drafts)
        for request, start, _, _ in spans:
            self.read(request, start)

    def digest(self, request, position, drafts=()):
        known = request.num_tokens
        tokens, digests = self.digests.setdefault(request.request_id, ([], []))
        now = request._all_token_ids
        while tokens and (len(tokens) > len(now) or tokens[-1] != now[len(tokens) - 1]):
            tokens.pop(), digests.pop()  # a session may drop its last tokens
        for token in request._all_token_ids[len(tokens) :]:
            item = image_at(request, len(tokens))
            tokens.append(token)
            digests.append(hash((digests[-1] if digests else 0, token, item)))
        if position < known:
            return digests[position]
        if position - known >= len(drafts) or min(drafts) < 0:
            return request.request_id, position
        found = digests[-1]
        for token in drafts[: position - known + 1]:
            found = hash((found, token, None))
        return found

    def digest_of_kv(self, request, position, drafts=()):
        """Return the digest of a token's KV. The digest includes accepted tokens, because a drafter
        runs once these are known.
        """
        if self.lookahead:
            return self.digest(request, position + self.lookahead)
        return self.digest(request, position, drafts)

    def slots_of(self, request, positions):
        for group, table in enumerate(self.tables[request.request_id]):
            spec = self.specs[group]
            if isinstance(spec, MambaSpec):
                continue
            is_ring = isinstance(spec, CircularBufferSpec)  # one block, which is overwritten
            for position in positions:
                block = table[0 if is_ring else position // self.sizes[group]]
                place = position % self.sizes[group]
                yield group, position, (group, block, place)

    def state_tables(self, request):
        """Yield the group, its block table and its block size, for groups of states."""
        for group, table in enumerate(self.tables[request.request_id]):
            if isinstance(self.specs[group], MambaSpec):
                yield group, table, self.specs[group].block_size

    def read_states(self, request, start, stop, given):
        """Check the states that are copied, or read in place, at the start of a step."""
        if not start:
            return
        name, wanted = request.request_id, self.digest(request, start - 1)
        for group, table, size in self.state_tables(request):
            column = self.columns.get((name, group), (start - 1) // size)
            block = table[column + self.accepted.get((name, group), 1) - 1]
            found = self.resolved(self.slots.get((group, block)))
            assert found == wanted, f"{name} continues at {start} from another state"
            if column != (stop - 1) // size:
                assert block not in given, "a page is allocated from which a state is still copied"

    def write_states(self, request, stop, drafts):
        """Write the state before the drafts, and the states after each draft to the next columns."""
        name, self.written[request.request_id] = request.request_id, stop - len(drafts)
        held = self.scheduler.kv_cache_manager.get_block_ids(name)
        for group, table, size in self.state_tables(request):
            column = self.columns[name, group] = (stop - 1) // size
            self.accepted[name, group] = 1
            for i in range(len(drafts) + 1):
                block = table[column + i]
                assert block != 0, "a state is written to the null block"
                assert block == held[group][column + i], "a state is written to a released block"
                position = stop - len(drafts) - 1 + i
                self.slots[group, block] = self.digest(request, position, drafts)

    def sample(self, output):
        """Accept drafts like a worker, after the step has sampled. If accepted drafts extend beyond
        a block, copy the state at the end of the block into the block's own page.
        """
        for name, sampled in zip(output.req_ids, output.sampled_token_ids):
            request, num_sampled = self.requests[name], max(len(sampled), 1)
            self.computed[name] = self.written[name] + num_sampled - 1
            for group, table, size in self.state_tables(request):
                if self.specs[group].mamba_cache_mode != "align":
                    self.accepted[name, group] = num_sampled
                    continue
                column, written = self.columns[name, group], self.written[name]
                end = (written + num_sampled - 1) // size * size
                self.accepted[name, group] = num_sampled
                if end < written:
                    continue
                source, target = table[column + end - written], table[end // size - 1]
                if source != target:
                    held = self.scheduler.kv_cache_manager.get_block_ids(name)[group]
                    assert target == held[end // size - 1], "a state is copied to a released block"
                    self.slots[group, target] = self.slots[group, source]
                if column == end // size - 1:
                    self.accepted[name, group] = 1

    def resolved(self, content):
        """Return the digest stored in a slot, even if the token was unknown when its KV was written."""
        if isinstance(content, tuple):
            writer, at = content
            return self.digest(self.requests[writer], at)
        return content

    def write(self, request, start, stop, drafts):
        for group, table, size in self.state_tables(request):
            if self.specs[group].mamba_cache_mode == "all":
                for end in range(start // size * size + size - 1, stop, size):
                    self.slots[group, table[end // size]] = self.digest(request, end, drafts)
        computed = self.computed.get(request.request_id, start)
        self.write_states(request, stop - start + computed, drafts)
        self.write_checkpoints(request, start, stop)
        for _, position, slot in self.slots_of(request, range(start, stop)):
            assert slot[1] != 0, "a token is written to the null block"
            self.slots[slot] = self.digest_of_kv(request, position, drafts)

    def write_checkpoints(self, request, start, stop):
        """Write the states at positions inside a chunk.

        The worker itself determines where these states are written.
        """
        for group, table in enumerate(self.tables[request.request_id]):
            spec = self.specs[group]
            if not getattr(spec, "num_prefill_checkpoint_blocks", 0) or stop - start == 1:
                continue
            position = get_mamba_prefill_checkpoint_position(stop, BLOCK, False)
            if not is_mamba_prefill_checkpoint_valid(
                *(start, stop, position, BLOCK, spec.block_size), spec.prefill_checkpoint_alignment
            ):
                continue
            self.checkpoints += 1
            block = table[-(-stop // spec.block_size) - 2]
            if block:
                self.slots[group, block] = self.digest(request, position - 1)

    def read(self, request, start):
        self.digest(request, 0)  # updates the digests
        _, digests = self.digests[request.request_id]
        slots, known = self.slots, len(digests) - self.lookahead
        for group, table in enumerate(self.tables[request.request_id]):
            if isinstance(self.specs[group], MambaSpec | CircularBufferSpec):
                continue
            size = self.sizes[group]
            for position in range(self.first_read(self.specs[group], start), start):
                content = slots.get((group, table[position // size], position % size))
                if position < known and content == digests[position + self.lookahead]:
                    continue
                assert self.resolved(content) == self.digest_of_kv(request, position), (
                    f"{request.request_id} reads missing KV at {position}"
                )

    @staticmethod
    def first_read(spec, start):
        """Return the position of the first token that is read when the token at `start` is computed."""
        if chunk := getattr(spec, "attention_chunk_size", None):
            return start // chunk * chunk
        window = getattr(spec, "sliding_window", None)
        return max(start - window + 1, 0) if window else 0


# Values of prefix_cache_retention_interval: None caches all blocks, 0 is vLLM's default, and 160
# exceeds the windows.
RETENTIONS = (None, 0, 160)


class SideBySide:
    """Runs both schedulers with the same random workload, and compares all decisions in every step."""

    def __init__(
        self, seed, config, groups, num_blocks, *, exact=True, drafts=False, context_parallel_size=1,
        sessions=False, retention=None, slots=0, lookahead=0, images=False, resets=False,
        priorities=False, follow_ups=False,
    ):  # fmt: skip
        self.rng = random.Random(seed)
        self.is_async = config.scheduler_config.async_scheduling
        self.exact = exact
        self.drafts, self.images, self.resets, self.priorities = drafts, images, resets, priorities
        # Earlier requests, whose tokens and answers begin later prompts.
        self.earlier = [] if follow_ups else None
        # Ids and numbers of the sessions that will receive more parts.
        self.sessions = {} if sessions else None
        size = BLOCK * context_parallel_size
        self.hashers = [
            block_hasher(size=size, ours=is_ours, lookahead=lookahead) for is_ours in (False, True)
        ]
        self.pair = [
            make_scheduler(
                *(cls, config, groups, num_blocks, context_parallel_size, retention),
                slots=slots or (NUM_DRAFTS if lookahead else 0),
                lookahead=lookahead,
            )
            for cls in PAIRS[self.is_async]
        ]
        # After a session has dropped a token, the session's KV and hashes still depend on that
        # token. Drafters with several modules recompute their last tokens.
        read = lookahead if lookahead == 1 and not sessions else 0
        self.contents = [Contents(scheduler, read) for scheduler in self.pair]
        self.is_dense = all(type(spec) is FullAttentionSpec for spec in self.contents[0].specs)
        # With groups of several block sizes, vLLM caches blocks up to the last common boundary, and
        # kvcache caches every full block. Requests can therefore hit different copies of a block.
        specs = [
            each for each in self.contents[0].specs if not isinstance(each, CircularBufferSpec)
        ]
        has_sizes = len({spec.block_size for spec in specs}) > 1
        self.has_copies = config.cache_config.enable_prefix_caching and has_sizes
        self.counts = collections.Counter()
        self.pending = [collections.deque(), collections.deque()]
        self.live = [collections.Counter(), collections.Counter()]
        self.told = [{}, {}]
        self.heads = [
            [self.rng.randrange(3, 500) for _ in range(self.rng.randrange(16, 200))]
            for _ in range(4)
        ]
        for number, scheduler in enumerate(self.pair):
            self._keep_events(number, scheduler)
            # With a drafter, an asynchronous scheduler plans for drafts that it does not know.
            has_drafter = drafts or ((slots or lookahead) and not self.is_async)
            scheduler.num_spec_tokens = NUM_DRAFTS if has_drafter else 0
            if self.is_async and drafts:
                scheduler._spec_token_placeholders = [-1] * NUM_DRAFTS
            if images:
                scheduler.max_num_encoder_input_tokens = MOST_ENCODER_TOKENS
                scheduler.encoder_cache_manager = EncoderCacheManager(MOST_ENCODER_TOKENS)

    def run(self, num_steps):
        for _ in range(num_steps):
            self._add()
            self._step()
        self._add_parts(1)
        most_steps = self.counts["steps"] + 5_000
        while any(scheduler.requests for scheduler in self.pair) or self.has_transfers():
            self._step()
            left = [sorted(scheduler.requests) for scheduler in self.pair]
            assert self.counts["steps"] < most_steps, f"requests do not end: {left}"
        for scheduler in self.pair:
            assert scheduler.kv_cache_manager.usage < 1e-9, "blocks are still held"
        live = [{key for key, count in each.items() if count > 0} for each in self.live]
        # If drafts are accepted in a request's last step, only kvcache and vLLM 0.33 cache the
        # blocks of these drafts.
        is_same = live[0] <= live[1] if self.drafts and IS_032 else live[0] == live[1]
        assert not self.exact or is_same, "events report different blocks"
        # If there are null blocks between cached blocks, vLLM's events also contain tokens that
        # belong to none of the events' hashes.
        if self.exact and self.is_dense and not (self.drafts and IS_032):
            assert self.told[0] == self.told[1], "events describe blocks differently"
        assert self.pair[0].reset_prefix_cache() and self.pair[1].reset_prefix_cache()
        return self.counts

    def _keep_events(self, number, scheduler):
        take = scheduler.kv_cache_manager.take_events

        def taken():
            events = take()
            for event in events:
                self.told[number].update(self._blocks_told(event))
                sign = 1 if type(event).__name__ == "BlockStored" else -1
                for block_hash in getattr(event, "block_hashes", ()):
                    self.live[number][event.group_idx, block_hash] += sign
                    self.counts["events"] += 1
            return events

        scheduler.kv_cache_manager.take_events = taken

    @staticmethod
    def _blocks_told(event):
        """Yield all properties that an event reports for each stored block."""
        if type(event).__name__ != "BlockStored":
            return
        size, parent = event.block_size, event.parent_block_hash
        further = getattr(event, "lookahead_token_ids", None)
        for i, block_hash in enumerate(event.block_hashes):
            yield (
                (event.group_idx, block_hash),
                (
                    *(parent, list(event.token_ids[i * size : (i + 1) * size]), size, event.medium),
                    *(event.lora_name, event.lora_id, event.session_id),
                    *(event.extra_keys and event.extra_keys[i], further and further[i]),
                    *(event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window),
                ),
            )
            parent = block_hash

    def _add(self):
        rng = self.rng
        for _ in range(rng.randrange(3)):
            if len(self.pair[0].requests) > 40:
                return
            head = rng.choice(self.heads)
            tokens = head[: rng.randrange(len(head) + 1)]
            tokens = tokens + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 120))]
            if self.earlier and rng.random() < 0.4:
                tokens = [*rng.choice(self.earlier)._all_token_ids[:600], *tokens[-8:]]
            max_tokens = rng.randrange(1, 60)
            options = {}
            if head is self.heads[0]:
                options["cache_salt"] = rng.choice(["one", "two"])
            elif head is self.heads[1]:
                options["lora_request"] = LoRARequest("adapter", 7, "/no/such")
            if self.images and rng.random() < 0.5:
                options["mm_features"] = self._some_images(len(tokens))
            if self.priorities:
                options["priority"] = rng.randrange(3)
            number = self.counts["requests"]
            if self.sessions is not None and rng.random() < 0.6:
                options["resumable"] = True
                self.sessions[f"r{number}"] = number
            self._add_to_both(number, tokens, max_tokens, **options)
            if self.earlier is not None:
                self.earlier.append(self.pair[0].requests[f"r{number}"])
            self.counts["requests"] += 1
        self._add_parts(0.1)
        if rng.random() < 0.05 and self.pair[0].requests:
            self._abort()

    def _abort(self):
        victim = self.rng.choice(sorted(self.pair[0].requests))
        for scheduler in self.pair:
            scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED)
        self.counts["aborts"] += 1

    def _some_images(self, num_tokens):
        """Return images at random positions in a prompt. There are few images, so two prompts often
        have the same image at the same position.
        """
        found, first = [], self.rng.choice([0, 16, 20])
        while len(found) < 3:
            name = self.rng.choice(sorted(IMAGES))
            if first + IMAGES[name] > num_tokens:
                break
            found.append(image(name, first, IMAGES[name]))
            first += IMAGES[name] + self.rng.choice([0, 12])
        return found

    def _add_to_both(self, number, tokens, max_tokens, **options):
        features = options.pop("mm_features", None)
        for scheduler, hasher in zip(self.pair, self.hashers):
            own = {"mm_features": list(features)} if features else {}
            scheduler.add_request(
                make_request(number, tokens, hasher, max_tokens, **own, **options)
            )

    def _add_parts(self, share):
        """Add parts to sessions, or end sessions."""
        rng = self.rng
        for request_id, number in list((self.sessions or {}).items()):
            request = self.pair[0].requests.get(request_id)
            if request is None:
                del self.sessions[request_id]
            elif rng.random() < share:
                is_last = share == 1 or rng.random() < 0.25 or request.num_tokens > LONGEST // 2
                part = [
                    rng.randrange(3, 500) for _ in range(1 if is_last else rng.randrange(1, 40))
                ]
                self._add_to_both(number, part, rng.randrange(1, 40), resumable=not is_last)
                if is_last:
                    del self.sessions[request_id]
                self.counts["parts"] += 1

    def _reset(self):
        """Reset the prefix cache, sometimes together with all running requests."""
        if self.rng.random() < 0.03:
            # Sessions that wait for input keep their blocks, so with either manager, a reset with
            # running requests would fail.
            with_running = self.rng.random() < 0.5 and self.sessions is None
            done = [scheduler.reset_prefix_cache(with_running) for scheduler in self.pair]
            assert done[0] == done[1] or not self.exact, "only one cache was reset"
            self.counts["resets"] += done[1]

    def _step(self):
        if self.resets:
            self._reset()
        theirs, ours = outputs = [self.schedule(scheduler) for scheduler in self.pair]
        if self.exact:
            self._compare(theirs, ours)
        for contents, scheduled in zip(self.contents, outputs):
            contents.apply(scheduled)
        arrived = []
        for contents, queue, scheduler, scheduled in zip(
            self.contents, self.pending, self.pair, outputs
        ):
            output = self.answer(scheduler, scheduled)
            contents.sample(output)
            queue.append((scheduled, output))
            if len(queue) > self.is_async or not scheduled.num_scheduled_tokens:
                arrived.append(scheduler.update_from_output(*queue.popleft()))
        if self.exact:
            if arrived:
                compare_outputs(*arrived, are_dense=self.is_dense)
            compare_states(*self.pair)
        if self.drafts and not self.is_async:
            self._draft()
        for scheduled in outputs[:1]:
            tokens = scheduled.scheduled_spec_decode_tokens.values()
            self.counts["scheduled drafts"] += sum(map(len, tokens))
        check_invariants(self.pair[1].kv_cache_manager.native)
        self.counts["steps"] += 1
        self._abort_stuck_session(theirs)

    def _abort_stuck_session(self, scheduled):
        """Abort a session if sessions hold all blocks while waiting for each other.

        vLLM preempts only running requests. Sessions are not running between two parts, so no
        request could ever be scheduled again.
        """
        theirs = self.pair[0]
        if self.sessions is None or scheduled.num_scheduled_tokens or theirs.running:
            return
        waiting = [
            request.request_id
            for request in theirs.requests.values()
            if request.status == RequestStatus.WAITING
            and theirs.kv_cache_manager.get_block_ids(request.request_id)[0]
        ]
        if waiting:
            for scheduler in self.pair:
                scheduler.finish_requests(waiting[0], RequestStatus.FINISHED_ABORTED)
            self.counts["aborts of stuck sessions"] += 1

    def schedule(self, scheduler):
        return scheduler.schedule()

    def answer(self, scheduler, scheduled):
        return answer(scheduler, scheduled)

    def has_transfers(self):
        """Return whether a worker still copies blocks of requests that have ended."""
        return False

    def _draft(self):
        running = [{request.request_id for request in each.running} for each in self.pair]
        for request_id in sorted(running[0] & running[1]):
            num_drafts = self.rng.choice([0, 0, 1, 3, NUM_DRAFTS])
            tokens = [self.rng.randrange(3, 500) for _ in range(num_drafts)]
            for scheduler in self.pair:
                scheduler.update_draft_token_ids(DraftTokenIds([request_id], [tokens]))
            self.counts["drafts"] += len(tokens)

    def _compare(self, theirs, ours):
        compare_scheduled(theirs, ours)
        for one, other in zip(theirs.scheduled_new_reqs, ours.scheduled_new_reqs):
            nulls = [
                [[block_id == 0 for block_id in group] for group in each.block_ids]
                for each in (one, other)
            ]
            assert nulls[0] == nulls[1], "different blocks are null"
            self.counts["hit tokens"] += one.num_computed_tokens
        self.counts["preemptions"] += len(theirs.preempted_req_ids or ())
        if self.is_async and not self.is_dense:
            # vLLM keeps old states and the blocks that left a window until the step's output has
            # arrived.
            return
        if not theirs.num_scheduled_tokens and self.pair[0].running:
            # The step is empty, and kvcache has already allocated the blocks for the next step.
            return
        if self.has_copies:
            return
        usages = [scheduler.kv_cache_manager.usage for scheduler in self.pair]
        assert abs(usages[0] - usages[1]) < 1e-9, "the usage of the pools differs"
