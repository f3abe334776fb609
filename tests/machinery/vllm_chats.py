# SPDX-License-Identifier: Apache-2.0
"""Multi-turn chats with a tiny model in vLLM, whose device pool can hold only a few of the chats.

`python -m tests.machinery.vllm_chats '[{"model": FOLDER, ...}, ...]'` prints the results as JSON in
the last line of its output.
"""

import json
import os
import random
import sys
import time

from kvcache.allocator import check_invariants
from tests.machinery.engine_process import run_module
from tests.machinery.vllm_weights import fill_at_random

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

TIER = "kvcache_vllm.offloading"
SWAPS = ("swap_in", "swap_out")


NUM_CHATS, PROMPT_TOKENS, TURN_TOKENS, MAX_TOKENS = 24, 600, 40, 16


def chats(model, **options):
    """Run the chats in another process. Return their results, see `run`."""
    [found] = chats_each([{"model": model, **options}])
    if "error" in found:
        raise RuntimeError(found["error"])
    return found


def chats_each(variants):
    """Run `chats` with each of these sets of options in turn, in one process. Results of failed
    runs contain `error`.
    """
    timeout_s = 100 + 100 * len(variants)
    return run_module(__name__, json.dumps(variants), timeout_s=timeout_s, OMP_NUM_THREADS="1")


def run_each(variants):
    """Run the variants in this process and return their results."""
    from kvcache.worker.swap.engine import SwapEngine
    from tests.machinery.vllm_models import make_room

    whole = {name: getattr(SwapEngine, name) for name in SWAPS}
    found = []
    for options in variants:
        try:
            found.append(run(**options))
        except Exception as error:
            found.append({"error": f"{type(error).__name__}: {error}"})
        for name, swap in whole.items():
            setattr(SwapEngine, name, swap)
        make_room()
    return found


def run(
    model, tier=None, connector=TIER, num_blocks=100, num_turns=3, fail_every=0,
    scheduler_cls=None, is_async=False, events=False,
):  # fmt: skip
    """Return the answers, the hit and prompt tokens per turn, the CPU seconds and the metrics.

    Args:
        tier: The options of the host tier, or None without a tier.
        num_blocks: The size of the device pool.
        fail_every: The number of successful swaps between two failures, or 0 for no failures.
        scheduler_cls: Replaces vLLM's scheduler.
    """
    from vllm import LLM, SamplingParams
    from vllm.config import KVEventsConfig, KVTransferConfig

    more = {}
    if scheduler_cls is not None:
        more["scheduler_cls"] = scheduler_cls
    if tier is not None:
        more["kv_transfer_config"] = KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_connector_module_path=connector,
            kv_role="kv_both",
            kv_connector_extra_config=tier,
        )
    if events:
        more["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    fill_at_random()
    num_failed = fail_some(fail_every) if fail_every else []
    llm = LLM(
        model,
        **{"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "seed": 0},
        **{"dtype": "float32", "max_model_len": 1024, "block_size": 32, "max_num_seqs": 8},
        **{"max_num_batched_tokens": 512, "disable_log_stats": False},
        **{"prefix_caching_hash_algo": "sha256_cbor", "prefix_cache_retention_interval": None},
        num_gpu_blocks_override=num_blocks,
        async_scheduling=is_async,
        **more,
    )
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    rng = random.Random(1)
    texts = [[rng.randrange(3, 512) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_CHATS)]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
    answers, hits, prompts = [], [], []
    cpu = time.process_time()
    for _ in range(num_turns):
        outputs = llm.generate(
            [{"prompt_token_ids": text} for text in texts], params, use_tqdm=False
        )
        hits.append(sum(output.num_cached_tokens for output in outputs))
        prompts.append(sum(map(len, texts)))
        for text, output in zip(texts, outputs):
            answers.append(list(output.outputs[0].token_ids))
            text += answers[-1] + [rng.randrange(3, 512) for _ in range(TURN_TOKENS)]
    cpu = time.process_time() - cpu
    found = {
        metric.name: getattr(metric, "value", None) or getattr(metric, "count", 0)
        for metric in llm.get_metrics()
    }
    if tier is not None and connector == TIER:
        scheduler.connector.connector_scheduler.manager.check_invariants()
    native = getattr(scheduler.kv_cache_manager, "native", None)
    if native is not None:
        check_invariants(native)
    result = {
        **{"answers": answers, "hits": hits, "prompts": prompts, "cpu": cpu},
        **{"metrics": found, "failed": len(num_failed)},
        "manager": type(scheduler.kv_cache_manager).__name__,
        "usage": scheduler.kv_cache_manager.usage,
        "is_reset": llm.reset_prefix_cache(reset_connector=True) if tier else True,
    }
    llm.llm_engine.engine_core.shutdown()
    return result


def fail_some(fail_every):
    """After every `fail_every` successful swaps, make the next swap fail when it starts.

    Return a list to which each failure is appended.
    """
    from kvcache.worker.swap.engine import SwapEngine

    failed, count = [], [0]
    for name in SWAPS:
        swap = getattr(SwapEngine, name)

        def failing(self, pairs, swap=swap, **options):
            count[0] += 1
            if count[0] % (fail_every + 1) == 0:
                failed.append(len(pairs))
                raise RuntimeError("no luck")
            return swap(self, pairs, **options)

        setattr(SwapEngine, name, failing)
    return failed


if __name__ == "__main__":
    print(json.dumps(run_each(json.loads(sys.argv[1]))))
