# SPDX-License-Identifier: Apache-2.0
"""Measures three-turn chats in vLLM that exceed the device pool, with and without a host tier.

`python -m benchmarks.vllm_offloading [--json FILE]`, in an environment with vLLM. Prints hits,
bytes moved, and CPU time of serving (without startup) for a tiny Llama and a tiny Gemma 3 with
random weights. Each case runs in its own process. The three cases alternate, and the reported values
are medians over all rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.measure import add_json, save
from tests.machinery.vllm_chats import chats
from tests.machinery.vllm_models import MODELS

TIER = {"cpu_bytes_to_use": 256 << 20, "offload_prompt_only": False}
CASES = {
    "no tier": {},
    "host tier": {"tier": TIER},
    "host tier and kvcache's scheduler": {
        "tier": TIER,
        "scheduler_cls": "kvcache_vllm.VllmScheduler",
    },
}
NUM_BLOCKS = {"llama": 100, "gemma3": 160}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json(parser)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, dict] = {}
    for name, num_blocks in NUM_BLOCKS.items():
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(MODELS[name]))
            rounds = [
                {case: chats(folder, num_blocks=num_blocks, **more) for case, more in CASES.items()}
                for _ in range(options.rounds)
            ]
        answers = [found["answers"] for each in rounds for found in each.values()]
        assert all(each == answers[0] for each in answers), "the answers differ"
        for case in CASES:
            found = rounds[0][case]
            row = {
                "hit_tokens": sum(found["hits"][1:]),
                "prompt_tokens": sum(found["prompts"][1:]),
                "stored_bytes": found["metrics"].get("vllm:kv_offload_store_bytes", 0),
                "loaded_bytes": found["metrics"].get("vllm:kv_offload_load_bytes", 0),
                "cpu_s": statistics.median(each[case]["cpu"] for each in rounds),
            }
            results[f"{name}, {case}"] = row
            print(
                f"{name}, {case}: hits in turns 2 and 3 {row['hit_tokens']:,} of "
                f"{row['prompt_tokens']:,} tokens, stored {row['stored_bytes'] / 1e6:.1f} MB, "
                f"loaded {row['loaded_bytes'] / 1e6:.1f} MB, CPU {row['cpu_s']:.2f} s, same answers",
                flush=True,
            )
    save(options.json, "vllm_offloading", results)


if __name__ == "__main__":
    main()
