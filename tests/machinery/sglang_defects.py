# SPDX-License-Identifier: Apache-2.0
"""Injects defects into SGLang's code, one at a time, to test whether the sanitizer reports them.

`python -m tests.machinery.sglang_defects ENGINE` prints the findings as JSON.
"""

import json
import sys

from tests.machinery.sglang_engine import Scheduler, in_a_process

ROOMY = {"max_total_tokens": 2048}
TIGHT = {"max_total_tokens": 640, "enable_mixed_chunk": True, "disable_overlap_schedule": False}
TOKENS = {"max_total_tokens": 640, "page_size": 1, "chunked_prefill_size": 60}
HICACHE = {
    **{"max_total_tokens": 640, "enable_hierarchical_cache": True, "hicache_ratio": 4.0},
    **{"hicache_io_backend": "direct", "hicache_mem_layout": "layer_first"},
    "hicache_write_policy": "write_through",
}
ENGINES = {
    **{"roomy": ROOMY, "tight": TIGHT, "tokens": TOKENS, "hicache": HICACHE},
    "windows": {"family": "mellum", "max_total_tokens": 640},
}
LLAMA = ("roomy", "tight", "tokens")
DEFECTS = {}  # name -> (function, engines)


def defect(*engines):
    """Register a function that plants a defect in a `Run`. The function's docstring describes the
    defect.
    """

    def add(plant):
        DEFECTS[plant.__name__] = plant, engines or LLAMA
        return plant

    return add


# In the allocator --------------------------------------------------------------------------------


def allocator_of(run):
    return run.scheduler.token_to_kv_pool_allocator


def release(run, slots):
    """Return slots to the allocator."""
    allocator = allocator_of(run)
    allocator.free_segment(slots.long(), start_pos=0)
    if allocator.page_size > 1:  # otherwise, make them the next slots to be allocated
        return
    allocator.free_pages = allocator.free_pages.roll(len(slots))


def after_planning(run, change):
    """Call a function after each batch has been planned."""

    def next_batch(original, *arguments, **options):
        plan = original(*arguments, **options)
        change()
        return plan

    run.wrap(run.scheduler, "get_next_batch_to_run", next_batch)


@defect()
def page_of_a_running_request_is_freed(run):
    """The first page of a running request is freed."""
    size = allocator_of(run).page_size

    def change():
        requests = [each for each in run.running if len(each.output_ids) > 3]
        if len(requests) > 1 and run.now(8):
            release(run, run.slots(requests[0], 0, size))
            run.planted()

    after_planning(run, change)


@defect()
def page_is_allocated_twice(run):
    """A page that was just allocated stays in the free list."""
    import torch

    allocator = allocator_of(run)
    name = "alloc" if allocator.page_size == 1 else "alloc_extend"

    def alloc(original, *arguments, **options):
        slots = original(*arguments, **options)
        if slots is not None and len(slots) > 20 and run.now(8):
            pages = slots[-1:] // allocator.page_size
            allocator.free_pages = torch.cat([pages, allocator.free_pages])
            run.planted()
        return slots

    run.wrap(allocator, name, alloc)


@defect()
def allocator_is_cleared_without_the_tree(run):
    """The allocator frees all pages, but the radix cache keeps its nodes."""

    def process(original, *arguments, **options):
        if run.now(15):
            allocator_of(run).clear()
            run.planted()
        return original(*arguments, **options)

    run.wrap(run.scheduler, "process_batch_result", process)


# In the rows of requests -------------------------------------------------------------------------


@defect()
def slot_of_another_request_in_a_row(run):
    """The first page in a row of `req_to_token` is a page of another request."""

    def change():
        requests = run.running
        if len(requests) > 1 and len(requests[0].output_ids) > 3 and run.now(8):
            size = allocator_of(run).page_size
            # Use a page of the request that the other request does not share through a prefix hit.
            first, second = (run.slots(each) for each in requests[:2])
            first[-size - 1 :][:1] = second[-size - 1 :][:1]
            first[32 : 32 + size] = second[32 : 32 + size]
            run.planted()

    after_planning(run, change)


@defect()
def slots_are_off_by_one(run):
    """The KV of a step's new tokens is written to the slots after the correct ones."""
    change_decode(run, lambda batch: setattr(batch, "out_cache_loc", batch.out_cache_loc + 1))


