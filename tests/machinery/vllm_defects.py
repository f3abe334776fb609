# SPDX-License-Identifier: Apache-2.0
"""Injects defects into vLLM's code, one at a time, to test whether the sanitizer reports them.

`python -m tests.machinery.vllm_defects MODEL ENGINE [--inputs] [NAME ...]` prints the findings as JSON in
the last line of its output. With `--inputs`, the defects are those in what a model runner hands to the
layers, which exist in both runners of vLLM.
"""

import copy
import itertools
import json
import pathlib
import random
import sys
import tempfile

from tests.machinery import vllm_schedulers  # noqa: F401  sets environment variables
from tests.machinery.engine_process import run_module
from tests.machinery.vllm_models import ENGINES, OPTIONS, make_room, write_config
from tests.machinery.vllm_weights import fill_at_random, without_checkpoints

DEFECTS = {}  # name -> (function, models)
INPUT_DEFECTS = {}  # the same, for defects in the inputs of either model runner
ALL = ("llama", "gemma3", "granite4")
TIER = {
    "kv_transfer_config": {**{"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
        "kv_connector_module_path": "kvcache_vllm.offloading",
        "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 28}},
}  # fmt: skip


def defect(*models):
    """Register a function that plants a defect in an `Engine`. The function's docstring describes
    the defect.
    """

    def add(plant):
        DEFECTS[plant.__name__] = plant, models or ALL
        return plant

    return add


# In the scheduler's block pool -------------------------------------------------------------------


@defect()
def block_of_a_running_request_is_freed(engine):
    """The last block of a running request is allocated again."""
    pool = engine.pool

    def free(original, *arguments):
        requests = [each for each in engine.scheduler.running if each.num_computed_tokens]
        if engine.now(8) and len(requests) > 2:
            block = engine.held(requests[0])[-1]
            pool._maybe_evict_cached_block(block)
            if block.ref_cnt == 1:
                block.ref_cnt = 0
                pool.free_block_queue.prepend_n([block])
                engine.planted()
        return original(*arguments)

    engine.wrap(engine.scheduler, "schedule", free)


@defect()
def hit_blocks_are_not_referenced(engine):
    """Blocks of a prefix hit stay in the free list, so they are allocated to other requests."""

    def touch(original, blocks):
        original(blocks)
        for block in blocks:
            if not block.is_null and block.ref_cnt == 1:
                block.ref_cnt = 0
                engine.pool.free_block_queue.prepend_n([block])
                engine.planted()

    engine.wrap(engine.pool, "touch", touch)


@defect("llama", "gemma3")
def block_is_allocated_twice(engine):
    """The same new block is allocated to two requests."""

    def get(original, count):
        blocks = original(count)
        if count and engine.now(25):
            held = engine.held(engine.scheduler.running[0])
            if held:
                blocks[-1] = held[-1]
                held[-1].ref_cnt += 1
                engine.planted()
        return blocks

    engine.wrap(engine.pool, "get_new_blocks", get)


# In prefix caching -------------------------------------------------------------------------------


@defect("llama")
def hash_without_the_prefix(engine):
    """A block's hash covers only the block's own tokens and no earlier ones."""
    from vllm.v1.core import kv_cache_utils

    def block_hash(original, function, parent, tokens, extra_keys=None):
        engine.planted()
        return original(function, None, tokens, extra_keys)

    engine.wrap(kv_cache_utils, "hash_block_tokens", block_hash)


@defect("llama")
def blocks_are_cached_before_they_are_computed(engine):
    """A request's blocks can be hit before their KV exists, and the hit ends in such a block."""

    def cache(original, request, num_tokens, *arguments, **options):
        engine.planted()
        return original(request, request.num_tokens, *arguments, **options)

    engine.wrap(engine.manager.coordinator, "cache_blocks", cache)


@defect("gemma3")
def window_hit_without_all_of_its_blocks(engine):
    """A prefix hit in a sliding-window group requires only one block instead of all blocks of the
    window.
    """
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    def contiguous(original, *arguments, **options):
        engine.planted()
        return 1

    engine.wrap(SlidingWindowManager, "_contiguous_blocks_for_hit", contiguous, is_static=True)


# In windows and states ---------------------------------------------------------------------------


@defect("gemma3")
def window_is_left_a_block_too_early(engine):
    """Blocks that the window still covers are released."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    def skipped(original, manager, num_computed_tokens):
        engine.planted()
        return max(original(manager, num_computed_tokens) + 2 * manager.block_size, 0)

    engine.wrap(SlidingWindowManager, "get_num_skipped_tokens", skipped)


@defect("granite4")
def state_is_not_copied(engine):
    """The state of the last block is not copied to the new block."""
    from vllm.v1.worker import mamba_utils

    def collect(original, *arguments):
        if engine.now(3):
            engine.planted()
            return None
        return original(*arguments)

    engine.wrap(mamba_utils, "collect_mamba_copy_meta", collect)


@defect("granite4")
def state_is_copied_from_another_block(engine):
    """A state is copied from the block before the correct one."""
    from vllm.v1.worker import mamba_utils

    def collect(original, *arguments):
        arguments = list(arguments)
        blocks = arguments[7].block_ids[arguments[3][0]]
        if arguments[4] > 0 and blocks[arguments[4] - 1] != blocks[arguments[4]]:
            arguments[4] -= 1
            engine.planted()
        return original(*arguments)

    engine.wrap(mamba_utils, "collect_mamba_copy_meta", collect)


@defect("granite4")
def state_of_another_prefix(engine):
    """A prefix hit starts from a block that holds another state."""

    def find(original, *arguments, **options):
        found = original(*arguments, **options)
        blocks = found[0][engine.state_group]
        if blocks and not blocks[-1].is_null:
            free = [each for each in engine.pool.blocks[1:] if each.ref_cnt == 0]
            if free and free[0] is not blocks[-1]:
                blocks[-1] = free[0]
                engine.planted()
        return found

    engine.wrap(engine.manager.coordinator, "find_longest_cache_hit", find)


# In the scheduler --------------------------------------------------------------------------------


@defect("llama", "gemma3")
def new_blocks_are_not_sent(engine):
    """The worker does not receive the new block of a request."""

    def change(output):
        cached = output.scheduled_cached_reqs
        for i, blocks in enumerate(cached.new_block_ids):
            is_resumed = cached.req_ids[i] in cached.resumed_req_ids
            if blocks is not None and not is_resumed and engine.now(4):
                cached.new_block_ids[i] = None
                engine.planted()
                break

    engine.after_schedule(change)


@defect("llama", "gemma3")
def blocks_in_use_are_zeroed(engine):
    """A block of a running request is zeroed like a new block."""

    def change(output):
        if len(engine.scheduler.running) > 2 and engine.now(10):
            held = engine.held(engine.scheduler.running[0])
            if len(held) > 1:
                output.new_block_ids_to_zero = [held[-2].block_id]
                engine.planted()

    engine.after_schedule(change)


@defect("llama", "gemma3")
def copy_into_a_block_in_use(engine):
    """The destination of a copy-on-write is a block of another running request."""

    def change(output):
        if len(engine.scheduler.running) > 2 and engine.now(10):
            held = [engine.held(each) for each in engine.scheduler.running[:2]]
            if all(held):
                output.kv_cache_block_copies = [(held[0][-1].block_id, held[1][-1].block_id)]
                engine.planted()

    engine.after_schedule(change)


@defect("llama drafts")
def rejected_drafts_count_as_tokens(engine):
    """After a rejected draft, the number of computed tokens sent to the worker is one too high."""

    def change(output):
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            before = engine.sanitizer.num_tokens(name)
            if cached.num_computed_tokens[i] < before and engine.now(3):
                cached.num_computed_tokens[i] += 1
                engine.planted()
                break

    engine.after_schedule(change)


# In the worker -----------------------------------------------------------------------------------


@defect()
def row_is_not_moved(engine):
    """If a request moves to another row of the batch, its block table entries are not moved."""

    def move(original, src, dst):
        engine.planted()

    engine.wrap(engine.tables, "move_row", move)


@defect("llama", "gemma3")
def null_entry_in_a_row(engine):
    """An entry of the block table is replaced by the null block."""

    def get(original, count):
        table = original(count)
        if engine.now(40) and table[0, 0] > 0:
            table[0, 0] = 0
            engine.planted()
        return table

    engine.wrap(engine.tables[engine.full_group], "get_device_tensor", get)


# In the inputs of both model runners --------------------------------------------------------------


def input_defect(*models, step=12, **forms):
    """Register a function that changes the `Inputs` of a step, once for each form. It returns whether
    it has changed anything. It is called from this step on, and prompts are computed in the first
    steps. `forms`: keyword arguments by name of the form.
    """

    def add(change):
        def planted_as(form):
            def plant(engine):
                def act(inputs):
                    if engine.now(step) and change(engine, inputs, **form):
                        engine.planted()

                engine.change_inputs(act)

            return plant

        for name, form in forms.items() or (("", {}),):
            entry = planted_as(form), models or ("llama", "gemma3")
            INPUT_DEFECTS[f"{change.__name__} {name}".strip()] = entry
        return change

    return add


ROWS = {"first": {"row": 0}, "last": {"row": -1}}
LAYERS = {"all": {"only": None}, "last": {"only": -1}}


@input_defect(**ROWS)
def slot_of_another_block(engine, inputs, row):
    """A token is written to the slot of another request's block."""
    slots, other = inputs.slots[engine.slot_group], inputs.blocks(engine, row)
    if not other:
        return False
    slots[inputs.last_token(row)] = other[0] * 32
    return True


@input_defect("gemma3", first={"turn": 1}, second={"turn": -1})
def slots_of_another_group(engine, inputs, turn):
    """The slots of two groups are exchanged."""
    rolled = [each.clone() for each in inputs.slots]
    for g, slots in enumerate(inputs.slots):
        slots.copy_(rolled[(g + turn) % len(rolled)])
    return any((each != before).any() for each, before in zip(inputs.slots, rolled))


@input_defect(one={"shift": 1}, two={"shift": 2})
def slots_are_shifted(engine, inputs, shift):
    """Every token is written to the slot of a later token."""
    inputs.slots[engine.slot_group][: inputs.total] += shift
    return True


@input_defect(step=3, early={"by": -1}, late={"by": 1})
def border_is_off_by_one(engine, inputs, by):
    """The border between two requests is one token off."""
    counts = (inputs.splits[1:] - inputs.splits[:-1]).tolist()
    for i in range(1, inputs.n):
        if counts[i if by > 0 else i - 1] > 1:
            for each in inputs.all_splits():
                each[i] += by
            return True
    return False


@input_defect(**{
    f"{name} {row} {layers}": {"by": by, **ROWS[row], **LAYERS[layers]}
    for name, by in (("short", -1), ("long", 1)) for row in ROWS for layers in LAYERS
})  # fmt: skip
def length_is_off_by_one(engine, inputs, by, row, only):
    """Attention leaves out the last token of a request, or reads a slot after it."""
    return inputs.add_to_lengths(row, by, only)


@input_defect(**ROWS)
def token_of_another_row(engine, inputs, row):
    """A request computes a token of another request."""
    at, other = inputs.last_token(row), inputs.last_token(row + 1 if row == 0 else 0)
    if inputs.n < 2 or inputs.tokens[at] == inputs.tokens[other]:
        return False
    inputs.tokens[at] = inputs.tokens[other]
    return True


@input_defect(step=3)
def wrong_token_of_a_prompt(engine, inputs):
    """A token in the middle of a prompt chunk is wrong."""
    counts = (inputs.splits[1:] - inputs.splits[:-1]).tolist()
    if max(counts) < 4:
        return False
    at = int(inputs.splits[counts.index(max(counts))]) + 1
    inputs.tokens[at] = inputs.tokens[at] ^ 1
    return True


@input_defect(stale={"by": -1}, early={"by": 1}, far={"by": 33})
def position_is_wrong(engine, inputs, by):
    """The positions of a request are those of another step."""
    splits = inputs.splits.tolist()
    if int(inputs.positions[splits[0]]) + by < 0:
        return False
    inputs.positions[splits[0] : splits[1]] += by
    return True


@input_defect(step=3)
def position_is_repeated(engine, inputs):
    """Two tokens of a prompt chunk have the same position."""
    counts = (inputs.splits[1:] - inputs.splits[:-1]).tolist()
    if max(counts) < 4:
        return False
    at = int(inputs.splits[counts.index(max(counts))]) + 2
    inputs.positions[at] = inputs.positions[at - 1]
    return True


@input_defect(step=3)
def count_of_another_row(engine, inputs):
    """The numbers of tokens of two requests are exchanged."""
    counts, lengths = (inputs.splits[1:] - inputs.splits[:-1]).tolist(), inputs.lengths()
    for i in range(inputs.n - 1):
        if counts[i] != counts[i + 1] and min(lengths[i : i + 2]) >= max(counts[i : i + 2]):
            engine.sanitizer.mode = "stop"  # a kernel of the second runner does not end otherwise
            engine._undo.append(lambda: setattr(engine.sanitizer, "mode", "report"))
            for each in inputs.all_splits():
                each[i + 1] += counts[i + 1] - counts[i]
            return True
    return False


@input_defect(first={"row": 0}, second={"row": 1}, last_layer={"row": 0, "only": -1})
def table_row_of_another_request(engine, inputs, row, only=None):
    """Attention reads the blocks of another request, in all layers or in one."""
    if inputs.n < 2:
        return False
    table = inputs.table(engine, only)
    table[row] = table[(row + 1) % inputs.n]
    return True


@input_defect(negative={"token": -5}, large={"token": 1 << 20})
def impossible_token(engine, inputs, token):
    """A token id does not exist."""
    inputs.tokens[inputs.last_token(0)] = token
    return True


def add_unscheduled(plant):
    """Register a function that changes something else than the inputs of layers."""
    INPUT_DEFECTS[plant.__name__] = plant, ("llama", "gemma3")
    return plant


@add_unscheduled
def wrong_scale(engine):
    """The scale of a layer's cache changes after tokens were written."""
    config = engine.runner.cache_config
    before, config.cache_dtype = config.cache_dtype, "fp8"  # the CPU has no fp8 cache
    engine._undo.append(lambda: setattr(config, "cache_dtype", before))

    def change(inputs):
        if engine.now(12):
            engine.attention_layers()[0]._k_scale.mul_(2)
            engine.planted()

    engine.change_inputs(change)


@add_unscheduled
def padding_in_a_live_block(engine):
    """The slots of padding tokens are in a block of a request."""

    def padded(total, whole, used):
        if engine.now(12):
            held = engine.held(engine.scheduler.running[0])
            whole[..., total : total + 4] = held[0].block_id * 32
            engine.planted()
            return whole[..., : total + 4]
        return used

    engine.pad_slots(padded)


@add_unscheduled
def padding_in_a_free_block(engine):
    """The slots of padding tokens are in a block that no request holds, but that may be hit."""

    def padded(total, whole, used):
        free = [each.block_id for each in engine.pool.blocks[1:] if each.ref_cnt == 0]
        if free and engine.now(12):
            whole[..., total : total + 1] = free[-1] * 32 + 5
            engine.planted()
            return whole[..., : total + 1]
        return used

    engine.pad_slots(padded)


@add_unscheduled
def dummy_run_with_stale_slots(engine):
    """A dummy run writes to the slots of the step before."""

    def run(output):
        if engine.now(12):
            engine.planted()
            engine.dummy_run_with_stale_slots()

    engine.after_schedule(run)


class Inputs:
    """What a model runner hands to the layers in a step. The tensors are those that kernels read."""

    def __init__(self, runner, metadata, slots, splits, positions, tokens, n):
        self.runner, self.metadata, self.slots, self.n = runner, metadata, slots, n
        self.splits, self.positions, self.tokens = splits[: n + 1], positions, tokens
        self.total = int(splits[n])

    def last_token(self, row):
        return int(self.splits[1:][row]) - 1

    def layers(self):
        return list({id(each): each for each in self.metadata.values()}.values())

    def all_splits(self):
        """Return the different tensors with the borders of the batch's rows."""
        found = [self.splits, *(getattr(each, "query_start_loc", None) for each in self.layers())]
        numbers = getattr(getattr(self.runner, "query_start_loc", None), "np", None)
        if numbers is not None:
            found.append(numbers)
        return list({_address(each): each for each in found if each is not None}.values())

    def add_to_lengths(self, row, by, only):
        names = [name for name, each in self.metadata.items() if hasattr(each, "seq_lens")]
        if not names:
            return False
        chosen = self.layers() if only is None else [copy.copy(self.metadata[names[only]])]
        for layer in chosen:
            if hasattr(layer, "seq_lens"):
                layer.seq_lens = layer.seq_lens.clone()
                layer.seq_lens[: self.n][row] += by
        if only is not None:
            self.metadata[names[only]] = chosen[0]
        return True

    def lengths(self):
        found = [each.seq_lens for each in self.layers() if hasattr(each, "seq_lens")]
        return found[0][: self.n].tolist()

    def table(self, engine, only):
        """Return the block table of the layers with slots, or of one layer, which then has its own."""
        groups = engine.runner.kv_cache_config.kv_cache_groups
        name = groups[engine.slot_group].layer_names[only or 0]
        if only is not None:
            self.metadata[name] = copy.copy(self.metadata[name])
            self.metadata[name].block_table = self.metadata[name].block_table.clone()
        return self.metadata[name].block_table

    def blocks(self, engine, row):
        """Return blocks of requests other than the one in a row."""
        running = engine.scheduler.running
        names = engine.names_in_batch()
        return [
            block.block_id
            for each in running
            if each.request_id != names[row]
            for block in engine.held(each)[-1:]
            if block.ref_cnt == 1
        ]


def _address(array):
    return array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data


# In the host tier --------------------------------------------------------------------------------


@defect("llama tier")
def blocks_are_loaded_in_another_order(engine):
    """Two blocks of a load are exchanged."""
    exchange_pairs(engine, is_load=True)


@defect("llama tier")
def blocks_are_stored_in_another_order(engine):
    """Two blocks of a store are exchanged."""
    exchange_pairs(engine, is_load=False)


def exchange_pairs(engine, is_load):
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    def pairs(original, *arguments, must_fill):
        found = original(*arguments, must_fill=must_fill)
        if must_fill is not is_load and len(found) > 1:
            found[:, 1] = found[::-1, 1].copy()
            engine.planted()
        return found

    engine.wrap(get_kv_transfer_group().connector_worker.worker, "_pairs", pairs)


# The engine --------------------------------------------------------------------------------------


class Engine:
    """A vLLM engine with the sanitizer, in which defects can be planted and removed."""

    def __init__(self, model, engine):
        self.model, self.engine = model, engine
        self.folder = write_config(pathlib.Path(tempfile.mkdtemp()), model)
        self.llm = None
        self.start()

    def start(self):
        from vllm import LLM

        from kvcache_vllm.sanitizer.observer import observe

        defaults = {
            **{"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True,
                "seed": 0},
            **{"dtype": "float32", "max_model_len": 1024, "block_size": 32, "max_num_seqs": 16},
            **{"max_num_batched_tokens": 256, "long_prefill_token_threshold": 80},
            **{"prefix_caching_hash_algo": "sha256_cbor"},
        }  # fmt: skip
        if self.llm is not None:
            self.llm.llm_engine.engine_core.shutdown()
            self.llm = None
            make_room()
        options = TIER if self.engine == "tier" else ENGINES[self.engine]
        self.llm = LLM(self.folder, **defaults | OPTIONS[self.model] | options)
        core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        worker = core.model_executor.driver_worker.worker
        self.runner = worker.model_runner
        self.tables = (
            getattr(self.runner, "block_tables", None) or self.runner.input_batch.block_table
        )
        observer = observe(worker)
        self.sanitizer, self.sanitizer_runner = observer.sanitizer, observer._runner
        kinds = [each.kind for each in self.sanitizer.groups]
        self.full_group = kinds.index("full")
        self.slot_group = next(g for g, kind in enumerate(kinds) if kind != "state")
        self.state_group = kinds.index("state") if "state" in kinds else None
        self._clear()

    def _clear(self):
        self._undo, self._calls, self._plants = [], itertools.count(1), 0
        self.step_of_plant = None
        self.sanitizer.reset()
        self.sanitizer.reports.clear()
        self.sanitizer.counts.clear()

    def held(self, request):
        """Return a request's blocks in the group with slots, excluding null blocks."""
        manager = self.manager.coordinator.single_type_managers[self.slot_group]
        return [each for each in manager.req_to_blocks[request.request_id] if not each.is_null]

    def now(self, count):
        """Return whether the defect should act now: in call number `count` or later, and only once."""
        return self._plants == 0 and next(self._calls) >= count

    def planted(self):
        self._plants += 1
        if self.step_of_plant is None:
            self.step_of_plant = self.sanitizer.step

    def wrap(self, target, name, function, is_static=False):
        """Replace a method with a function that receives the original method as its first argument."""
        original = getattr(target, name)
        had = name in vars(target)
        before = vars(target).get(name)

        def wrapped(*arguments, **options):
            return function(original, *arguments, **options)

        wrapped.__wrapped__ = original
        setattr(target, name, staticmethod(wrapped) if is_static else wrapped)
        self._undo.append(lambda: setattr(target, name, before) if had else delattr(target, name))

    def after_schedule(self, change):
        """Call a function with the scheduler's output of each step."""

        def schedule(original, *arguments):
            output = original(*arguments)
            change(output)
            return output

        self.wrap(self.scheduler, "schedule", schedule)

    def change_inputs(self, act):
        """Call a function with the `Inputs` of each step, before layers and the sanitizer see them."""
        runner = self.runner
        if hasattr(runner, "input_batch"):

            def build(original, *arguments, **options):
                result = original(*arguments, **options)
                if self.is_stepping:
                    slots = [*options["slot_mappings"].values()]
                    given = runner.query_start_loc.gpu, runner.positions, runner.input_ids.gpu
                    n = len(runner.input_batch.req_ids)
                    act(Inputs(runner, result[0], slots, *given, n))
                return result

            self.wrap(runner, "_build_attention_metadata", build)
        else:

            def prepare(original, given, mode, tables, slots, *arguments, **options):
                metadata = original(given, mode, tables, slots, *arguments, **options)
                if self.is_stepping:
                    inputs = given.query_start_loc, given.positions, given.input_ids
                    act(Inputs(runner, metadata, list(slots), *inputs, given.num_reqs))
                return metadata

            self.wrap(runner.model_state, "prepare_attn", prepare)

    def pad_slots(self, padded):
        """Replace the slot mappings of each step by `padded(number of tokens, buffer, mappings)`."""
        runner = self.runner
        if hasattr(runner, "input_batch"):

            def mappings(original, *arguments, **options):
                by_gid, by_layer = original(*arguments, **options)
                if not self.is_stepping:
                    return by_gid, by_layer
                g = self.slot_group
                whole, used = runner.input_batch.block_table[g].slot_mapping.gpu, by_gid[g]
                by_gid[g] = longer = padded(len(used), whole, used)
                names = runner.kv_cache_config.kv_cache_groups[g].layer_names
                return by_gid, by_layer | dict.fromkeys(names, longer)

            self.wrap(runner, "_get_slot_mappings", mappings)
        else:

            def prepare(original, given):
                tables, slots = original(given)
                whole = runner.block_tables.slot_mappings
                return tables, padded(given.num_tokens, whole, slots)

            self.wrap(runner, "prepare_attn", prepare)

    def dummy_run_with_stale_slots(self):
        """Run without requests, with the slots of the last step."""
        runner = self.runner
        if hasattr(runner, "input_batch"):
            original = runner._get_slot_mappings

            def stale(*arguments, **options):
                table = runner.input_batch.block_table[self.slot_group]
                before = table.slot_mapping.gpu[:2].clone()
                by_gid, by_layer = original(*arguments, **options)
                names = runner.kv_cache_config.kv_cache_groups[self.slot_group].layer_names
                return by_gid, by_layer | dict.fromkeys(names, before)

            runner._get_slot_mappings = stale
            runner._dummy_run(2)
            del runner._get_slot_mappings
        else:
            tables = runner.block_tables
            tables.get_dummy_slot_mappings = lambda count: tables.slot_mappings[:, :count]
            runner._dummy_run(2)
            del tables.get_dummy_slot_mappings

    @property
    def is_stepping(self):
        return self.sanitizer_runner._is_computing

    def names_in_batch(self):
        return self.sanitizer_runner.batch().names

    def attention_layers(self):
        layers = self.runner.compilation_config.static_forward_context.values()
        return [each for each in layers if hasattr(each, "_k_scale")]

    def find(self, name, defects=DEFECTS, seed=1):
        """Plant a defect, run requests, remove the defect, and return the findings."""
        plant, _ = defects[name]
        print("planting", name, file=sys.stderr, flush=True)
        before = self.sanitizer.slots_read
        first_step = self.sanitizer.step
        plant(self)
        failure = None
        sizes = {"count": 6, "max_tokens": 24} if defects is INPUT_DEFECTS else {}
        try:
            # New prompts, because a tier stores each block once.
            self.run(3 if "stored" in name else seed, **sizes)
        except Exception as error:  # the engine itself may fail because of the defect
            failure = f"{type(error).__name__}: {str(error)[:80]}"
        for undo in reversed(self._undo):
            undo()
        reports = self.sanitizer.reports
        found = {
            "name": name,
            "planted": self._plants,
            "planted_at": self.step_of_plant and self.step_of_plant - first_step,
            "found_at": reports[0].step - first_step if reports else None,
            "kind": str(reports[0].kind) if reports else None,
            "slots_read": self.sanitizer.slots_read - before,
            "engine": failure or "answered",
        }
        if failure is None:
            self.llm.llm_engine.engine_core.engine_core.scheduler.reset_prefix_cache()
            self._clear()
            failure = found["broken"] = self._is_broken(**sizes)
        if failure is not None:
            self.start()
        return found

    def _is_broken(self, **sizes):
        """Run requests without a defect. Return the error or "reports" if the sanitizer reports
        anything, and otherwise None.
        """
        try:
            self.run(7, **sizes)
        except Exception as error:
            return str(error)
        broken = bool(self.sanitizer.reports)
        self.scheduler.reset_prefix_cache()
        self._clear()
        return "reports" if broken else None

    def run(self, seed, count=14, max_tokens=70):
        from vllm import SamplingParams

        rng = random.Random(seed)
        heads = [[rng.randrange(3, 512) for _ in range(170)] for _ in range(2)]
        prompts = [
            heads[n % 2][: rng.randrange(100, 171)] + [rng.randrange(3, 512) for _ in range(60)]
            for n in range(count)
        ]
        # The first block has the same tokens as another prompt's second block.
        prompts.append(heads[0][32:160])
        sampling = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        self.llm.generate(prompts, params, use_tqdm=False)


def find_all(model, engine, environment=None, of_inputs=False, names=()):
    """Plant each defect that applies to a model, in a separate process, and return the findings."""
    arguments = [model, engine, *["--inputs"] * of_inputs, *names]
    settings = {"KVCACHE_SANITIZE": "0", **(environment or {})}
    return run_module(__name__, *arguments, timeout_s=900, **settings)


def run(model, engine, names=None, defects=DEFECTS):
    """Plant each defect that applies to a model, one at a time, and return the findings.

    Without a defect, there must be no findings.
    """
    fill_at_random()
    without_checkpoints()
    one = Engine(model, engine)
    one.run(1)
    assert not one.sanitizer.reports, one.sanitizer.reports[0]
    one.scheduler.reset_prefix_cache()
    one._clear()
    key = " ".join([model, *({"drafts", "tier"} & set(engine.split()))])
    return [one.find(name, defects) for name in names or defects if key in defects[name][1]]


if __name__ == "__main__":
    model, engine, *names = sys.argv[1:]
    of_inputs = "--inputs" in names
    names = [each for each in names if each != "--inputs"]
    print(json.dumps(run(model, engine, names, INPUT_DEFECTS if of_inputs else DEFECTS)))
