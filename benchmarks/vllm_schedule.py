# SPDX-License-Identifier: Apache-2.0
"""Measures vLLM's schedule() with its own KV cache manager, with kvcache's, and with a no-op manager.

`python -m benchmarks.vllm_schedule [decode | prompts] [--json FILE]`, in an environment with vLLM
(`make bench-vllm`). The managers alternate every 16 steps and serve the same requests. Each time is
the median CPU time of the scheduler's thread. A manager's part is the time with this manager minus
the time with the no-op manager. This comparison uses vLLM's own loops over the requests. In
addition, complete calls of `schedule()` and `update_from_output()` are measured with kvcache's
steady decode steps.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler as vllm_scheduler

import kvcache_vllm as ours
from benchmarks.measure import add_json, save
from tests.machinery.vllm_schedulers import (
    TINY_LLAMA,
    answer,
    block_hasher,
    engine_config,
    make_request,
    make_scheduler,
)

STEADY = "kvcache, steady steps"
IN_A_ROW = 16  # consecutive steps with one scheduler, as in an engine, which has only one
GROUPS = {"1 full": ("full",), "5 windows + 1 full": ("window",) * 5 + ("full",)}


class NoManager(KVCacheManager):
    """Acts as vLLM's manager until `is_armed` is set, and then does no work and returns no blocks.

    `num_hits` is a function that returns the number of cached tokens to report for the next new
    request.
    """

    is_armed = False
    num_hits: Callable[[], int] = lambda: 0

    def get_computed_blocks(self, request: Any, *args: Any) -> tuple[Any, int, int]:
        if NoManager.is_armed:
            return self.empty_kv_cache_blocks, NoManager.num_hits(), 0
        return super().get_computed_blocks(request, *args)

    def allocate_slots(self, request: Any, *args: Any, **options: Any) -> Any:
        if NoManager.is_armed:
            return self.empty_kv_cache_blocks
        return super().allocate_slots(request, *args, **options)


def scheduler_with(manager: type, *args: Any) -> Any:
    """Create vLLM's scheduler with another manager class."""
    theirs = vllm_scheduler.KVCacheManager
    vllm_scheduler.KVCacheManager = manager
    try:
        return make_scheduler(vllm_scheduler.Scheduler, *args)
    finally:
        vllm_scheduler.KVCacheManager = theirs


def without_steady_steps(scheduler: Any) -> Any:
    """Return kvcache's scheduler, modified to run vLLM's own code in every step."""
    scheduler.steady = None
    return scheduler


SCHEDULERS: dict[str, Callable[..., Any]] = {
    "vLLM": lambda *args: scheduler_with(KVCacheManager, *args),
    "kvcache": lambda *args: without_steady_steps(make_scheduler(ours.VllmScheduler, *args)),
    STEADY: lambda *args: make_scheduler(ours.VllmScheduler, *args),
    "no manager": lambda *args: scheduler_with(NoManager, *args),
}


