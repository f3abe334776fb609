# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a separate process, which continues stepping while it waits for commands.

`python -m tests.machinery.vllm_engine OPTIONS` reads commands and writes responses, one JSON value
per line.
"""

import json
import sys
import time

from tests.machinery import roots
from tests.machinery.engine_process import DEADLINE_S, EngineInProcess, Lines, say

ENVIRONMENT = {
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    **{"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0", "PYTHONPATH": roots.python_path()},
}
MODULE = "kvcache_vllm.disaggregation"


class Engine(EngineInProcess):
    """An engine in a separate process.

    `options` are passed to vLLM's `LLM`, and `extra` to the connector. `python` is the interpreter
    of the environment with vLLM.
    """

    def __init__(
        self, folder, role, *, extra=None, environment=None, python=sys.executable, **options
    ):
        options |= {"model": folder}
        if role:
            options["kv_transfer_config"] = {
                **{"kv_connector": "KVCacheConnector", "kv_connector_module_path": MODULE},
                **{"kv_role": role,
                    "kv_connector_extra_config": {"transport": "tcp"} | (extra or {})},
            }  # fmt: skip
        command = [str(python), "-m", "tests.machinery.vllm_engine", json.dumps(options)]
        super().__init__(command, ENVIRONMENT | (environment or {}))

    def run(self, prompts, max_tokens=16, params=None, timeout_s=DEADLINE_S):
        """Return (tokens, kv_transfer_params) for each prompt."""
        return self.ask(
            "run", prompts, max_tokens, params or [None] * len(prompts), timeout_s=timeout_s
        )

    def prefill(self, prompts):
        """Prefill the prompts. Return the kv_transfer_params for each."""
        return [
            each[1] for each in self.run(prompts, 1, [{"do_remote_decode": True}] * len(prompts))
        ]

    def decode(self, prompts, offers, max_tokens=16):
        """Decode the prompts. Return (generated tokens of each prompt, number of computed tokens)."""
        self.ask("scheduled")
        tokens = [each[0] for each in self.run(prompts, max_tokens, offers)]
        return tokens, self.ask("scheduled")


def main():
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    import tests.machinery.vllm_waits  # noqa: F401

    options = json.loads(sys.argv[1])
    if transfer := options.pop("kv_transfer_config", None):
        options["kv_transfer_config"] = KVTransferConfig(**transfer)
    defaults = {
        **{"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "seed": 0},
        **{"max_model_len": 1024, "block_size": 32, "num_gpu_blocks_override": 160},
        **{"max_num_batched_tokens": 256, "max_num_seqs": 16},
        **{"prefix_caching_hash_algo": "sha256_cbor", "prefix_cache_retention_interval": None},
    }
    if options.get("tensor_parallel_size", 1) > 1:
        options["distributed_executor_backend"] = "mp"
        options["worker_extension_cls"] = "tests.machinery.vllm_waits.Extension"
    engine = LLM(**defaults | options).llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    counts = count_scheduled(scheduler)
    say("ready")
    numbers, pending, orders, commands = iter(range(10**9)), {}, [], Lines()
    while (line := commands.next(0.0 if scheduler.has_requests() else 0.02)) != "":
        if line is not None:
            command, *arguments = json.loads(line)
            if command == "run":
                order = []
                for prompt, params in zip(arguments[0], arguments[2]):
                    sampling = SamplingParams(
                        **{"temperature": 0, "ignore_eos": True, "detokenize": False},
                        max_tokens=arguments[1],
                        extra_args=params and {"kv_transfer_params": params},
                    )
                    order.append(f"r{next(numbers)}")
                    engine.add_request(order[-1], {"prompt_token_ids": prompt}, sampling)
                orders.append(order)
            elif command == "held":
                say([len(scheduler.requests), round(scheduler.kv_cache_manager.usage, 6)])
            elif command == "reset":
                say(engine.reset_prefix_cache())
            elif command == "scheduled":
                say(counts.pop("tokens", 0))
            elif command == "connector":  # a method of the worker side
                getattr(get_kv_transfer_group(), arguments[0])()
                say(True)
            elif command == "abort":
                engine.abort_request([request for order in orders for request in order])
                orders.clear()
                say(True)
        if not scheduler.has_requests():
            continue
        before = counts.get("tokens", 0)
        outputs = engine.step()
        if counts.get("tokens", 0) == before:
            time.sleep(0.001)  # as vLLM's engine does while it has no other work
        for output in outputs:
            if output.finished:
                tokens = list(output.outputs[0].token_ids)
                pending[output.request_id] = [tokens, output.kv_transfer_params]
        while orders and all(request in pending for request in orders[0]):
            say([pending.pop(request) for request in orders.pop(0)])
    engine.engine_core.shutdown()


def count_scheduled(scheduler):
    """Count the tokens that are scheduled from now on. Return the dictionary with the count."""
    counts, schedule = {}, scheduler.schedule

    def counted(*arguments, **options):
        output = schedule(*arguments, **options)
        counts["tokens"] = counts.get("tokens", 0) + output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counted
    return counts


if __name__ == "__main__":
    main()
