# SPDX-License-Identifier: Apache-2.0
"""A vLLM engine in a separate process, which continues stepping while it waits for commands.

`python -m tests.machinery.vllm_engine OPTIONS` reads commands and writes responses, one JSON value
per line.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time

from tests.machinery.shared import REPO

ENVIRONMENT = {
    **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"},
    **{"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    **{"VLLM_LOGGING_LEVEL": "ERROR", "PYTHONHASHSEED": "0", "PYTHONPATH": str(REPO)},
}
MODULE = "kvcache.plugins.vllm.disaggregation"
DEADLINE_S = 240


class Engine:
    """An engine in a separate process.

    `options` are those of vLLM's `LLM`, and `extra` those of the connector.
    """

    def __init__(self, folder, role, *, extra=None, environment=None, **options):
        options |= {"model": folder}
        if role:
            options["kv_transfer_config"] = {
                **{"kv_connector": "KVCacheConnector", "kv_connector_module_path": MODULE},
                **{
                    "kv_role": role,
                    "kv_connector_extra_config": {"transport": "gloo"} | (extra or {}),
                },
            }
        self.lines, self.errors = [], []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.machinery.vllm_engine", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPO,
            env=os.environ | ENVIRONMENT | (environment or {}),
            start_new_session=True,
        )
        for stream, kept in ((self.process.stdout, self.lines), (self.process.stderr, self.errors)):
            threading.Thread(target=self._keep, args=(stream, kept), daemon=True).start()

    @staticmethod
    def _keep(stream, kept):
        for line in stream:
            kept.append(line)

    def answer(self, timeout_s=DEADLINE_S):
        """Return the next response of the engine."""
        deadline = time.monotonic() + timeout_s
        while not any(line.startswith("@") for line in self.lines):
            assert self.process.poll() is None, "".join(self.errors)[-3000:]
            assert time.monotonic() < deadline, f"no answer: {''.join(self.errors)[-3000:]}"
            time.sleep(0.01)
        return json.loads(
            self.lines.pop(next(i for i, line in enumerate(self.lines) if line.startswith("@")))[1:]
        )

    def ask(self, command, *arguments, timeout_s=DEADLINE_S):
        """Send a command and return its response."""
        self.send(command, *arguments)
        return self.answer(timeout_s)

    def send(self, command, *arguments):
        """Send a command whose response is read later."""
        self.process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self.process.stdin.flush()

    def run(self, prompts, max_tokens=16, params=None, timeout_s=DEADLINE_S):
        """Return (tokens, kv_transfer_params) for each prompt."""
        return self.ask(
            "run", prompts, max_tokens, params or [None] * len(prompts), timeout_s=timeout_s
        )

    def prefill(self, prompts):
        """Prefill the prompts. Return the kv_transfer_params of each."""
        return [
            each[1] for each in self.run(prompts, 1, [{"do_remote_decode": True}] * len(prompts))
        ]

    def decode(self, prompts, offers, max_tokens=16):
        """Decode the prompts. Return (tokens of each prompt, number of computed tokens)."""
        self.ask("scheduled")
        tokens = [each[0] for each in self.run(prompts, max_tokens, offers)]
        return tokens, self.ask("scheduled")

    def wait_until_empty(self, timeout_s=30):
        """Wait until no block is held. Fails after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while (held := self.ask("held")) != [0, 0.0]:
            assert time.monotonic() < deadline, f"requests and usage: {held}"
            time.sleep(0.05)
        assert self.ask("reset") is True

    def said(self, text):
        """Return the number of log lines that contain a text."""
        return sum(text in line for line in list(self.errors))

    def signal(self, number):
        """Send a signal to the engine and its workers."""
        os.killpg(self.process.pid, number)

    def end(self):
        """Request the end of the process without waiting."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
        self.process.stdin.close()

    def close(self):
        """Wait for the processes to end, or kill them."""
        self.end()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


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
                        temperature=0,
                        max_tokens=arguments[1],
                        ignore_eos=True,
                        detokenize=False,
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
            elif command == "manager":
                say(type(scheduler.kv_cache_manager).__name__)
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
            time.sleep(0.001)  # as vLLM's engine does while it only waits
        for output in outputs:
            if output.finished:
                tokens = list(output.outputs[0].token_ids)
                pending[output.request_id] = [tokens, output.kv_transfer_params]
        while orders and all(request in pending for request in orders[0]):
            say([pending.pop(request) for request in orders.pop(0)])
    engine.engine_core.shutdown()


def count_scheduled(scheduler):
    """Count the tokens of all steps from now on."""
    counts, schedule = {}, scheduler.schedule

    def counted(*arguments, **options):
        output = schedule(*arguments, **options)
        counts["tokens"] = counts.get("tokens", 0) + output.total_num_scheduled_tokens
        return output

    scheduler.schedule = counted
    return counts


class Lines:
    """Lines of the standard input."""

    def __init__(self):
        self.rest = b""

    def next(self, timeout_s):
        """Return the next line, None after a timeout, or "" at the end of the input."""
        if b"\n" not in self.rest and select.select([0], [], [], timeout_s)[0]:
            data = os.read(0, 1 << 20)
            if not data:
                return ""
            self.rest += data
        if b"\n" not in self.rest:
            return None
        line, self.rest = self.rest.split(b"\n", 1)
        return line.decode()


def say(value):
    print("@" + json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
