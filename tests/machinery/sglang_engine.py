# SPDX-License-Identifier: Apache-2.0
"""Runs an SGLang scheduler with a tiny model in one process, on a CPU.

Because a scheduler takes a long time to start, `Scheduler.run` forks a process for each run, so
that every run begins in the same state.

`python -m tests.machinery.sglang_engine OPTIONS WORKS` prints the results as JSON in the last line
of its output.
"""

import contextlib
import json
import os
import random
import sys
import tempfile
import traceback
from array import array

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
# Reserve only a few tokens for outputs, so that requests have to be retracted.
os.environ.setdefault("SGLANG_INIT_NEW_TOKEN_RATIO", "0.01")
os.environ.setdefault("SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS", "1")
os.environ.setdefault("SGLANG_RETRACT_DECODE_STEPS", "1")
# Evict often, so that even short requests free slots outside their windows.
os.environ.setdefault("SGLANG_SWA_EVICTION_INTERVAL", "16")

from tests.machinery.engine_process import run_module
from tests.machinery.sglang_cpu import add_hicache_copies, read_windows_from_their_pool
from tests.machinery.shared import REPO

FOLDER = REPO / "build" / "sglang_models"
TINY = {
    **{"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": 1},
    **{"max_position_embeddings": 4096, "eos_token_id": 2},
}
WINDOWS = {
    **{**TINY, "num_hidden_layers": 4, "sliding_window": 64, "num_experts": 4},
    **{"layer_types": ["sliding_attention", "full_attention"] * 2},
    **{"mlp_layer_types": ["dense"] * 4},
}
OPTIONS = {
    **{"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"},
    **{"skip_tokenizer_init": True, "dtype": "bfloat16", "max_running_requests": 8},
    **{"context_length": 1024, "chunked_prefill_size": 64, "disable_cuda_graph": True},
    **{"random_seed": 0, "log_level": "error", "page_size": 16, "max_total_tokens": 2048},
    "disable_overlap_schedule": True,
}


def write_model(family):
    """Write a Llama or Mellum model with random weights, and return its folder."""
    import torch
    import transformers

    folder = FOLDER / family
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        if family == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
        else:
            model = transformers.MellumForCausalLM(transformers.MellumConfig(**WINDOWS))
        model.to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


