# SPDX-License-Identifier: Apache-2.0
"""`attach` verifies that a model gives the same answers with a paged cache as with its own cache,
and otherwise rejects the model.
"""

import logging

import pytest
import torch

# Skip the file before it imports modules that need transformers.
pytest.importorskip("transformers")

from transformers import T5Config, T5ForConditionalGeneration

from kvcache_serve.engine import Engine, SamplingParams
from kvcache_serve.engine.transformers import UnsupportedModel, attach, layer_places
from kvcache_serve.engine.transformers import attention as paged_attention
from kvcache_serve.engine.transformers.layer_shapes import FilledCache, model_shape
from kvcache_serve.engine.transformers.layer_states import LayerStates
from kvcache_serve.engine.transformers.self_check import SelfCheck
from kvcache_serve.engine.transformers.tiny_models import tiny_model, tiny_model_names
from tests.machinery.architectures import judge, prompts
from tests.machinery.dense_models import greedy
from tests.machinery.shared import sampled
from tests.machinery.tiny_architectures import VOCAB_SIZE, architectures, tiny_architecture

logging.getLogger("transformers").setLevel(logging.ERROR)


def answers_of(model, lines, max_tokens=12):
    """Return the answer of the model's own `generate` to each prompt."""
    return [greedy(model, line, max_tokens) for line in lines]


def served(paged, lines, max_tokens=12, **options):
    """Return an engine's answers to all prompts in one batch."""
    found = Engine(paged, **options).generate(lines, SamplingParams(max_tokens=max_tokens))
    return [each.samples[0].token_ids for each in found]


def test_integers_hold_no_kv_without_a_format():
    with pytest.raises(
        ValueError, match=r"kv_cache_dtype is 'int8': expected one of .*int8_token_head"
    ):
        attach(tiny_model("llama"), "1MiB", max_model_len=128, kv_cache_dtype="int8")


# Each model covers one mechanism: states next to K and V, states without K and V, both in one
# module, learned positions, positions counted by the cache, biases, local layers in float32, or K
# and V that are attended to twice.
@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type,is_batched",
    sampled(
        [
            *(("jamba", True), ("bart", False), ("gpt2", True), ("falcon", False), ("opt", True)),
            *(("bert", True), ("nemotron_h", True), ("mamba", True), ("diffllama", True)),
            *(("gpt_neo", False), ("mpt", False), ("bloom", False), ("zaya", False)),
        ],
        2,
    ),
)
def test_answers_of_all_architectures_equal_generate(model_type, is_batched):
    verdict = judge(model_type)
    assert (verdict.answer, verdict.is_batched) == ("right", is_batched), verdict.reason
    assert bool(verdict.reason) != is_batched


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", architectures())
def test_every_architecture_is_correct_or_rejected_by_name(model_type):
    verdict = judge(model_type)
    assert verdict.answer in ("right", "refused", "not built"), verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize("dtype", sampled([torch.bfloat16, torch.float16, torch.float32]))
@pytest.mark.parametrize("name", tiny_model_names())
def test_rounding_differences_are_tolerated(name, dtype):
    paged = attach(tiny_model(name, dtype=dtype), "4MiB", max_model_len=96)
    assert not paged.by_request
    paged.detach()


@pytest.mark.slow
@pytest.mark.parametrize("model_type,fields,says", [
    (
        "bert",
        {"is_decoder": False},
        r"at position 0 of request 0 .*, first in bert.encoder.layer.0: .* later tokens",
    ),
    (
        "recurrent_gemma",
        {},
        r"at position 11 of request 0 \(positions 11 to 21 in one step\) .* first in model.layers.0",
    ),
    ("deepseek_v32", {}, "layer 0 keeps a DynamicIndexedLayer, which holds more than K, V"),
    ("rwkv", {}, "none of its layers stores anything in the cache"),
    ("prophetnet", {}, "request by request: AssertionError: At the moment"),
])  # fmt: skip
def test_model_with_different_answers_is_rejected(model_type, fields, says):
    model = tiny_architecture(model_type, **fields)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=says) as caught:
        attach(model, "8MiB", max_model_len=96)
    assert f"model is a {type(model).__name__}, which cannot be served: " in str(caught.value)
    assert model.config._attn_implementation == before
    assert not any("forward" in vars(module) for module in model.modules())


def test_rejection_states_the_difference_and_the_tolerance():
    model = tiny_architecture("bert", is_decoder=False)
    with pytest.raises(
        UnsupportedModel,
        match=r"logits differ from the dense logits by \S+ \(tolerance \S+\): .*check=False",
    ):
        attach(model, "8MiB", max_model_len=96)
    attach(model, "8MiB", max_model_len=96, check=False).detach()


def test_encoder_decoder_is_rejected():
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCAB_SIZE)
    with pytest.raises(UnsupportedModel, match="each layer reads an encoder's output"):
        attach(T5ForConditionalGeneration(config).eval(), "8MiB", max_model_len=96)


class TestRopeThatDependsOnTheLength:
    """Requests may be as long as the short RoPE factors allow. Longer requests are rejected,
    because the factors would change during a request.
    """

    @pytest.fixture
    def model(self):
        factors = [1.0, 1.5]
        rope = {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": factors,
            "long_factor": [16 * factor for factor in factors],
            "original_max_position_embeddings": 80,
        }
        return tiny_architecture(
            "phi3",
            rope_parameters=rope,
            original_max_position_embeddings=80,
            hidden_size=16,
            partial_rotary_factor=1.0,
        )

    def test_requests_within_the_short_factors_are_correct(self, model):
        paged = attach(model, "4MiB")
        assert paged.cache.plan.max_model_len == 80
        assert served(paged, prompts()) == answers_of(model, prompts())
        paged.detach()

    def test_longer_requests_are_rejected(self, model):
        with pytest.raises(
            ValueError, match=r"max_model_len is 96: expected at most 80, .* longrope"
        ):
            attach(model, "4MiB", max_model_len=96)


