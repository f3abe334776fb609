# SPDX-License-Identifier: Apache-2.0
"""Runs tiny models in vLLM with several schedulers in one process, and records the results of their
requests.

`python -m tests.machinery.vllm_models '{"model": FOLDER, ...}'` prints the results as JSON in the
last line of its output.
"""

import gc
import json
import random
import sys
import zlib

from kvcache.allocator import check_invariants
from tests.machinery import vllm_schedulers  # noqa: F401  sets environment variables
from tests.machinery.engine_process import run_module
from tests.machinery.vllm_schedulers import TINY, TINY_LLAMA
from tests.machinery.vllm_weights import (
    convolve_accepted_drafts,
    fill_at_random,
    without_checkpoints,
)

MODELS = {
    "llama": TINY_LLAMA,
    "qwen3": {**TINY_LLAMA, **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}},
    "gemma3": {**TINY, **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"},
        **{"num_hidden_layers": 6, "query_pre_attn_scalar": 32},
        **{"sliding_window": 128, "hidden_activation": "gelu_pytorch_tanh"},
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    # vLLM's CPU kernel supports only latent vectors with 512 elements and a rotary part of 64
    # elements.
    "deepseek_v3": {**{key: value for key, value in TINY_LLAMA.items() if key != "head_dim"},
        **{"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
        **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 512},
        **{"qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32},
        **{"first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2},
        **{"n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1},
        **{"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        **{"routed_scaling_factor": 1.0, "rope_theta": 10000.0}},
    "granite4": {**{**TINY_LLAMA, "hidden_size": 128, "num_hidden_layers": 4},
        **{"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid"},
        **{"layer_types": ["mamba", "attention"] * 2, "shared_intermediate_size": 128},
        **{"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_d_head": 32},
        **{"mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 32},
        **{"mamba_conv_bias": True, "mamba_proj_bias": False, "num_local_experts": 0},
        **{"num_experts_per_tok": 0, "position_embedding_type": "rope"},
        **{"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0},
        "attention_multiplier": 0.17},
    # Layers with and without windows alternate, and logits are soft-capped.
    "gemma2": {**{**TINY, "num_hidden_layers": 4, "tie_word_embeddings": True},
        **{"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"},
        **{"query_pre_attn_scalar": 32, "hidden_activation": "gelu_pytorch_tanh"},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **{"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2}},
    # Each head has an attention sink, a logit that takes part in the softmax but has no value.
    "gpt_oss": {
        **{**TINY, "num_hidden_layers": 4, "tie_word_embeddings": False},
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True},
        **{"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"hidden_act": "silu", "swiglu_limit": 7.0, "rope_theta": 150000.0},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"truncate": False, "original_max_position_embeddings": 1024},
        },
    },
    # All layers have windows.
    "mistral": {**{**TINY_LLAMA, "sliding_window": 128, "hidden_act": "silu"},
        **{"architectures": ["MistralForCausalLM"], "model_type": "mistral"}},
    "olmo2":
        {**{**TINY_LLAMA, "num_key_value_heads": 4, "attention_bias": False, "hidden_act": "silu"},
        **{"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}},
    "phi3": {**{**TINY_LLAMA, "original_max_position_embeddings": 4096, "hidden_act": "silu"},
        **{"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0}},
}  # fmt: skip
FEW = 12  # number of requests in a tight pool for models that run only a few requests
# Options of vLLM's `LLM`. Each pool can hold at most 3 of the 16 requests in a batch.
OPTIONS = {
    "llama": {"num_gpu_blocks_override": 40},
    "qwen3": {"num_gpu_blocks_override": 40},
    "gemma3": {"num_gpu_blocks_override": 160},
    "deepseek_v3": {
        **{"num_gpu_blocks_override": 80, "block_size": 16, "max_num_batched_tokens": 1024},
        "attention_config": {"backend": "CPU_MLA"},
    },
    "granite4": {"num_gpu_blocks_override": 40},
    "gemma2": {"num_gpu_blocks_override": 50},
    "gpt_oss": {"num_gpu_blocks_override": 50},
    "mistral": {"num_gpu_blocks_override": 20},
    "olmo2": {"num_gpu_blocks_override": 40},
    "phi3": {"num_gpu_blocks_override": 40},
}
OURS = "kvcache_vllm."
DRAFTS = {
    "speculative_config": {**{"method": "ngram", "num_speculative_tokens": 3},
        **{"prompt_lookup_max": 3, "prompt_lookup_min": 1}},
}  # fmt: skip
ENGINES = {
    "vllm": {"async_scheduling": False},
    "ours": {"async_scheduling": False, "scheduler_cls": OURS + "VllmScheduler"},
    "vllm async": {"async_scheduling": True},
    "ours async": {"async_scheduling": True, "scheduler_cls": OURS + "VllmAsyncScheduler"},
    "vllm drafts": {"async_scheduling": False, **DRAFTS},
    "ours drafts": {"async_scheduling": False, "scheduler_cls": OURS + "VllmScheduler", **DRAFTS},
}
# The drafts are the tokens that the first engine generated, some of them replaced.
ENGINES |= {f"{name} known": ENGINES[name] for name in ("vllm drafts", "ours drafts")}
# The states in which eight consecutive requests are aborted; None means that a request is not
# aborted.
ABORTED_AS = ("waiting", "prompt", "running", *["preempted"] * 4, None)


def write_config(folder, name):
    """Create a folder with the configuration of a tiny model, and return its path."""
    (folder / "config.json").write_text(json.dumps(MODELS[name]))
    return str(folder)


def behaviours(model, engines, *, is_short=False, **options):
    """Run the requests in a separate process.

    Return the results, keyed by engine. `options` are passed to vLLM's `LLM`. With `is_short`, only
    a few requests run, in the large and the tight pool.
    """
    given = {"model": model, "engines": engines, "options": options, "is_short": is_short}
    return run_module(__name__, json.dumps(given), timeout_s=1500)


def run(model, engines, options, is_short=False):
    """Run the requests in this process, and return the results, keyed by engine."""
    from vllm import LLM

    fill_at_random()
    without_checkpoints()
    convolve_accepted_drafts()
    if "kv_transfer_config" in options:
        from tests.machinery.vllm_cpu_offload import run_on_cpu

        run_on_cpu()
    defaults = {
        **{"load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "seed": 0},
        **{"dtype": "float32", "max_model_len": 1024, "block_size": 32, "max_num_seqs": 16},
        **{"max_num_batched_tokens": 256, "disable_log_stats": False},
        **{"prefix_caching_hash_algo": "sha256_cbor"},
    }
    found, known = {}, {}
    for name in engines:
        if "known" in name:
            draft_from(known)
        llm = LLM(model, **defaults | options | ENGINES[name])
        requests = Requests(llm)
        found[name] = requests.all(has_drafts="drafts" in name, is_short=is_short)
        known = known or requests.next_tokens
        llm.llm_engine.engine_core.shutdown()
        llm = None
        make_room()
    return found


def draft_from(known):
    """Make vLLM's n-gram drafter propose the tokens in `known`, keyed by all tokens before them. Some
    are replaced by other tokens, so that any number of drafts is accepted.
    """
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    def propose(self, num_requests, valid, num_tokens, token_ids, num_drafts):
        drafts = [[] for _ in range(num_requests)]
        for row in valid:
            tokens = token_ids[row, : num_tokens[row]].tolist()
            for _ in range(num_drafts if len(tokens) % 5 else 0):
                if (token := known.get(tuple(tokens))) is None:
                    break
                is_wrong = zlib.crc32(str(tokens[-3:]).encode()) % 4 == 0
                drafts[row].append(token ^ 1 if is_wrong else token)
                tokens.append(token)
        return drafts

    NgramProposer.batch_propose = propose


def make_room():
    """Clean up after an engine, so that another one can start in this process."""
    from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.triton_utils import dispatcher

    ensure_kv_transfer_shutdown()  # needed if an engine failed while starting
    # The original function fails if it is called a second time in a process.
    dispatcher.register_kernels = lambda kernels: None
    # Without this call, destroying the old engine later would also destroy the process groups of
    # the next engine.
    gc.collect()
    cleanup_dist_env_and_memory()


class Requests:
    """Generates the same requests for every engine."""

    def __init__(self, llm):
        self.llm, self.engine = llm, llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.numbers = iter(range(10**6))
        self.last = {}
        self.next_tokens = {}  # tokens of a prompt and its answer so far -> next token

    def all(self, has_drafts, is_short):
        rng = random.Random(1)
        shared = [tokens(rng, 200) for _ in range(3)]
        heads = [rng.choice(shared)[: rng.randrange(200)] for _ in range(FEW if is_short else 24)]
        requests = [
            (head + tokens(rng, rng.randrange(50, 250)), rng.randrange(16, 48)) for head in heads
        ]
        found = {"manager": type(self.scheduler.kv_cache_manager).__name__}
        found["roomy"] = self.roomy(rng)
        found["tight"] = self.told(lambda: self.generate(requests))
        if self.scheduler.connector is not None:  # all hits are loaded by the connector
            found["is_reset for loads"] = self.llm.reset_prefix_cache()
            found["loads"] = self.told(lambda: self.generate(requests))
        if not is_short:
            if not has_drafts:  # with drafts, sampling depends on the drafts
                found["samples"] = self.samples(rng)
            found["aborts"] = self.aborts(requests)
            found["resets"] = self.resets(requests)
        native = getattr(self.scheduler.kv_cache_manager, "native", None)
        if native is not None:
            check_invariants(native)
        found["usage"] = self.scheduler.kv_cache_manager.usage
        found["is_reset"] = self.llm.reset_prefix_cache()
        return found

    def told(self, work):
        """Run `work`. Return its result and the changes in vLLM's counters."""
        before = self.counters()
        answers = work()
        return {
            "answers": answers,
            **{name: value - before[name] for name, value in self.counters().items()},
        }

    def counters(self):
        names = {
            "vllm:num_preemptions": "preemptions",
            "vllm:prefix_cache_hits": "hits",
            "vllm:external_prefix_cache_hits": "external hits",
            "vllm:spec_decode_num_draft_tokens": "drafts",
            "vllm:spec_decode_num_accepted_tokens": "accepted",
        }
        values = dict.fromkeys(names.values(), 0)
        for metric in self.llm.get_metrics():
            if metric.name in names:
                values[names[metric.name]] += metric.value
        return values

    def generate(self, requests, **sampling):
        outputs = self.llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests],
            [params(max_tokens, **sampling) for _, max_tokens in requests],
            use_tqdm=False,
        )
        answers = [[list(each.token_ids) for each in output.outputs] for output in outputs]
        if not sampling:
            for (prompt, _), [answer] in zip(requests, answers):
                for place, token in enumerate(answer):
                    self.next_tokens[(*prompt, *answer[:place])] = token
        return answers

    def roomy(self, rng):
        """Run a few short requests twice. The second time, they have hits.

        Two of them differ only in their first half.
        """
        tail = tokens(rng, 50)
        requests = [(tokens(rng, 50) + tail, 20) for _ in range(2)] + [(tokens(rng, 150), 20)]
        return self.told(lambda: [self.generate(requests), self.generate(requests)])

    def samples(self, rng):
        """Draw several samples of each prompt.

        vLLM's CPU build cannot sample with a seed if a prompt is computed in chunks, so all prompts
        fit into a step and into the pool.
        """
        requests = [(tokens(rng, rng.randrange(8, 20)), 60) for _ in range(2)]
        return self.told(lambda: self.generate(requests, n=3, temperature=1.0, seed=7))

    def aborts(self, requests):
        """Abort some requests as soon as they are in a given state.

        Return the tokens of all requests, and the number of aborted requests per state.
        """
        counts = {}

        def abort(step):
            for request in list(self.scheduler.requests.values()):
                number = self.number_of(request)
                wanted = ABORTED_AS[number % len(ABORTED_AS)]
                if step and state_of(request) == wanted and not self.last[number]["ended"]:
                    counts[wanted] = counts.get(wanted, 0) + 1
                    self.last[number]["ended"] = "aborted"
                    self.engine.abort_request([f"r{self.first + number}"])

        return {"requests": self.steps(requests, abort), "aborted": counts}

    def resets(self, requests):
        """Reset the cache while requests are running, with and without preempting them, and after
        they have finished.
        """
        answers = []

        def reset(step):
            if step == 4:
                answers.append(self.llm.reset_prefix_cache())
            elif step in (8, 16, 17):
                answers.append(self.llm.reset_prefix_cache(reset_running_requests=True))

        found = {"requests": self.steps(requests, reset), "answers": answers}
        answers.append(self.llm.reset_prefix_cache())
        found["again"] = self.told(lambda: self.generate(requests[:2]))
        return found

    def steps(self, requests, between):
        """Run requests step by step, and return their tokens.

        `between` is called before each step with the number of the step.
        """
        self.first = next(self.numbers)
        self.last = [{"tokens": [], "ended": None} for _ in requests]
        for number, (prompt, max_tokens) in enumerate(requests):
            name = f"r{self.first + number}"
            self.engine.add_request(name, {"prompt_token_ids": prompt}, params(max_tokens))
        for _ in requests:
            next(self.numbers)
        step = 0
        while self.engine.has_unfinished_requests():
            between(step)
            for output in self.engine.step():
                entry = self.last[int(output.request_id[1:]) - self.first]
                if entry["ended"] != "aborted":
                    entry["tokens"] = list(output.outputs[0].token_ids)
                    entry["ended"] = "finished" if output.finished else None
            step += 1
        while self.scheduler.has_requests():  # steps with aborted requests only
            self.engine.engine_core.get_output()
        return self.last

    def number_of(self, request):
        return int(request.request_id.partition("-")[0][1:]) - self.first


def tokens(rng, count):
    return [rng.randrange(3, 512) for _ in range(count)]


def params(max_tokens, **sampling):
    from vllm import SamplingParams

    options = {"temperature": 0, "ignore_eos": True, "detokenize": False, **sampling}
    return SamplingParams(max_tokens=max_tokens, **options)


def state_of(request):
    """Return the state of a scheduler's request: waiting, prompt, running or preempted."""
    name = request.status.name
    if name != "RUNNING":
        return name.lower()
    if request.num_output_tokens:
        return "running"
    return "prompt" if 0 < request.num_computed_tokens < request.num_prompt_tokens else None


if __name__ == "__main__":
    print(json.dumps(run(**json.loads(sys.argv[1]))))
