"""KL and the paper's perplexity, by hand."""

import math

import numpy as np
import pytest

from tba.tasks.evaluation import kl_per_response, perplexity, perplexity_per_sample
from tba.tasks.rewards.pool import FinishedGroup
from tba.types import Completion, Prompt


def group(prompt_tokens: int, *log_probs: list[float]) -> FinishedGroup:
    completions = [
        Completion(
            prompt_id="p",
            sample_index=index,
            token_ids=np.zeros(len(own), np.int32),
            behaviour_log_probs=np.array(own, np.float32),
            policy_log_probs=np.array(own, np.float32),
            version_spans=((0, 0),),
            finish="stop",
        )
        for index, own in enumerate(log_probs)
    ]
    prompt = Prompt(id="p", token_ids=np.zeros(prompt_tokens, np.int32), text="")
    return FinishedGroup(prompt=prompt, completions=completions, texts=[""] * len(completions))


def test_kl_is_summed_over_the_tokens_of_each_response():
    groups = [group(3, [-1.0, -1.0]), group(5, [-0.5])]
    start = [np.array([-2.0, -3.0]), np.array([-1.0])]
    assert kl_per_response(groups, start).tolist() == pytest.approx([1 + 2, 0.5])


def test_perplexity_divides_by_all_tokens_prompts_included():
    groups = [group(3, [-1.0, -1.0]), group(5, [-0.5])]
    start = [np.array([-2.0, -3.0]), np.array([-1.0])]
    # 6 nats over 3 + 2 + 5 + 1 = 11 tokens
    assert perplexity(groups, start) == pytest.approx(math.exp(6 / 11))


def test_perplexity_per_sample_is_that_of_each_response_with_its_own_tokens():
    groups = [group(3, [-1.0, -1.0], [-0.5]), group(5, [-0.5])]
    start = [np.array([-2.0, -3.0]), np.array([-2.0]), np.array([-1.0])]
    # 5 nats over 3 + 2 tokens, 2 over 3 + 1, 1 over 5 + 1
    expected = [math.exp(1), math.exp(0.5), math.exp(1 / 6)]
    assert perplexity_per_sample(groups, start).tolist() == pytest.approx(expected)
