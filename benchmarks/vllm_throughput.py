# SPDX-License-Identifier: Apache-2.0
"""Serves a tiny model in vLLM with vLLM's and with kvcache's manager, and measures their memory.

`python -m tests.machinery.vllm_environment -m benchmarks.vllm_throughput [--rounds N] [--json
FILE]`. The two managers alternate, and each run has its own process. The scheduling share is the
CPU time that the thread spends in `schedule()` and `update_from_output()`, relative to the thread's
total CPU time while serving.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import add_json, save
from tests.machinery import roots
from tests.machinery.shared import REPO
from tests.machinery.vllm_models import MODELS

CASES = {"vLLM": None, "kvcache": "kvcache_vllm.VllmScheduler"}
NUM_REQUESTS, PROMPT, ANSWER = 256, 64, 96  # PROMPT and ANSWER are numbers of tokens
PROGRAM = """
import json, random, sys, time
from tests.machinery import vllm_schedulers  # settings of the environment
from vllm import LLM, SamplingParams
folder, scheduler_cls, num_requests, prompt, answer = json.loads(sys.argv[1])
options = {} if scheduler_cls is None else {"scheduler_cls": scheduler_cls}
llm = LLM(
    folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024,
    block_size=32, seed=0, num_gpu_blocks_override=8 * num_requests, async_scheduling=False,
    max_num_batched_tokens=4096, max_num_seqs=num_requests,
    prefix_caching_hash_algo="sha256_cbor", **options,
)
scheduler = llm.llm_engine.engine_core.engine_core.scheduler
spent = [0.0]
for name in ("schedule", "update_from_output"):
    def timed(*args, call=getattr(scheduler, name), **options):
        start = time.thread_time()
        try:
            return call(*args, **options)
        finally:
            spent[0] += time.thread_time() - start
    setattr(scheduler, name, timed)
rng = random.Random(0)
texts = [[rng.randrange(3, 500) for _ in range(prompt)] for _ in range(num_requests)]
prompts = [{"prompt_token_ids": text} for text in texts]
params = SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True, detokenize=False)
start, wall = time.thread_time(), time.perf_counter()
outputs = llm.generate(prompts, params, use_tqdm=False)
cpu, wall = time.thread_time() - start, time.perf_counter() - wall
print(json.dumps([cpu, wall, spent[0], [list(each.outputs[0].token_ids) for each in outputs]]))
"""
MEMORY = """
import gc, json, os, sys
from tests.machinery import vllm_schedulers
from vllm.v1.core.block_pool import BlockPool
from kvcache.allocator import BlockPool as OurPool
def resident():
    gc.collect()
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
count, before = 1_000_000, resident()
if sys.argv[1] == "vLLM":
    pool = BlockPool(count, True, 16)
    pool.free_blocks(pool.get_new_blocks(count - 1))  # so that all memory is touched
else:
    pool = OurPool(count)
    pool.release(pool.allocate(count - 1))
print(json.dumps((resident() - before) / count))
"""


def program(text: str, argument: str) -> list:
    done = subprocess.run(
        [sys.executable, "-c", text, argument],
        capture_output=True,
        text=True,
        cwd=REPO,
        env=os.environ | {"PYTHONPATH": roots.python_path(), "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    add_json(parser)
    options = parser.parse_args()
    results: dict[str, dict] = {}
    for name in ("llama", "gemma3"):
        rows: dict[str, list] = {case: [] for case in CASES}
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
            for _ in range(options.rounds):
                for case, scheduler_cls in CASES.items():
                    argument = json.dumps([folder, scheduler_cls, NUM_REQUESTS, PROMPT, ANSWER])
                    rows[case].append(program(PROGRAM, argument))
        answers = [row[3] for own in rows.values() for row in own]
        if any(each != answers[0] for each in answers):
            raise AssertionError("answers differ")
        for case, own in rows.items():
            cpu, wall, spent = (statistics.median(row[i] for row in own) for i in range(3))
            tokens = NUM_REQUESTS * ANSWER
            results[f"{name}, {case}"] = {"cpu_s": cpu, "wall_s": wall, "scheduler_cpu_s": spent}
            print(
                f"{name}, {case}: {tokens / cpu:,.0f} tokens per CPU second, scheduling "
                f"{spent / cpu:.1%} of it",
                flush=True,
            )
    for case in CASES:
        results[f"memory, {case}"] = {"bytes_per_block": program(MEMORY, case)}
        print(
            f"{case}: {results[f'memory, {case}']['bytes_per_block']:.0f} bytes per block of a pool"
        )
    save(options.json, "vllm_throughput", results)


if __name__ == "__main__":
    main()
