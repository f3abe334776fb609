# SPDX-License-Identifier: Apache-2.0
"""An SGLang engine with all of its processes that exchanges KV with other engines.

`python -m tests.machinery.sglang_process OPTIONS` reads commands and writes responses.
"""

import asyncio
import json
import sys

from tests.machinery import roots
from tests.machinery.engine_process import DEADLINE_S, EngineInProcess, Lines, say
from tests.machinery.shared import REPO

STUBS = REPO / "tests" / "machinery" / "sglang_stubs"
OPTIONS = {
    **{"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"},
    **{"skip_tokenizer_init": True, "dtype": "float32", "max_running_requests": 16},
    **{"context_length": 1024, "chunked_prefill_size": 256, "disable_cuda_graph": True},
    **{"random_seed": 0, "log_level": "warning", "page_size": 64, "max_total_tokens": 5120},
}


class SGLangEngine(EngineInProcess):
    """An engine in a separate process.

    `options` are passed to SGLang's `Engine`, and `extra` to the exchange plug-in. If `extra` is
    None, the plug-in does nothing.
    """

    def __init__(self, folder, *, extra=None, environment=None, python=sys.executable, **options):
        environment = {
            **{"PYTHONPATH": f"{roots.python_path()}:{STUBS}", "SGLANG_USE_CPU_ENGINE": "1"},
            **{"OMP_NUM_THREADS": "1", "SGLANG_LOG_MS": "1"},
            **(environment or {}),
        }
        if extra is not None:
            environment["KVCACHE_EXCHANGE"] = json.dumps({"transport": "tcp"} | extra)
        options = json.dumps({"model_path": folder, **OPTIONS, **options})
        command = [str(python), "-m", "tests.machinery.sglang_process", options]
        super().__init__(command, environment)

    def run(self, prompts, max_tokens=16, offers=None, ask=False, timeout_s=DEADLINE_S):
        """Return a dictionary with "tokens", "cached", "storage" and "offer" for each prompt."""
        return self.ask("run", prompts, max_tokens, offers or [None] * len(prompts), ask)

    def prefill(self, prompts):
        """Prefill the prompts. Return an offer or None for each."""
        return [each["offer"] for each in self.run(prompts, 1, ask=True)]

    def decode(self, prompts, offers, max_tokens=16):
        """Decode the prompts. Return (generated tokens of each prompt, number of prompt tokens
        computed).
        """
        found = self.run(prompts, max_tokens, offers)
        computed = sum(len(prompt) - each["cached"] for prompt, each in zip(prompts, found))
        return [each["tokens"] for each in found], computed


async def serve(options):
    from sglang import Engine
    from sglang.srt.managers import io_struct

    from kvcache_sglang.params import offer_of, params_for

    engine = Engine(**options)

    async def generate(prompt, max_tokens, offer, asks):
        sampling = {"max_new_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        if asks or offer is not None:
            sampling["custom_params"] = params_for(None if asks else offer)
        answer = await engine.async_generate(input_ids=prompt, sampling_params=sampling)
        meta = answer["meta_info"]
        if meta["finish_reason"]["type"] == "abort":
            return {"tokens": None, "cached": 0, "offer": None}
        offer = offer_of(meta)
        details = meta.get("cached_tokens_details") or {}
        return {
            **{"tokens": answer["output_ids"], "cached": meta["cached_tokens"], "offer": offer},
            "storage": details.get("storage", 0),
        }

    async def run(prompts, max_tokens, offers, asks):
        made = [generate(p, max_tokens, o, asks) for p, o in zip(prompts, offers)]
        say(await asyncio.gather(*made))

    async def state():
        return (await engine.tokenizer_manager.get_internal_state())[0].get("kvcache_exchange", {})

    lines, loop, tasks = Lines(), asyncio.get_running_loop(), set()
    await run([[1, 2, 3]], 1, [None], False)
    while (line := await loop.run_in_executor(None, lines.next, 0.05)) != "":
        if line is None:
            continue
        command, *arguments = json.loads(line)
        if command == "run":
            tasks.add(task := asyncio.create_task(run(*arguments)))
            task.add_done_callback(tasks.discard)
        elif command == "held":
            now = await state()
            say([now.get("leases", 0) + now.get("loading", 0), 0.0])
        elif command == "state":
            say(await state())
        elif command == "reset":
            say((await engine.tokenizer_manager.flush_cache()).success)
        elif command == "abort":
            engine.tokenizer_manager.abort_request(abort_all=True)
        elif command == "pause":
            request = io_struct.PauseGenerationReqInput(mode=arguments[0])
            await engine.tokenizer_manager.pause_generation(request)
        elif command == "continue":
            request = io_struct.ContinueGenerationReqInput(torch_empty_cache=False)
            await engine.tokenizer_manager.continue_generation(request)
        elif command == "update":
            request = io_struct.UpdateWeightFromDiskReqInput(model_path=arguments[0])
            say((await engine.tokenizer_manager.update_weights_from_disk(request, None))[0])
    engine.shutdown()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