@defect()
def sequence_lengths_are_too_large_by_one(run):
    """A step reads one more token than exists."""
    change_decode(run, lambda batch: setattr(batch, "seq_lens", batch.seq_lens + 1))


@defect()
def rows_of_a_batch_are_exchanged(run):
    """The row indices of a batch are reversed, but its requests are not."""
    change_decode(
        run, lambda batch: setattr(batch, "req_pool_indices", batch.req_pool_indices.flip(0))
    )


def change_decode(run, change):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    def prepare(original, batch):
        original(batch)
        if len(batch.reqs) > 1 and len(batch.reqs[0].output_ids) > 3 and run.now(8):
            change(batch)
            run.planted()

    run.wrap_method(ScheduleBatch, "prepare_for_decode", prepare)


@defect()
def new_slots_are_not_written_to_the_row(run):
    """The slots of a decode step are missing from `req_to_token`."""
    pool = run.scheduler.req_to_token_pool

    def write(original, indices, values):
        if not isinstance(indices[1], slice) and len(values) > 1 and run.now(20):
            size = allocator_of(run).page_size
            if (values % size == 0).any():
                return run.planted()
            run.num_calls -= 1
        return original(indices, values)

    run.wrap(pool, "write", write)


# In the radix cache ------------------------------------------------------------------------------


@defect()
def wrong_values_are_inserted(run):
    """The slots of a request are inserted into the tree in the wrong order."""
    size = allocator_of(run).page_size

    def insert(original, parameters):
        if len(parameters.value) >= 4 * size and run.now(6):
            parameters.value[:] = parameters.value.roll(size)
            run.planted()
        return original(parameters)

    run.wrap(run.scheduler.tree_cache, "insert", insert)


@defect()
def shared_prefix_is_freed(run):
    """When a request finishes, it frees its prefix, although the prefix belongs to the tree."""

    def free(original, kv, ranges, **options):
        if ranges[0][0] and run.now(1):
            ranges = [(0, ranges[0][1])]
            run.planted()
        return original(kv, ranges, **options)

    run.wrap(run.scheduler.tree_cache, "free_kv_row", free)


@defect("tight", "tokens")
def hits_are_not_locked(run):
    """The tree may evict prefixes that running requests use."""
    tree = run.scheduler.tree_cache

    def lock(original, *arguments, **options):
        lock = original(*arguments, **options)
        unlock(lock)
        run.planted()
        return lock

    unlock = tree.unlock
    tree.unlock = lambda lock: None
    run.wrap(tree, "lock", lock)


@defect()
def key_ignores_the_namespace(run):
    """Prefixes are shared between requests with different extra keys."""
    from sglang.srt.mem_cache import common, unified_radix_cache

    key_of = common.RadixKey

    def key(tokens=None, extra_key=None, **options):
        run.planted()
        options.pop("extra_key", None)
        return key_of(options.pop("token_ids", tokens), None, **options)

    common.RadixKey = unified_radix_cache.RadixKey = key


# In the scheduler --------------------------------------------------------------------------------


