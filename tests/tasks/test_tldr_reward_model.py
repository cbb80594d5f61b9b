"""Reward models: pooling, padding, saving, and classifiers of others."""

import json

import numpy as np
import pytest
import torch
from builders import VOCABULARY, tiny_llama, tiny_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from tba.tasks.tldr.reward_model import ModelScorer, RewardModel, load_scorer, make_sequence, pad_right

pytestmark = pytest.mark.slow

PROMPTS = ["w3 w4", "w5 w6 w7 w8 w9", "w4", "w3 w4", "w11 w12 w13"]
RESPONSES = ["w5 w6 w7", "w8", "w20 w21 w22 w23 w24 w25", "", "w9 w9"]
FINISHED = [True, False, True, True, False]


def reward_model(seed=0):
    model = RewardModel(tiny_llama(seed).model, mean=0.25, std=2.0)
    torch.nn.init.normal_(model.head.weight)
    torch.nn.init.constant_(model.head.bias, 0.5)
    return model.eval()


@pytest.fixture(autouse=True)
def few_scores_per_pass(monkeypatch):
    monkeypatch.setattr("tba.tasks.tldr.reward_model.SCORES_PER_PASS", 3)


def scorer(model):
    return ModelScorer(model, tiny_tokenizer())


def save_classifier(folder, *, num_labels=1, seed=0):
    """Its padding token is its EOS, as in Pythia."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, num_labels=num_labels, bos_token_id=1, eos_token_id=2, pad_token_id=2,
        initializer_range=0.3,
    )  # fmt: skip
    model = LlamaForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return model


def test_a_sequence_is_prompt_response_and_eos_if_finished():
    tokenizer = tiny_tokenizer()
    assert make_sequence(tokenizer, "w3 w4", "w5", finished=True) == ([3, 4, 5, 2], 2)
    assert make_sequence(tokenizer, "w3 w4", "w5", finished=False) == ([3, 4, 5], 2)


def test_padding_is_on_the_right_and_marked():
    tokenizer = tiny_tokenizer()
    sequences = [
        make_sequence(tokenizer, "w3 w4", "w5", finished=True),
        make_sequence(tokenizer, "w3", "w4", finished=False),
    ]
    batch = pad_right(sequences, device=torch.device("cpu"))
    assert batch.token_ids_NT.tolist() == [[3, 4, 5, 2], [3, 4, 0, 0]]
    assert batch.real_NT.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch.response_NT.tolist() == [[False, False, True, True], [False, True, False, False]]
    assert batch.last_N.tolist() == [3, 1]


def test_scores_in_a_padded_batch_are_those_one_by_one():
    model = scorer(reward_model())
    together = model.score(PROMPTS, RESPONSES, FINISHED)
    alone = [model.score([p], [r], [f])[0] for p, r, f in zip(PROMPTS, RESPONSES, FINISHED)]
    assert together.dtype == np.float64
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert np.std(together) > 0.1


@torch.no_grad()
def test_a_score_adds_up_those_of_the_responses_tokens():
    model = reward_model()
    hidden = model.body(input_ids=torch.tensor([[3, 4, 5, 6, 2]])).last_hidden_state[0]
    pooled = (hidden @ model.head.weight[0] + 0.5)[2:].sum()
    score = scorer(model).score(["w3 w4"], ["w5 w6"], [True])[0]
    assert score == pytest.approx((pooled.item() - 0.25) / 2.0, abs=1e-5)


def test_what_is_saved_is_what_is_loaded(tmp_path):
    model = reward_model()
    model.save(tmp_path, tiny_tokenizer())
    assert json.loads((tmp_path / "reward.json").read_text()) == {"mean": 0.25, "std": 2.0}
    loaded = load_scorer(str(tmp_path), device="cpu")
    np.testing.assert_array_equal(
        loaded.score(PROMPTS, RESPONSES, FINISHED), scorer(model).score(PROMPTS, RESPONSES, FINISHED)
    )


def test_standardised_scores_have_mean_0_and_deviation_1():
    model = reward_model()
    model.standardise(torch.tensor([1.0, 3.0, 5.0]))
    assert (model.mean, model.std) == (3.0, 2.0)
    with pytest.raises(RuntimeError, match="it has learned nothing"):
        model.standardise(torch.tensor([1.0, 1.0]))


def test_a_classifiers_score_is_its_logit_after_the_eos_even_if_that_is_its_padding(tmp_path):
    model = save_classifier(tmp_path)
    loaded = load_scorer(str(tmp_path), device="cpu")
    together = loaded.score(PROMPTS, RESPONSES, FINISHED)
    np.testing.assert_allclose(
        together, [loaded.score([p], [r], [f])[0] for p, r, f in zip(PROMPTS, RESPONSES, FINISHED)], atol=1e-5
    )
    model.config.pad_token_id = None  # so that the model itself reads the last token
    with torch.no_grad():
        expected = model(input_ids=torch.tensor([[3, 4, 5, 6, 7, 2]])).logits.item()
    assert together[0] == pytest.approx(expected, abs=1e-5)


def test_a_classifier_with_two_labels_is_refused_in_words(tmp_path):
    save_classifier(tmp_path, num_labels=2)
    with pytest.raises(ValueError, match="cannot be loaded: it has 2 labels; the logit of one is the score"):
        load_scorer(str(tmp_path))


def test_a_folder_without_a_model_is_refused_in_words(tmp_path):
    with pytest.raises(ValueError, match=r"reward model .* cannot be loaded.*Give a folder"):
        load_scorer(str(tmp_path))


def test_what_the_model_cannot_read_to_the_end_is_refused_in_words(tmp_path):
    save_classifier(tmp_path)
    with pytest.raises(ValueError, match="66 tokens for the reward model, which reads at most 64"):
        load_scorer(str(tmp_path), device="cpu").score(["w3"], [" ".join(["w4"] * 64)], [True])


def test_a_language_model_without_a_trained_head_is_refused_in_words(tmp_path):
    tiny_llama(num_labels=1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"its files have no score.weight, which .*ForSequenceClassification needs"):
        load_scorer(str(tmp_path), device="cpu")