class TestTrainingMode:
    """A model in training mode must not be served, because dropout would change the answers and the
    cached KV.
    """

    def test_model_in_training_mode_is_rejected(self):
        model = tiny_model("llama")
        next(model.children()).train()
        with pytest.raises(
            ValueError, match=r"^model is in training mode: expected model.eval\(\)"
        ):
            attach(model, "4MiB", max_model_len=96)
        assert next(model.children()).training and not model.training

    def test_no_step_runs_in_training_mode(self):
        engine = Engine(attach(tiny_model("llama"), "4MiB", max_model_len=96))
        engine.add([1, 2, 3], SamplingParams(max_tokens=2))
        engine.model.model.train()
        with pytest.raises(RuntimeError, match=r"in training mode: expected model.eval\(\)"):
            engine.step()
        engine.model.model.eval()
        while engine.num_unfinished:
            engine.step()


class TestTheCheckLeavesNoTrace:
    @pytest.mark.slow
    @pytest.mark.parametrize("model_type", ["llama", "jamba", "gpt_neo"])
    def test_attach_restores_generators_flags_and_modules(self, model_type):
        model = tiny_architecture(model_type)
        generator = torch.random.get_rng_state()
        attention = model.config._attn_implementation
        attach(model, "8MiB", max_model_len=96).detach()
        assert not any(module.training for module in model.modules())
        assert torch.equal(torch.random.get_rng_state(), generator)
        assert model.config._attn_implementation == attention
        assert not any("forward" in vars(module) for module in model.modules())


class TestDefectsAreNoticed:
    """Each test plants a defect in the code that computes a batch, which the self-check must detect."""

    def test_missing_mask_is_detected(self, monkeypatch):
        parts_of = paged_attention.parts_of

        def without(batch, group):
            slots, parts = parts_of(batch, group)
            return paged_attention.Parts(slots, [part._replace(mask=None) for part in parts])

        monkeypatch.setattr("kvcache_serve.engine.transformers.paged_cache.parts_of", without)
        paged = attach(tiny_model("llama"), "4MiB", max_model_len=96)
        assert paged.by_request and "logits differ from" in paged.why_by_request
        paged.detach()

    @pytest.mark.slow
    @pytest.mark.parametrize("name", sampled(["llama", "bamba", "gemma3", "deepseek_v3"], 2))
    def test_slots_of_other_tokens_are_detected(self, monkeypatch, name):
        read = layer_places.Place.read
        monkeypatch.setattr(
            layer_places.Place, "read", lambda self, slots, key: read(self, slots.roll(1), key)
        )
        with pytest.raises(UnsupportedModel, match="logits differ from"):
            attach(tiny_model(name), "4MiB", max_model_len=96)

    @pytest.mark.slow
    def test_state_that_is_not_stored_is_detected(self, monkeypatch):
        monkeypatch.setattr(LayerStates, "store", lambda *_: None)
        with pytest.raises(UnsupportedModel, match="tokens of earlier steps"):
            attach(tiny_model("bamba"), "4MiB", max_model_len=96)

    def test_error_names_a_single_wrong_token(self):
        model = tiny_model("llama", dtype=torch.float64)
        shape = model_shape(model, FilledCache(model), 16, None, 0)
        check = SelfCheck(model, shape, 96)
        with torch.inference_mode():
            check.compute_dense()

        class Wrong:
            """Returns the model's own logits, except for token 13 of request 0, whose logits are
            far off.
            """

            def forward(self, batch):
                dense = [
                    check.dense[row][start : start + count]
                    for row, start, count in zip(batch.rows, batch.starts, batch.query_lens)
                ]
                logits = torch.cat(dense).clone()
                if batch.rows[0] == 0 and batch.starts[0] == 11:
                    logits[2, 5] += 3
                return logits

        found = check.difference(Wrong(), check.cache())
        assert (found.request, found.position, found.chunk) == (0, 13, (11, 22))
        assert found.largest == pytest.approx(3)

    def test_self_check_covers_chunks_windows_and_mixed_batches(self):
        model = tiny_model("gemma3")
        check = SelfCheck(model, model_shape(model, FilledCache(model), 16, None, 0), 96)
        cache = check.cache()

        class Nothing:
            def forward(self, batch):
                return torch.zeros(batch.num_tokens, 512)

        steps = [(batch.starts, batch.query_lens) for batch, _, _ in check.run(Nothing(), cache)]
        assert any((starts > 0)[lengths > 1].any() for starts, lengths in steps)
        assert any(len(set(lengths.tolist())) > 1 for _, lengths in steps)
        assert any((starts + lengths > 24).any() and len(starts) > 1 for starts, lengths in steps)
        assert cache.manager.pool.num_free == cache.manager.pool.num_total


def test_unsupported_attention_is_served_request_by_request_without_the_check():
    """Only the numerical check is skipped: the structural check still applies to models that are
    served request by request.
    """
    paged = attach(tiny_architecture("gpt_neo"), "8MiB", max_model_len=96, check=False)
    assert paged.by_request and "do not attend through" in paged.why_by_request
    paged.detach()