@defect("tight", "tokens")
def retraction_keeps_the_computed_tokens(run):
    """A retracted request resumes with its old slots, which were freed."""
    from sglang.srt.managers import schedule_batch
    from sglang.srt.mem_cache import allocation

    old, size = {}, allocator_of(run).page_size

    def released(original, *arguments, **options):
        request = options["req"]
        old[request.rid] = run.slots(request, 0, (request.seqlen - 1) // size * size).long()
        return original(*arguments, **options)

    def prefix(original, batch, request):
        found = original(batch, request)
        mine = old.get(request.rid)
        if mine is not None and not request.kv.holds_kv:
            del old[request.rid]
            run.planted()
            return mine[: len(found)] if len(found) else found
        return found

    def begin(original, request, *arguments, **options):
        original(request, *arguments, **options)
        if request.rid in old:
            request.prefix_len = len(old[request.rid])

    def indices(original, request):
        mine = old.get(request.rid)
        return original(request) if mine is None else mine

    run.wrap(schedule_batch, "release_req", released)
    run.wrap(allocation, "_prefix_kv_indices", prefix)
    run.wrap_method(schedule_batch.Req, "init_next_round_input", begin)
    run.wrap(run.scheduler.tree_cache, "prefix_device_indices", indices)


@defect()
def chunk_starts_too_late(run):
    """The second chunk of a prompt omits tokens."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    size = allocator_of(run).page_size

    def prepare(original, batch):
        for request in batch.reqs:
            if request.kv.holds_kv and request.extend_len > size and run.now(1):
                request.prefix_len += size
                row = run.slots(request, 0, request.prefix_len)
                row[-size:] = run.slots(request, 0, size)
                run.planted()
        return original(batch)

    run.wrap_method(ScheduleBatch, "prepare_for_extend", prepare)


# In windows --------------------------------------------------------------------------------------


@defect("windows")
def window_is_left_too_early(run):
    """Slots that the window still covers are freed."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    mapping = allocator_of(run).full_to_swa_index_mapping

    def evict(original, batch, request, length, **options):
        original(batch, request, length + 64, **options)
        # Other slots are protected by the tree.
        if (mapping[run.slots(request, length - 60, length).long()] == 0).any():
            run.planted()

    run.wrap_method(ScheduleBatch, "_evict_swa", evict)


@defect("windows")
def slots_of_the_window_are_exchanged(run):
    """Two pages of a request exchange their slots in the window pool."""
    mapping = allocator_of(run).full_to_swa_index_mapping

    def change():
        requests = [each for each in run.running if len(each.output_ids) > 3]
        if requests and run.now(8):
            stop = run.slots(requests[0]).numel() // 16 * 16
            first, second = run.slots(requests[0], stop - 32, stop).long().split(16)
            mapping[first], mapping[second] = mapping[second], mapping[first].clone()
            run.planted()

    after_planning(run, change)


# In HiCache --------------------------------------------------------------------------------------


@defect("hicache")
def pages_are_loaded_in_another_order(run):
    """In a load, the host pages are copied to the wrong device pages, in another order."""
    controller = run.scheduler.tree_cache.cache_controller

    def load(original, host_indices, *arguments, **options):
        if len(host_indices) > 16:
            host_indices = host_indices.roll(16)
            run.planted()
        return original(host_indices, *arguments, **options)

    run.wrap(controller, "load", load)


@defect("hicache")
def load_is_not_queued(run):
    """Device pages are allocated for a hit on the host, but nothing is copied to them."""
    controller = run.scheduler.tree_cache.cache_controller

    def load(original, *arguments, **options):
        found = original(*arguments, **options)
        if found is not None and run.now(1):
            controller.load_queue.pop()
            run.planted()
        return found

    run.wrap(controller, "load", load)


@defect("hicache")
def pages_are_stored_in_another_order(run):
    """In a store, the device pages are copied to the wrong host pages, in another order."""
    controller = run.scheduler.tree_cache.cache_controller

    def write(original, device_indices, *arguments, **options):
        if len(device_indices) > 16:
            device_indices = device_indices.roll(16)
            run.planted()
        return original(device_indices, *arguments, **options)

    run.wrap(controller, "write", write)


def find_all(engine):
    """Run an engine with each of its defects in turn, under the sanitizer and in a separate
    process.

    Returns:
        An entry for each defect with its "name", "planted_at", "found_at", "kind", "engine" and
        "slots_read". The name of the first entry, for the run without a defect, is empty.
    """
    return in_a_process("tests.machinery.sglang_defects", engine)


def _find(engine):
    scheduler, found = Scheduler(**ENGINES[engine]), []
    plants = {"": None}
    plants |= {name: plant for name, (plant, engines) in DEFECTS.items() if engine in engines}
    for name, plant in plants.items():
        work = {"new_tokens": 40, "keys": name == "key_ignores_the_namespace"}
        result = scheduler.run(work, plant)
        findings = result.get("findings") or {}
        kind, step = (result.get("found") or [(None, None)])[0]
        # The last step that SGLang computed before it failed.
        error = result["error"] and f"step {result['failed_at']}: {result['error']}"
        found.append(
            {
                **{"name": name, "planted_at": result.get("planted_at"), "found_at": step},
                **{"kind": kind, "engine": error or "answered"},
                **{"slots_read": findings.get("slots_read"), "off": findings.get("off")},
            }
        )
    return found


if __name__ == "__main__":
    print(json.dumps(_find(sys.argv[1])))