class Scheduler:
    """An SGLang scheduler without the other processes of an engine.

    Args:
        family: "llama", or "mellum", which has sliding-window layers.
        options: Arguments of SGLang's `ServerArgs`.
    """

    def __init__(self, family="llama", **options):
        import torch
        from sglang.srt.managers import scheduler
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        torch.set_num_threads(1)
        if options.get("enable_hierarchical_cache"):
            add_hicache_copies()
        read_windows_from_their_pool()
        load_plugins()
        arguments = ServerArgs(model_path=write_model(family), **OPTIONS | options)
        arguments.resolve_once()
        arguments.check_server_args()
        ranks = SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
        publish(arguments, role="scheduler", ranks=ranks)
        self.module = scheduler
        self.inner = scheduler.Scheduler(arguments, PortArgs.init_new(arguments))
        for channel in ("send_to_tokenizer", "send_to_detokenizer"):
            getattr(self.inner.ipc_channels, channel).send_output = lambda *arguments: None

    def run(self, work, plant=None):
        """Run `Work(**work)` in a forked process.

        Args:
            work: Arguments of `Work`.
            plant: Function that takes a `Run` and changes SGLang's code.

        Returns:
            The result of `Run.results`.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "results.json")
            if child := os.fork():
                _, status = os.waitpid(child, 0)
            else:
                with contextlib.suppress(BaseException):
                    results = Run(self, Work(**work), plant).results()
                    with open(path, "w") as file:
                        json.dump(results, file)
                os._exit(0)
            if not os.path.exists(path):
                return {"error": f"the process ended with status {status}"}
            with open(path) as file:
                return json.load(file)


class Work:
    """Chats whose turns share prefixes.

    Args:
        seed: Seed of all choices.
        chats: Number of chats. Half of them begin with the same 40 tokens.
        turns: Number of rounds.
        at_once: Number of chats that have a turn in each round.
        new_tokens: Number of tokens to generate per turn.
        aborts: Whether one request in each round is aborted.
        keys: Whether chats have different extra keys. In this case, all chats begin with the same
            tokens.
    """

    def __init__(
        self, seed=0, chats=6, turns=5, at_once=5, new_tokens=20, aborts=False, keys=False
    ):
        self.random, self.turns, self.at_once = random.Random(seed), turns, at_once
        self.new_tokens, self.aborts, self.keys = new_tokens, aborts, keys
        shared = self._tokens(40)
        self.chats = [
            (shared if keys or i % 2 else []) + self._tokens(self.random.randrange(30, 120))
            for i in range(chats)
        ]

    def _tokens(self, count):
        return [self.random.randrange(3, 250) for _ in range(count)]

    def round(self):
        """Return (chat, tokens) for each of the next requests, or None at the end."""
        self.turns -= 1
        if self.turns < 0:
            return None
        chosen = self.random.sample(range(len(self.chats)), self.at_once)
        return [(chat, list(self.chats[chat])) for chat in chosen]

    def answered(self, chat, output):
        self.chats[chat] += [*output, *self._tokens(9)]


class Run:
    """One run of a scheduler. In each iteration of the scheduler's loop, one request arrives."""

    def __init__(self, scheduler, work, plant):
        self.scheduler, self.work = scheduler.inner, work
        self.requests, self.live, self.waiting = {}, {}, []
        self.planted_at = self.failed_at = self.error = self.abort = None
        self.iteration = self.num_calls = 0
        self.outputs = []
        inner = self.scheduler
        inner.ingest_requests = self._ingest
        add = inner._add_request_to_queue
        inner._add_request_to_queue = lambda request, **options: (
            self.requests.__setitem__(request.rid, request),
            add(request, **options),
        )[1]
        if plant is not None:
            plant(self)
        try:
            inner.run_event_loop()
        except Exception as failure:
            frame = traceback.extract_tb(failure.__traceback__)[-1]
            lines = str(failure).strip().splitlines() or [""]
            self.failed_at = inner.forward_ct
            self.error = f"{type(failure).__name__}: {lines[0][:100]} ({frame.name})"

    def planted(self):
        """Record that the planted defect has taken effect."""
        if self.planted_at is None:
            self.planted_at = self.scheduler.forward_ct

    def now(self, count):
        """Return whether the defect should act now: in call number `count` or later, and only once."""
        self.num_calls += 1
        return self.num_calls >= count and self.planted_at is None

    def wrap(self, owner, name, function):
        """Replace a function of SGLang by `function(original, ...)`."""
        original = getattr(owner, name)
        setattr(
            owner, name, lambda *arguments, **options: function(original, *arguments, **options)
        )

    def wrap_method(self, owner, name, function):
        """Replace a method of a class by `function(original, self, ...)`."""
        original = getattr(owner, name)

        def method(owner, *arguments, **options):
            return function(original, owner, *arguments, **options)

        setattr(owner, name, method)

    @property
    def running(self):
        """The requests that are being decoded."""
        return self.scheduler.running_batch.reqs if self.scheduler.running_batch else []

    def slots(self, request, start=0, stop=None):
        """Return the slots of a running request."""
        row = self.scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        return row[start : request.kv.kv_allocated_len if stop is None else stop]

    def _ingest(self, **options):
        self.iteration += 1
        if self.iteration > 10_000:
            raise TimeoutError("the requests do not end")
        for name, chat in list(self.live.items()):
            request = self.requests.get(name)
            if request is not None and (request.finished() or self._is_gone(request)):
                del self.live[name]
                self.outputs.append((chat, list(request.output_ids)))
                self.work.answered(chat, request.output_ids)
        if not self.live and not self.waiting:
            found = self.work.round()
            if found is None:
                self.scheduler.gracefully_exit = self.scheduler.is_fully_idle()
            else:
                self.waiting = found
        inputs = []
        if self.waiting:
            chat, tokens = self.waiting.pop(0)
            name = f"chat-{chat}-{self.iteration}"
            self.live[name] = chat
            inputs.append(self._input(name, tokens, chat))
            if self.work.aborts and len(self.waiting) in (1, 3):
                self.abort = name, self.iteration + self.work.random.randrange(10)
        if self.abort and self.iteration >= self.abort[1]:
            inputs.append(self._abort_of(self.abort[0]))
            self.abort = None
        self.scheduler.process_input_requests(inputs)
        return inputs

    def _is_gone(self, request):
        return request not in self._all()

    def _all(self):
        inner = self.scheduler
        batches = [inner.running_batch, inner.cur_batch_for_debug, inner.last_batch]
        found = [request for batch in batches if batch for request in batch.reqs]
        return [*found, *inner.waiting_queue, *([inner.chunked_req] if inner.chunked_req else [])]

    def _input(self, name, tokens, chat):
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        # With `ignore_eos`, SGLang would reserve slots for all tokens to be generated.
        sampling = SamplingParams(max_new_tokens=self.work.new_tokens, temperature=0)
        sampling.normalize(None)
        return TokenizedGenerateReqInput(
            **{"rid": name, "input_text": None, "input_ids": array("q", tokens)},
            **{"input_embeds": None, "mm_inputs": None, "token_type_ids": None},
            **{"sampling_params": sampling, "return_logprob": False, "logprob_start_len": -1},
            **{"top_logprobs_num": 0, "token_ids_logprob": None, "stream": False},
            extra_key=f"key-{chat}" if self.work.keys else None,
        )

    def _abort_of(self, name):
        from sglang.srt.managers.io_struct import AbortReq

        return AbortReq(rid=name)

    def results(self):
        """Return outputs, counts, the error and the sanitizer's findings."""
        observer = getattr(self.scheduler, "kvcache_sanitizer", None)
        reports = [] if observer is None else observer.sanitizer.reports
        requests = self.requests.values()
        return {
            "outputs": self.outputs,
            "requests": len(requests),
            "cached_tokens": sum(each.cached_tokens for each in requests),
            "retractions": sum(each.retraction_count for each in requests),
            "aborts": sum(map(_is_aborted, requests)),
            "planted_at": self.planted_at,
            "error": self.error,
            "failed_at": self.failed_at,
            "findings": None if observer is None else observer.findings(),
            "found": [(str(each.kind), each.step) for each in reports],
        }


def _is_aborted(request):
    """Return whether a request was aborted. Waiting requests are dropped without a finish reason."""
    return not request.finished() or type(request.finished_reason).__name__ == "FINISH_ABORT"


def in_a_process(module, *arguments, **settings):
    """Run a module with the sanitizer enabled. Return the JSON in the last line of its output."""
    return run_module(module, *arguments, **{"KVCACHE_SANITIZE": "1", **settings})


if __name__ == "__main__":
    options, works = map(json.loads, sys.argv[1:])
    scheduler = Scheduler(**options)
    print(json.dumps([scheduler.run(work) for work in works]))
