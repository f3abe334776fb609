"""A tiny model in vLLM that chats on a device pool that is too small: without a host tier, and with it.

`python -m tests.vllm_environment -m benchmarks.vllm_offloading [--rounds N] [--json FILE]`. Each run is a
process of its own; they take turns. Hit tokens are those of the second and third turn, and bytes those
that moved between device and host. CPU time is that of the requests, without the start.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from tests.test_vllm import MODELS
from tests.vllm_chats import chats

CASES: dict[str, dict[str, Any]] = {
    "no tier": {},
    "kvcache's tier": {"tier": {"cpu_bytes_to_use": 1 << 28}},
    "kvcache's tier and scheduler": {
        "tier": {"cpu_bytes_to_use": 1 << 28},
        "scheduler_cls": "kvcache.integrations.vllm.Scheduler",
    },
}
POOL = {"llama": 100, "gemma3": 300}  # blocks


def measured(folder: str, name: str, rounds: int) -> dict[str, dict[str, Any]]:
    """By case: hit and prompt tokens, bytes, CPU seconds of each round."""
    found: dict[str, dict[str, Any]] = {case: {"cpu_s": []} for case in CASES}
    answers = []
    for _ in range(rounds):
        for case, options in CASES.items():
            ran = chats(folder, num_blocks=POOL[name], **options)
            answers.append(ran["answers"])
            moved = sum(
                value
                for metric, value in ran["metrics"].items()
                if metric.startswith("vllm:kv_offload") and "bytes" in metric
            )
            found[case] |= {
                **{"hit_tokens": sum(ran["hits"][1:]), "prompt_tokens": sum(ran["prompts"][1:])},
                "bytes": moved,
            }
            found[case]["cpu_s"].append(ran["cpu"])
    if any(each != answers[0] for each in answers):
        raise AssertionError("answers differ")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, config in MODELS.items():
            path = Path(folder) / name
            path.mkdir()
            (path / "config.json").write_text(json.dumps(config))
            results[name] = found = measured(str(path), name, options.rounds)
            for case, row in found.items():
                print(
                    f"{name}, {case}: {row['hit_tokens']} of {row['prompt_tokens']} tokens hit, "
                    f"{row['bytes'] / 2**20:.0f} MiB moved, {statistics.median(row['cpu_s']):.2f} s CPU",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
