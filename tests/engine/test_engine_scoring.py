"""The scorer's log-probs are those of a plain forward pass."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_models import FAMILIES, VOCABULARY, make_prompt, make_tiny_model, make_weights_of, plain_log_probs

from tba.engine.make_engine import make_scorer
from tba.engine.native.engine import NativeEngine
from tba.engine.scoring import ReferenceScorer, packed_batches


def make_pairs(num_prompts=4, samples=3):
    rng = np.random.default_rng(0)
    prompts = [make_prompt(f"p{index}", length).token_ids for index, length in enumerate([1, 9, 4, 17][:num_prompts])]
    pairs = [
        (prompt, rng.integers(0, VOCABULARY, size=rng.integers(1, 25))) for prompt in prompts for _ in range(samples)
    ]
    order = rng.permutation(len(pairs))
    return [pairs[index][0] for index in order], [pairs[index][1] for index in order]


@pytest.mark.parametrize(("family", "token_budget"), [("llama", 30), *((family, 8192) for family in FAMILIES)])
def test_scores_equal_a_plain_forward_pass(family, token_budget):
    model = make_tiny_model(family)
    prompts, responses = make_pairs()
    scorer = ReferenceScorer(model, max_length=64, token_budget=token_budget)
    found = scorer.score(prompts, responses, 0.7)
    for prompt, response, scores in zip(prompts, responses, found):
        assert scores.dtype == np.float32
        np.testing.assert_allclose(scores, plain_log_probs(model, prompt, response, temperature=0.7), atol=1e-4)


def test_responses_of_a_prompt_share_one_pass_over_it():
    scorer = ReferenceScorer(make_tiny_model("llama"), max_length=64)
    tokens, hidden = [], scorer.decoder.hidden
    scorer.decoder.hidden = lambda ids, *rest: (tokens.append(len(ids)), hidden(ids, *rest))[1]
    prompt = make_prompt("p", 21).token_ids
    scorer.score([prompt] * 5, [np.arange(8) + index for index in range(5)], 1.0)
    assert tokens == [21 + 5 * 8 - 5]  # no response's last token is read


def test_batches_keep_the_budget_and_leave_nothing_out():
    first, second = np.zeros(4), np.zeros(2)
    prompts, responses = [first, second, first, first, second, second], [np.zeros(n) for n in (3, 0, 3, 5, 20, 1)]
    # 4 + 3 + 3 = 10, 4 + 5 = 9, then 2 + 20 alone, and 2 + 1
    assert list(packed_batches(prompts, responses, token_budget=12)) == [[[0, 2]], [[3]], [[4]], [[5]]]
    assert list(packed_batches(prompts, responses, token_budget=99)) == [[[0, 2, 3], [4, 5]]]


def test_an_empty_response_has_no_scores():
    scorer = ReferenceScorer(make_tiny_model("llama"), max_length=64)
    prompt = make_prompt("p", 4).token_ids
    empty, full = scorer.score([prompt, prompt], [np.zeros(0, np.int32), np.array([5, 6])], 1.0)
    assert empty.shape == (0,)
    assert full.shape == (2,)


def test_a_scorer_can_use_an_engines_decoder_and_take_another_reference():
    old, new = make_tiny_model("llama", seed=0), make_tiny_model("llama", seed=1)
    engine = NativeEngine(old, stop_ids=[2], seed=0, slots=2, max_length=64)
    prompts, responses = make_pairs(2, 2)
    scorer = ReferenceScorer(engine.decoder)
    np.testing.assert_allclose(
        scorer.score(prompts, responses, 1.0)[0], plain_log_probs(old, prompts[0], responses[0]), atol=1e-4
    )
    scorer.load(make_weights_of(new, 1))
    np.testing.assert_allclose(
        scorer.score(prompts, responses, 1.0)[0], plain_log_probs(new, prompts[0], responses[0]), atol=1e-4
    )


def test_a_scorer_keeps_its_own_copy_of_the_model():
    model = make_tiny_model("llama")
    scorer = make_scorer(model, max_length=64)
    prompts, responses = make_pairs(1, 1)
    before = scorer.score(prompts, responses, 1.0)[0]
    for parameter in model.parameters():
        parameter.data.zero_()
    np.testing.assert_array_equal(scorer.score(prompts, responses, 1.0)[0], before)