def decode(
    folder: str, num_requests: int, groups: str, num_steps: int = 160
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the milliseconds that `schedule()` and `update_from_output()` take, by manager.

    Measured in decode steps of `num_requests` requests.
    """
    prompt = 256
    config = engine_config(
        folder, max_model_len=4096, max_num_seqs=1024, max_num_batched_tokens=8192
    )
    num_blocks = len(GROUPS[groups]) * num_requests * (prompt + num_steps + 64) // 16 + 1000
    NoManager.is_armed = False
    schedulers = {
        name: make(config, GROUPS[groups], num_blocks) for name, make in SCHEDULERS.items()
    }
    for name, scheduler in schedulers.items():
        hasher = block_hasher(ours=name.startswith("kvcache"))
        rng = random.Random(0)
        for i in range(num_requests):
            tokens = [rng.randrange(3, 500) for _ in range(prompt + i % 16)]
            scheduler.add_request(make_request(i, tokens, hasher, 3000))
        while len(scheduler.running) < num_requests or any(
            each.num_computed_tokens < each.num_prompt_tokens for each in scheduler.running
        ):
            scheduled = scheduler.schedule()
            scheduler.update_from_output(scheduled, answer(scheduler, scheduled))
    rows: dict[str, list[float]] = {name: [] for name in schedulers}
    updates: dict[str, list[float]] = {name: [] for name in schedulers}
    gc.collect()
    gc.freeze()
    order = random.Random(0)
    for _ in range(num_steps // IN_A_ROW):
        for name in order.sample(list(schedulers), len(schedulers)):
            scheduler = schedulers[name]
            NoManager.is_armed = name == "no manager"
            for _ in range(IN_A_ROW):
                start = time.thread_time()
                scheduled = scheduler.schedule()
                rows[name].append(time.thread_time() - start)
                answered = answer(scheduler, scheduled)
                start = time.thread_time()
                scheduler.update_from_output(scheduled, answered)
                updates[name].append(time.thread_time() - start)
    steady = schedulers[STEADY].steady
    if steady is None or steady.num_scheduled < num_steps:
        raise RuntimeError(
            "some steps were not steady: check whether kvcache knows the sources of this vLLM"
        )
    schedule, update = (
        {name: statistics.median(times) * 1e3 for name, times in each.items()}
        for each in (rows, updates)
    )
    return schedule, update


PROMPTS = {
    "8k tokens, 512 new": (8_192, 512, 8, 5, 8 * 800, "1 full"),
    "32k tokens, 512 new": (32_768, 512, 4, 4, 4 * 2_400, "1 full"),
    "128k tokens, 512 new": (131_072, 512, 2, 4, 2 * 8_800, "1 full"),
    "32k tokens, all new": (32_768, 512, 4, 3, 2_400, "1 full"),
    "32k tokens, 512 new, 5 windows + 1 full": (
        *(32_768, 512, 4, 4, 4 * 2_400),
        "5 windows + 1 full",
    ),
}
NO_MANAGER = "no manager"  # without a manager, requests have no hashes either
HASHES = {
    "vLLM, sha256": "sha256",
    "vLLM, sha256_cbor": "sha256_cbor",
    "kvcache": "sha256_cbor",
    NO_MANAGER: None,
}


def prompts(folder: str, case: str) -> dict[str, list[float]]:
    """Return the milliseconds that Request(), schedule() and update_from_output() take, and the sum.

    The times are measured with growing conversations.
    """
    prompt, turn, num_chats, num_turns, num_blocks, groups = PROMPTS[case]
    config = engine_config(
        folder,
        max_model_len=262_144,
        max_num_batched_tokens=8192,
        hf_overrides={"max_position_embeddings": 262_144},
    )
    found: dict[str, list[list[float]]] = {name: [] for name in HASHES}
    hits: set[tuple[int, ...]] = set()
    for _ in range(2):
        for name, algorithm in HASHES.items():
            NoManager.is_armed = name == NO_MANAGER
            if NoManager.is_armed:  # measured last
                NoManager.num_hits = iter(min(hits)).__next__
            hasher = block_hasher(algorithm, ours=name == "kvcache") if algorithm else None
            make = SCHEDULERS[{NO_MANAGER: NO_MANAGER, "kvcache": STEADY}.get(name, "vLLM")]
            scheduler = make(config, GROUPS[groups], num_blocks * len(GROUPS[groups]))
            rows, num_hits = _conversations(scheduler, hasher, prompt, turn, num_chats, num_turns)
            found[name] += rows
            hits.add(tuple(num_hits))
    assert len(hits) == 1, f"hits differ: {hits}"
    return {
        name: [statistics.median(column) * 1e3 for column in zip(*rows)]
        for name, rows in found.items()
    }


def _conversations(
    scheduler: Any, hasher: Any, prompt: int, turn: int, num_chats: int, num_turns: int
) -> tuple[list[tuple[float, ...]], list[int]]:
    rng = random.Random(0)
    chats = [[rng.randrange(3, 500) for _ in range(prompt)] for _ in range(num_chats)]
    gc.collect()
    gc.freeze()
    rows, num_hits = [], []
    for i in range(num_turns * num_chats):
        chat = chats[i % num_chats]
        chat += [rng.randrange(3, 500) for _ in range(turn)]
        start = time.thread_time()
        request = make_request(i, chat, hasher, 2)
        made = time.thread_time() - start
        scheduler.add_request(request)
        asked = updated = 0.0
        while scheduler.has_unfinished_requests():
            start = time.thread_time()
            scheduled = scheduler.schedule()
            asked += time.thread_time() - start
            num_hits += [each.num_computed_tokens for each in scheduled.scheduled_new_reqs]
            answered = answer(scheduler, scheduled)
            start = time.thread_time()
            scheduler.update_from_output(scheduled, answered)
            updated += time.thread_time() - start
        scheduler.schedule()
        if i >= num_chats:
            rows.append((made, asked, updated, made + asked + updated))
    return rows, num_hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=("decode", "prompts"))
    add_json(parser)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_LLAMA))
        if options.what != "prompts":
            for groups in GROUPS:
                for num_requests in (64, 256, 1024):
                    times, updates = decode(folder, num_requests, groups)
                    floor, whole = times["no manager"], (NO_MANAGER, STEADY)
                    parts = {name: ms - floor for name, ms in times.items() if name not in whole}
                    results[f"{num_requests} running, {groups}"] = times
                    results[f"{num_requests} running, {groups}, update"] = updates
                    print(
                        f"{num_requests} running, {groups}: schedule() {floor:.2f} ms without a manager"
                    )
                    for name, part in parts.items():
                        less = parts["vLLM"] / part
                        print(f"  {name}: the manager's part {part:.3f} ms ({less:.1f}x less)")
                    for what, found in (("schedule()", times), ("update_from_output()", updates)):
                        print(
                            f"  whole {what}: vLLM {found['vLLM']:.2f} ms, {STEADY} "
                            f"{found[STEADY]:.2f} ms ({found['vLLM'] / found[STEADY]:.1f}x less)"
                        )
        if options.what != "decode":
            for case in PROMPTS:
                results[case] = found = prompts(folder, case)
                print(case)
                floor = found[NO_MANAGER][3]
                for name, row in found.items():
                    parts = ", ".join(f"{ms:.2f}" for ms in row[:3])
                    line = f"  {name}: {row[3]:.2f} ms: Request(), schedule(), update {parts}"
                    if name != NO_MANAGER:
                        all_of, part = (found["vLLM, sha256_cbor"][3] - f for f in (0, floor))
                        line += f" ({all_of / row[3]:.1f}x less"
                        line += f"; the manager's part {part / (row[3] - floor):.1f}x less)"
                    print(line)
    save(options.json, f"vllm_schedule, vLLM {vllm.__version__}", results)


if __name__ == "__main__":
    main()
