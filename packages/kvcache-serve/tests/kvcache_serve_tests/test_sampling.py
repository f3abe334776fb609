# SPDX-License-Identifier: Apache-2.0
"""Choosing the next token from logits: sampling and drafts, tested without a model."""

import numpy as np
import pytest
import torch

from kvcache import Request
from kvcache_serve.engine import NgramDrafter, SamplingParams
from kvcache_serve.engine.sampling import Sampler, most_likely, penalize_repetition, token_logprob

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0, 2.5])


def drawn(count=2_000, **options):
    """Draw many tokens and return the frequency of each."""
    sampler = Sampler(SamplingParams(**({"temperature": 1.0, "seed": 1} | options)), 0)
    tokens = [sampler.token(LOGITS) for _ in range(count)]
    return np.bincount(tokens, minlength=len(LOGITS)) / count


class TestMostLikely:
    @pytest.mark.parametrize(
        "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
    )
    def test_softmax_and_greedy_tokens_match_torch(self, dtype):
        logits = torch.randn(7, 300, generator=torch.Generator().manual_seed(3)).to(dtype)
        logits[2] = 1.5  # among equal logits, the first is chosen
        largest, best = logits.max(-1)
        found = most_likely(logits)
        assert found[0].tolist() == best.tolist() and found[1].tolist() == largest.tolist()
        strided = logits.T.contiguous().T
        assert most_likely(strided)[0].tolist() == best.tolist()
        assert [len(each) for each in most_likely(logits[:0])] == [0, 0]

    def test_returned_logit_shows_whether_all_logits_are_finite(self):
        nan, inf = float("nan"), float("inf")
        logits = torch.tensor(
            [[0, nan, inf], [inf, 5, nan], [-inf] * 3, [-inf, 2, -inf], [0, inf, 1]]
        )
        assert np.isfinite(most_likely(logits)[1]).tolist() == [False, False, False, True, False]

    def test_float64_is_not_rounded(self):
        logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
        assert most_likely(logits)[0].tolist() == [1]


class TestSampler:
    @pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
    def test_token_frequencies_match_their_weights(self, temperature):
        wanted = (LOGITS / temperature).softmax(-1).numpy()
        assert np.abs(drawn(temperature=temperature) - wanted).max() < 0.04

    def test_top_k_keeps_the_most_likely_tokens(self):
        assert drawn(top_k=1).tolist() == [0, 1, 0, 0, 0, 0]
        found = drawn(top_k=3)
        assert set(np.flatnonzero(found)) == {1, 3, 5}
        wanted = LOGITS[[1, 3, 5]].softmax(-1).numpy()
        assert np.abs(found[[1, 3, 5]] - wanted).max() < 0.04
        assert np.count_nonzero(drawn(top_k=100, temperature=9.0)) == 6

    def test_top_k_counts_equal_logits(self):
        """If logits are equal, those with the lowest token ids are kept, as in greedy sampling."""
        logits = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 3.0])
        for top_k in (1, 2, 3):
            sampler = Sampler(SamplingParams(temperature=1.0, seed=1, top_k=top_k), 0)
            assert {sampler.token(logits) for _ in range(200)} == set([1, 2, 4][:top_k])

    def test_top_p_keeps_the_fewest_tokens_that_reach_it(self):
        weights = LOGITS.softmax(-1)  # tokens 1, 5 and 3 have probabilities 0.46, 0.28 and 0.17
        assert set(np.flatnonzero(drawn(top_p=0.4))) == {1}
        assert set(np.flatnonzero(drawn(top_p=float(weights[1]) + 0.01))) == {1, 5}
        assert set(np.flatnonzero(drawn(top_p=0.9))) == {1, 5, 3}

    def test_samples_of_a_request_and_adjacent_seeds_differ(self):
        def tokens(seed, nth):
            sampler = Sampler(SamplingParams(temperature=2.0, seed=seed), nth)
            return tuple(sampler.token(LOGITS) for _ in range(40))

        courses = {(seed, nth): tokens(seed, nth) for seed in range(4) for nth in range(4)}
        assert len(set(courses.values())) == 16
        assert courses[2, 3] == tokens(2, 3)


class TestNgramDrafter:
    @staticmethod
    def plain(tokens, num_tokens, longest, shortest):
        for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
            tail = tokens[-size:]
            for at in range(len(tokens) - 1 - size, -1, -1):
                if tokens[at : at + size] == tail:
                    return tokens[at + size : at + size + num_tokens]
        return []

    @pytest.mark.parametrize("alphabet", [[1, 2], [0, 1, 256, 65_536, 16_777_216]])
    def test_ngram_drafter_matches_a_plain_search(self, alphabet):
        """Some tokens are chosen so that their bytes also match across token boundaries."""
        rng = np.random.default_rng(0)
        drafter = NgramDrafter(3, longest=3, shortest=1)
        num_found = 0
        for _ in range(500):
            tokens = rng.choice(alphabet, rng.integers(1, 20)).tolist()
            found = drafter(Request("r", tokens))
            assert found == self.plain(tokens, 3, 3, 1), tokens
            num_found += bool(found)
        assert num_found > 250


class TestLogprobs:
    def test_log_probabilities_equal_a_log_softmax(self):
        found = token_logprob(LOGITS.to(torch.float16), 2, 3)
        wanted = LOGITS.double().log_softmax(-1)
        assert found.logprob == pytest.approx(wanted[2].item())
        assert [token for token, _ in found.top] == [1, 5, 3]
        assert [value for _, value in found.top] == pytest.approx(wanted[[1, 5, 3]].tolist())

    def test_log_probabilities_are_limited_to_the_vocabulary(self):
        assert token_logprob(LOGITS, 0, 0).top == []
        assert len(token_logprob(LOGITS, 0, 100).top) == len(LOGITS)


class TestRepetitionPenalty:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    def test_repetition_penalty_divides_positive_and_multiplies_negative_logits(self, dtype):
        logits = LOGITS.to(dtype)
        found = penalize_repetition(logits, [1, 1, 4], 2.0)
        assert found.tolist() == [0.0, 1.5, 1.0, 2.0, -2.0, 2.5]
        assert logits.tolist() == LOGITS.tolist()  # the input is unchanged

    @pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0, 100.0])
    def test_tiny_and_huge_penalties_leave_valid_tokens(self, temperature):
        sampler = Sampler(SamplingParams(temperature=temperature, seed=1), 0)
        for penalty, possible in ((5e-324, {1, 2}), (1e308, {0, 1, 2, 3, 5})):
            logits = penalize_repetition(LOGITS, [1, 2, 4], penalty)
            assert {sampler.token(logits) for _ in range(50)} <= possible

    @pytest.mark.parametrize("options,expected", [
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0: expected a finite number above 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty is inf: expected a finite"),
        ({"logprobs": -1}, "logprobs is -1: expected 0 to 2147483647"),
    ])  # fmt: skip
    def test_invalid_parameters_are_rejected(self, options, expected):
        with pytest.raises(ValueError) as told:
            SamplingParams(**options)
        assert str(told.value).startswith(expected)
