# SPDX-License-Identifier: Apache-2.0
"""Counts the hits of a trace in vLLM's scheduler, with vLLM's manager and with kvcache's policies.

`python -m tests.machinery.vllm_environment -m benchmarks.vllm_trace TRACE [--requests N] [--json
FILE]`. TRACE is in Mooncake's format, with numbered blocks of 512 tokens. Requests are served one
after another. Each request is computed in a single step and generates one token. Hits are the
tokens that `schedule()` reports as already computed. The clock of kvcache's policies follows the
timestamps of the trace.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager

import kvcache_vllm as ours
from benchmarks.measure import add_json, save
from benchmarks.vllm_schedule import scheduler_with
from tests.machinery import vllm_schedulers
from tests.machinery.vllm_schedulers import (
    TINY_LLAMA,
    answer,
    block_hasher,
    engine_config,
    make_request,
    make_scheduler,
)

BLOCK = 512  # tokens
LONGEST = 262_144  # tokens per request
POOLS = (1_000, 3_000, 5_859, 10_000)  # blocks
CASES = ("vLLM", "kvcache, lru", "kvcache, learned")


def read(path: Path, num_requests: int) -> list[tuple[float, list[int]]]:
    """Return each request's time in seconds and the block numbers of its prompt."""
    with path.open() as lines:
        records = [json.loads(line) for _, line in zip(range(num_requests), lines)]
    return [(each["timestamp"] / 1000, each["hash_ids"]) for each in records]


def hit_blocks(
    folder: str, case: str, num_blocks: int, prompts: list[tuple[float, list[int]]]
) -> int:
    """Return the number of prompt blocks found in the cache."""
    options: dict[str, Any] = {
        **{"max_model_len": LONGEST, "max_num_batched_tokens": LONGEST},
        "hf_overrides": {"max_position_embeddings": LONGEST},
    }
    if case != "vLLM":
        options["additional_config"] = {"kvcache": {"eviction": case.split()[-1]}}
    config = engine_config(folder, **options)
    pool = (config, ("full",), num_blocks + 1)
    if case == "vLLM":
        scheduler, hasher = scheduler_with(KVCacheManager, *pool), block_hasher(size=BLOCK)
    else:
        scheduler, hasher = (
            make_scheduler(ours.VllmScheduler, *pool),
            block_hasher(size=BLOCK, ours=True),
        )
    hits = 0
    for number, (seconds, blocks) in enumerate(prompts):
        if case != "vLLM":
            scheduler.kv_cache_manager.native.cache.set_now(seconds)
        tokens = [block for block in blocks for _ in range(BLOCK)]
        if len(tokens) + 1 > min(LONGEST, num_blocks * BLOCK):
            continue
        scheduler.add_request(make_request(number, tokens, hasher, 1))
        while scheduler.has_unfinished_requests():
            scheduled = scheduler.schedule()
            hits += sum(new.num_computed_tokens // BLOCK for new in scheduled.scheduled_new_reqs)
            scheduler.update_from_output(scheduled, answer(scheduler, scheduled))
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--requests", type=int, default=2_000)
    add_json(parser)
    options = parser.parse_args()
    vllm_schedulers.BLOCK = BLOCK  # the block size of all schedulers created later
    vllm_schedulers.SHAPE["block_size"] = BLOCK
    prompts = read(options.trace, options.requests)
    total = sum(len(blocks) for _, blocks in prompts)
    results: dict[str, Any] = {"requests": len(prompts), "prompt_blocks": total}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(TINY_LLAMA))
        for num_blocks in POOLS:
            results[str(num_blocks)] = found = {
                case: hit_blocks(folder, case, num_blocks, prompts) for case in CASES
            }
            shares = ", ".join(
                f"{case} {hits} ({hits / total:.1%})" for case, hits in found.items()
            )
            print(f"{num_blocks} blocks, hits of {total}: {shares}", flush=True)
    save(options.json, "vllm_trace", results)


if __name__ == "__main__":
    main()
